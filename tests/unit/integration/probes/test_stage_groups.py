# SPDX-License-Identifier: Apache-2.0
"""Whose waits in collectives are told apart from a worker's own compute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import mpu

from megatron_resihp.integration.probes.patches import begin_iteration, stage_groups, wrap_collective
from megatron_resihp.integration.probes.probe_clock import HostClock
from megatron_resihp.integration.probes.probes import Probes
from megatron_resihp.plan import ParallelPlan, Replica

GROUPS = ("tensor_model_parallel", "expert_tensor_parallel", "expert_tensor_and_model_parallel",
          "expert_model_parallel", "tensor_and_context_parallel")  # fmt: skip


class Clock(HostClock):
    """Stands still but for collectives, which take a second each."""

    now = 0.0

    def mark(self) -> float:  # type: ignore[override]
        return self.now

    def collective(self, **_: Any) -> None:
        self.now += 1.0


class Group:
    """Stands for a process group."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = list(ranks)


def groups(monkeypatch: pytest.MonkeyPatch, *ranks: tuple[int, ...]) -> list[Group]:
    """Megatron's table, with a group of its own for each purpose."""
    made = [Group(*each) for each in ranks]
    for name, group in zip(GROUPS, made, strict=True):
        monkeypatch.setattr(mpu, f"get_{name}_group", lambda group=group: group)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group.ranks)
    return made


def waited(used: list[Group], others: Group) -> float:
    """Waiting that a record tells of an op with a collective in each of the groups, and one with others."""
    sent: list[Any] = []
    clock = Clock()
    probes = Probes(0, lambda: clock, lambda sheet: sent.append(sheet.record()))
    plan = ParallelPlan((Replica(((0,),), (0,)),))
    runtime: Any = SimpleNamespace(
        probes=probes, epoch=0, progress=SimpleNamespace(iteration=1),
        view=SimpleNamespace(plan=plan, op_numbers=(0,), rank_order=(0,)),
    )  # fmt: skip
    collective = wrap_collective(runtime, clock.collective)
    begin_iteration(runtime)
    probes.ops.open_forward(0, 0, [])
    for group in (*used, others):
        collective(group=group)
    probes.ops.close_forward(object(), [], None, None)
    probes.finish()
    return float(sent[0].ops["waited"][0])


@pytest.mark.parametrize(
    ("experts", "both", "shared"),
    [((2, 3), (2, 3), (2,)), ((2,), (2, 3), (2, 3))],
    ids=["each member has a cut of all experts", "each member has experts of its own"],
)
def test_experts_wait_for_members_of_the_same_stage(
    monkeypatch: pytest.MonkeyPatch, experts: tuple[int, ...], both: tuple[int, ...], shared: tuple[int, ...]
) -> None:
    made = groups(monkeypatch, (2, 3), experts, both, shared, (2, 3))
    assert waited(made, Group(1, 3)) == 5.0


def test_a_group_with_other_replicas_is_none_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Megatron makes them without experts."""
    made = groups(monkeypatch, (2, 3), (2,), (0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3))
    assert set(stage_groups(made[0])) == {made[0], made[1]}
