# SPDX-License-Identifier: Apache-2.0
"""What work costs in a running job: from arguments alone, on the emulated clock, and from what was fitted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from megatron_resihp.cost.arguments import ARGUMENTS
from megatron_resihp.cost.fitted.fit import fit
from megatron_resihp.cost.fitted.model import CostModel
from megatron_resihp.cost.job import UNTIL_NEXT_EVENT_S
from megatron_resihp.cost.memory import memory_of
from megatron_resihp.cost.model.layers import model_from_arguments
from megatron_resihp.cost.profile import LayerKind, load_profile
from megatron_resihp.cost.running import UnknownCost, cost_of_job
from megatron_resihp.cost.training import training_from_arguments
from megatron_resihp.integration.support import TABLE, Evidence
from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.plan import Chunk, Coordinate, ParallelPlan, Replica, even_chunks
from megatron_resihp.plan.replica import shards_at
from megatron_resihp.plan.rules import Sharing
from megatron_resihp.planner.evaluation import evaluate, run_of
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.search.quick import iteration_seconds
from megatron_resihp.protocol.planning import KnownJob

MODEL = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "max_position_embeddings": 64,
    "padded_vocab_size": 256, "micro_batch_size": 2, "attention_backend": "unfused",
    "transformer_impl": "local",
}  # fmt: skip
JOB = KnownJob(tensor_parallel=2, micro_batches=8, arguments=MODEL)
OWN = even_chunks(4, 2)
F, B, W = OpKind


class Recording(Mapping[str, Any]):
    """Arguments that note which of them were looked at."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values, self.read = values, set[str]()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def test_workers_tell_all_arguments_that_matter_and_may_be_used() -> None:
    """Arguments of hybrids and latent attention are refused with the plugin as yet."""
    latent = {"multi_latent_attention": True, "sequence_parallel": True, "transformer_impl": "local"}
    read: set[str] = set()
    for changed in ({}, {"padded_vocab_size": None, "vocab_size": 256}, {"recompute_granularity": "full"},
                    {"group_query_attention": True, "num_query_groups": 2}, {"fp16": True},
                    {"num_experts": 4}, {"recompute_granularity": "selective"},
                    {"multi_latent_attention": True}, latent, {"fp8": "hybrid"},
                    {"defer_embedding_wgrad_compute": True}):  # fmt: skip
        arguments = Recording({**MODEL, **changed})
        model_from_arguments(arguments)
        training_from_arguments(arguments)
        read |= arguments.read
    used = {name for name, row in TABLE.items() if row.supported and row.evidence is not Evidence.INERT}
    assert read & used <= set(ARGUMENTS)
    assert set(ARGUMENTS) - read <= {"num_query_groups", "accumulate_allreduce_grads_in_fp32"}


def test_the_emulated_device_sets_the_pace() -> None:
    profile = load_profile("a100")
    cost = cost_of_job(replace(JOB, emulated="a100"), 4, 4, OWN, None)
    tokens = 2.0 * profile.sequence
    for degree in (1, 2):
        forward, backward, weight = profile.stage([LayerKind.TRANSFORMER], degree)
        expected = [each.seconds(tokens, tokens * profile.sequence) for each in (forward, backward, weight)]
        assert cost.seconds(degree)[:, 1] == pytest.approx(expected)
    assert cost.transfer(1, 1) == pytest.approx(profile.transfer_seconds((0, 1), tokens))
    assert cost.micro_batches == 8 and cost.workers_per_node == 4


@pytest.mark.parametrize("emulated", [None, "a100"])
def test_layers_that_cannot_leave_weight_gradients_for_later_do_them_in_b(emulated: str | None) -> None:
    """Then a W apart saves no time, and a strategy that hopes for that would predict what never comes."""
    told = replace(JOB, emulated=emulated)
    local, engine = (
        cost_of_job(replace(told, arguments={**MODEL, "transformer_impl": name}), 4, 4, OWN, None)
        for name in ("local", "transformer_engine")
    )
    for of_local, of_engine in (
        (local.seconds(2), engine.seconds(2)), (local.seconds_per_square(2), engine.seconds_per_square(2))
    ):  # fmt: skip
        assert of_engine[F] == pytest.approx(of_local[F])
        assert of_engine[B] == pytest.approx(of_local[B] + of_local[W]) and not of_engine[W].any()
    assert local.seconds(2)[W].any()


@pytest.mark.parametrize("degree", [1, 4])
def test_members_of_a_stage_share_experts_as_they_do_other_layers_whatever_the_job_s_own_degree(degree: int) -> None:
    """Megatron says of every job that as many members share an expert as share its other layers at the start."""
    experts = {"num_experts": 8, "moe_ffn_hidden_size": 512, "sequence_parallel": True}
    arguments = {**MODEL, **experts, "tensor_model_parallel_size": 2}
    said, unsaid = (
        cost_of_job(replace(JOB, arguments={**arguments, "expert_tensor_parallel_size": own}), 4, 4, OWN, None)
        for own in (2, None)
    )
    assert (said.bytes(degree).state == unsaid.bytes(degree).state).all()


def test_workers_of_several_emulated_nodes_use_the_slow_links() -> None:
    near, far = (cost_of_job(replace(JOB, emulated="a100"), workers, 8, OWN, None) for workers in (4, 8))
    assert far.transfer(1, 1) > 2 * near.transfer(1, 1)


def test_a_change_has_to_pay_within_a_finite_time() -> None:
    assert cost_of_job(JOB, 8, 8, OWN, None).until_next_event_s == UNTIL_NEXT_EVENT_S


def fitted(*chunk_seconds: tuple[float, ...], of_tokens: float = 1.0) -> CostModel:
    """Ops of micro-batches of more and of fewer tokens, which take as much longer: F the seconds of each stage's
    chunks, B twice that. `of_tokens`: what a worker has of them."""
    forward = np.array(chunk_seconds)[:, None, :, None]
    size = np.linspace(0.5, 1.5, 30)
    seconds = np.concatenate([forward, 2 * forward, np.full_like(forward, np.nan)], axis=1) * size
    tokens, squares = 128.0 * of_tokens * size, 128.0 * 64 * of_tokens * size
    nothing = fit(tokens, squares, np.full(seconds.shape, np.nan))
    collectives = replace(nothing, gamma=np.zeros(seconds.shape[:-1]))
    return CostModel(fit(tokens, squares, seconds), collectives)


@pytest.mark.parametrize(
    ("terms", "own_sums_s", "rest_s"),
    [
        ({"gradient_sync": 2.0, "optimizer": 1.0, "rest": 0.5}, 2.0, 1.5),
        ({"gradient_sync": 2.0, "optimizer": 1.0, "rest": -1.5}, 1.5, 0.0),
        ({"gradient_sync": 0.1, "optimizer": 0.1, "rest": -1.5}, 0.0, 0.0),
        ({}, 0.0, 0.0),
    ],
    ids=["one after another", "sums that overlap with ops", "ops were overestimated", "nothing was measured"],
)
def test_what_was_measured_outside_of_pipelines(terms: dict[str, float], own_sums_s: float, rest_s: float) -> None:
    cost = cost_of_job(JOB, 8, 8, OWN, replace(fitted((0.3,), (0.5,)), terms=terms))
    assert (cost.own_sums_s, cost.rest_s) == pytest.approx((own_sums_s, rest_s))


def test_what_was_measured_is_of_no_use_beside_a_guess() -> None:
    of_one_stage_more = replace(fitted((0.3,), (0.5,), (0.5,)), terms={"optimizer": 1.0})
    assert cost_of_job(JOB, 8, 8, OWN, of_one_stage_more).rest_s == 0.0


def test_what_was_measured_goes_before_the_peak() -> None:
    cost = cost_of_job(JOB, 8, 8, OWN, fitted((0.3,), (0.5,)))
    seconds = cost.seconds(2)
    assert seconds[F, :3].sum() == pytest.approx(0.3)
    assert seconds[F, 3:].sum() == pytest.approx(0.5)
    assert seconds[[B, W], :3].sum() == pytest.approx(0.6)
    assert seconds[F, 1] == pytest.approx(seconds[F, 2]), "layers alike take as long"
    assert cost.seconds(1)[F, 1] > 1.5 * seconds[F, 1]


def test_those_that_share_experts_have_measured_the_busiest_of_them() -> None:
    """Experts take 2/3 of a layer. Two shared them, and the busiest had half as much again as the mean."""
    experts = {"num_experts": 8, "moe_router_topk": 1, "sequence_parallel": True}
    job = replace(JOB, arguments=MODEL | experts, sharings=(Sharing(1, 2), Sharing()))
    even, uneven = (
        cost_of_job(replace(job, busiest_shares=shares), 8, 8, OWN, fitted((0.3,), (0.5,)))
        for shares in ((), (1.0, 1.5))
    )
    measured, all_experts = (uneven.shared(1, sharers).seconds(2)[F, :3].sum() for sharers in (2, 1))
    assert measured == pytest.approx(0.3, rel=1e-3) == even.seconds(2)[F, :3].sum()
    assert all_experts < 0.9 * measured


def test_the_emulated_device_takes_all_experts_to_be_used_alike() -> None:
    job = replace(JOB, emulated="a100", arguments=MODEL | {"num_experts": 8}, busiest_shares=(1.0, 1.5))
    assert cost_of_job(job, 4, 4, OWN, None).training.busiest_share(8) == 1.0


def test_those_that_share_sequences_have_measured_their_parts() -> None:
    shared = replace(JOB, sharings=(Sharing(2), Sharing()))
    cost = cost_of_job(shared, 8, 8, OWN, fitted((0.3,), (0.5,), of_tokens=0.5))
    assert cost.seconds(2)[F, :3].sum() == pytest.approx(0.6)
    assert cost.shared(2, 1).seconds(2)[F, :3].sum() == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("sharing", "pipeline_last", "workers_per_node", "near"),
    [
        (Sharing(1, 4), True, 2, 1), (Sharing(1, 4), True, 4, 2), (Sharing(1, 4), False, 4, 1),
        (Sharing(4), True, 2, 1), (Sharing(2, 4), True, 4, 2), (Sharing(1, 4), True, 16, 4),
        (Sharing(1, 2, 1), True, 2, 1),
    ],
    ids=["experts", "two on a node", "stages first", "sequences", "both", "one node", "members of a stage"],
)  # fmt: skip
def test_what_those_that_share_exchange_counts_once(
    sharing: Sharing, pipeline_last: bool, workers_per_node: int, near: int
) -> None:
    """It was measured with the rest of their ops. The job's own plan takes what it was measured to take."""
    experts = {**MODEL, "num_experts": 8, "moe_ffn_hidden_size": 512, "sequence_parallel": True, "seq_length": 1 << 16}
    job = replace(JOB, arguments=experts, sharings=(sharing, Sharing()), pipeline_last=pipeline_last)
    sent = cost_of_job(job, 16, workers_per_node, OWN, None).shared(sharing.context, sharing.experts).exchange(2, near)
    least = 3 * max(sent.sum(), 1e-3)
    measured = np.array([[least, 2 * least], [2 * least, 4 * least], [0, 0]])
    cost = cost_of_job(job, 16, workers_per_node, OWN, fitted((least,), (2 * least,), of_tokens=1024 / sharing.context))
    ids, hands = range(0, 16, 2), [(0, 1), (2, 3), (4, 5), (6, 7)]
    stages = [ids[:4], ids[4:]] if pipeline_last else [ids[::2], ids[1::2]]
    replicas = (
        Replica(tuple((first[number], first[number] + 1) for first in stages), hands[number // sharing.context], OWN)
        for number in range(4)
    )
    assert cost.alone is not None
    plan, health = ParallelPlan(tuple(replicas), {}, (), False, *sharing), Health(dict.fromkeys(range(16), 1.0))
    assert run_of(plan, 0, health, cost).seconds() == pytest.approx(measured)


def test_an_estimate_of_the_exchange_does_not_explain_away_what_was_measured() -> None:
    """Of a network that is faster than is assumed."""
    experts = {**MODEL, "num_experts": 8, "moe_ffn_hidden_size": 512, "sequence_parallel": True, "seq_length": 1 << 16}
    job = replace(JOB, arguments=experts, sharings=(Sharing(1, 4, 1), Sharing()))
    alone = cost_of_job(job, 16, 2, OWN, fitted((1e-6,), (2e-6,), of_tokens=1024)).alone
    assert alone is not None and alone[F].sum() > 0


def test_replicas_that_share_are_of_the_jobs_own_size() -> None:
    experts = {**MODEL, "num_experts": 8, "moe_ffn_hidden_size": 512, "sequence_parallel": True}
    told = replace(JOB, arguments=experts, sharings=(Sharing(1, 4, 1), Sharing(1, 2, 1)), equal_rounds=True)
    cost = cost_of_job(told, 16, 8, OWN, None)
    assert cost.shares and (cost.replica_workers, cost.equal_rounds) == (4, True)
    assert (cost.sharings, cost.training.expert_groups) == (told.sharings, 2)
    assert not cost_of_job(JOB, 8, 8, OWN, None).shares


def test_chunks_of_an_interleaved_pipeline_are_measured_apart() -> None:
    own = (Chunk(0, 0, 2), Chunk(1, 2, 3), Chunk(0, 3, 4), Chunk(1, 4, 6))
    seconds = cost_of_job(JOB, 8, 8, own, fitted((0.3, 0.1), (0.2, 0.5))).seconds(2)[F]
    assert [seconds[chunk.first : chunk.end].sum() for chunk in own] == pytest.approx([0.3, 0.2, 0.1, 0.5])
    assert cost_of_job(JOB, 8, 8, own, fitted((0.3,), (0.2,))).alone is None, "of other chunks"


def test_a_fit_of_other_stages_says_nothing_of_these() -> None:
    assert cost_of_job(JOB, 8, 8, OWN, fitted((0.3,), (0.5,), (0.5,))).alone is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"arguments": {**MODEL, "padded_vocab_size": None}}, "vocab_size"),
        ({"arguments": {**MODEL, "num_layers": 6}}, "8 layers, the job has 6"),
        ({"emulated": "no such device"}, "no such device"),
    ],
)
def test_a_job_that_can_not_be_told(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnknownCost, match=reason):
        cost_of_job(replace(JOB, **changed), 8, 8, OWN, None)


def test_a_job_that_says_nothing() -> None:
    with pytest.raises(UnknownCost, match="have not told"):
        cost_of_job(KnownJob(tensor_parallel=2, micro_batches=8), 8, 8, OWN, None)


@pytest.mark.parametrize(
    ("told", "free"), [({}, 92_000), ({"memory_reserve": 20.0}, 80_000), ({"memory_reserve": 0.0}, 100_000)]
)
def test_plans_leave_a_part_of_the_memory_free(told: dict[str, Any], free: int) -> None:
    assert cost_of_job(replace(JOB, device_memory=100_000, **told), 4, 4, OWN, None).device.memory == free


@pytest.mark.parametrize(
    ("told", "slower"),
    [({"carrier": "host"}, True), ({"carrier": "device"}, False), ({"carrier": "host", "emulated": "h800"}, False)],
    ids=["host", "device", "emulated"],
)
def test_what_crosses_between_unlike_stages_takes_as_long_as_its_carrier(told: dict[str, Any], slower: bool) -> None:
    """Stages of like degree may be of a uniform plan, whose results Megatron's own groups carry."""
    cost = cost_of_job(replace(JOB, **told), 4, 4, OWN, None)
    assert (cost.transfer(1, 2) > cost.transfer(2, 2)) is slower


@pytest.mark.parametrize(
    ("told", "most"),
    [({"carrier": "host"}, 2e9), ({"carrier": "device"}, 2e9), ({"emulated": "h800"}, float("inf"))],
    ids=["host", "device", "emulated"],
)
def test_state_goes_through_host_memory_whatever_carries_results(told: dict[str, Any], most: float) -> None:
    assert cost_of_job(replace(JOB, **told), 4, 4, OWN, None).state_bandwidth == most


def replicas(*degrees: int, layers: tuple[Chunk, ...]) -> ParallelPlan:
    """Replicas of two stages of these degrees, with workers in order."""
    workers = iter(range(2 * sum(degrees)))
    stages = [tuple(tuple(islice(workers, degree)) for _ in range(2)) for degree in degrees]
    shares = [tuple(range(first, 8, len(degrees))) for first in range(len(degrees))]
    return ParallelPlan(tuple(Replica(*each, layers) for each in zip(stages, shares, strict=True)), {})


@pytest.mark.parametrize(("carrier", "slower"), [("host", True), ("device", False)])
def test_sums_of_unlike_replicas_take_as_long_as_their_carrier(carrier: str, slower: bool) -> None:
    """Those of a plan that Megatron's own groups can run overlap, and take no time of their own."""
    cost = cost_of_job(replace(JOB, carrier=carrier), 8, 8, OWN, None)
    like, unlike, other_layers = (
        replicas(2, 2, layers=OWN), replicas(2, 1, layers=OWN), replicas(2, 2, layers=(Chunk(0, 0, 2), Chunk(1, 2, 6)))
    )  # fmt: skip
    assert cost.sums(like) == 0.0
    for plan in (unlike, other_layers):
        most = max(use.gradients for use in memory_of(plan, cost.model, cost.training).values())
        assert cost.sums(plan) == (pytest.approx(most / 1.4e9) if slower else 0.0)
        health = Health(dict.fromkeys(plan.members, 1.0))
        evaluation = evaluate(plan, health, cost)
        assert evaluation.iteration_s == max(evaluation.replica_s) + cost.sums(plan)
        assert iteration_seconds(plan, health, cost) == pytest.approx(evaluation.iteration_s)


def test_a_replica_alone_sums_with_nobody() -> None:
    cost = cost_of_job(JOB, 8, 8, OWN, None)
    alone = replicas(2, layers=(Chunk(0, 0, 2), Chunk(1, 2, 6)))
    assert cost.sums(alone) == 0.0
    standby = replace(alone, standbys={4: shards_at(alone.replicas[0].chunks, Coordinate(0, 0), 2)})
    assert cost.sums(standby) > 0.0
