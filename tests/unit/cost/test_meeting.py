# SPDX-License-Identifier: Apache-2.0
"""On the emulated clock, workers that share experts or sequences take as long as planners say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_resihp.cost.emulated import cost_on
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.meeting import meeting_of
from megatron_resihp.cost.profile import DeviceProfile, LayerKind, PassCost, load_profile
from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.plan import OwnSplit, ParallelPlan, Replica, even_chunks
from megatron_resihp.plan.rules import Sharing
from megatron_resihp.planner.evaluation import run_of
from megatron_resihp.planner.health import Health

F, B, W = OpKind
MODEL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 127, "seq_length": 32,
    "max_position_embeddings": 32, "transformer_impl": "local",
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 8, "moe_ffn_hidden_size": 32}
CHUNKS = even_chunks(2, 1)
PROFILE = replace(load_profile("a100"), workers_per_node=2)
ATTENDS_LITTLE = replace(PROFILE, sequence=1024)
"""Keys and values of others come later than a worker has attended to its own."""


def cost_of(profile: DeviceProfile, **more: Any) -> JobCost:
    return cost_on(profile, MODEL | more, OwnSplit(CHUNKS, 1), workers=4, micro_batches=8, memory=1 << 40)


def plan_of(replicas: int, **sharing: int) -> ParallelPlan:
    groups = replicas // sharing.get("context_parallel", 1)
    rows = (Replica(((w,),), tuple(range(w * groups // replicas, 8, groups)), CHUNKS) for w in range(replicas))
    return ParallelPlan(tuple(rows), **sharing)


def padded(plan: ParallelPlan, cost: JobCost, profile: DeviceProfile, kinds: list[LayerKind]) -> list[float]:
    """Seconds of F and B of worker 0, as the emulated clock pads them."""
    meeting = meeting_of(plan, 0, cost)
    assert meeting is not None
    tokens = profile.sequence / plan.context_parallel
    forward, backward, weight = (
        each.scaled(factor, factor) for each, factor in zip(profile.stage(kinds, 1), meeting.work[:, 0], strict=True)
    )
    workload = tokens, tokens * profile.sequence
    passes: tuple[PassCost, PassCost] = (forward, backward + weight)
    return [each.seconds(*workload) + meeting.seconds[kind, 0] for each, kind in zip(passes, (F, B), strict=True)]


@pytest.mark.parametrize(
    ("profile", "layer", "replicas", "sharing"),
    [
        (PROFILE, LayerKind.MOE, 4, {"expert_parallel": 4}),
        (PROFILE, LayerKind.MOE, 4, {"expert_parallel": 2}),
        (PROFILE, LayerKind.MOE, 3, {"expert_parallel": 3, "uneven_experts": 8}),
        (PROFILE, LayerKind.TRANSFORMER, 4, {"context_parallel": 4}),
        (ATTENDS_LITTLE, LayerKind.TRANSFORMER, 4, {"context_parallel": 4}),
        (ATTENDS_LITTLE, LayerKind.TRANSFORMER, 4, {"context_parallel": 2}),
    ],
)
def test_an_op_takes_what_planners_say(
    profile: DeviceProfile, layer: LayerKind, replicas: int, sharing: dict[str, int]
) -> None:
    cost = cost_of(profile, **(EXPERTS if layer is LayerKind.MOE else {}))
    plan = plan_of(replicas, **sharing)
    planned = run_of(plan, 0, Health(dict.fromkeys(range(replicas), 1.0)), cost).seconds()[[F, B], 0]
    found = padded(plan, cost, profile, [LayerKind.EMBEDDING, layer, layer, LayerKind.HEAD])
    # Launches aren't shared, which planners leave out.
    assert found == pytest.approx(planned, rel=0.01 if profile is PROFILE else 0.05)


def test_who_shares_nothing_meets_nobody() -> None:
    assert meeting_of(plan_of(4), 0, cost_of(PROFILE)) is None


def test_experts_in_unequal_numbers_are_more_work_for_some_and_for_all_who_wait() -> None:
    meeting = meeting_of(plan_of(3, expert_parallel=3, uneven_experts=8), 2, cost_of(PROFILE, **EXPERTS))
    assert meeting is not None
    assert np.all(meeting.work[[F, W], 0] > 1.01) and np.all(meeting.work < 9 / 8)


def test_tokens_take_longer_between_nodes() -> None:
    cost = cost_of(PROFILE, **EXPERTS)
    seconds = []
    for experts in (2, 4):
        meeting = meeting_of(plan_of(4, expert_parallel=experts), 0, cost)
        assert meeting is not None
        seconds.append(float(meeting.seconds[F, 0]))
    assert seconds[1] > 3 * seconds[0] > 0


def test_lookups_are_shared_with_the_sequence() -> None:
    """They take time, and no FLOPs by which planners would share them out."""
    cost = cost_of(PROFILE)
    assert cost.shared(4, 1).seconds(1) == pytest.approx(cost.seconds(1) / 4)


def test_keys_and_values_that_come_while_a_worker_attends_cost_nothing() -> None:
    """The device attends as fast as its profile says."""
    assert not cost_of(PROFILE).shared(2, 1).exchange(1, 2).any()
    assert cost_of(ATTENDS_LITTLE).shared(4, 1).exchange(1, 2).any()


def test_degrees_that_cannot_share_the_layers_are_left_out() -> None:
    cost = cost_on(PROFILE, MODEL, OwnSplit(CHUNKS, 1), workers=8, micro_batches=8, memory=1 << 40)
    assert sorted(cost.measured) == [1, 2, 3, 4]
    assert replace(cost, sharings=(Sharing(2, 1), Sharing())).shared(2, 1).measured.keys() == cost.measured.keys()
