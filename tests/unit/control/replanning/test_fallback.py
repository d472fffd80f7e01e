# SPDX-License-Identifier: Apache-2.0
"""Survivors who hold everything and are too few for a replica of the job's own layout go on with a smaller plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_resihp.coding import decode
from megatron_resihp.control.replanning.recovery.fallback import plan_for_few
from megatron_resihp.control.replanning.recovery.inventory import Survivors
from megatron_resihp.control.replanning.recovery.next_plan import uniform_or_less
from megatron_resihp.events.replanning import Planned
from megatron_resihp.plan import Chunk, ParallelPlan, Replica, Schedule, Shard, even_chunks, spelled_out
from megatron_resihp.planner import JobShape, NoPlanError
from megatron_resihp.protocol.job import JobDescription

OWN = even_chunks(4, 2)
SHAPE = JobShape(tensor_parallel=2, pipeline_parallel=2, micro_batches=4, workers_per_node=4)
ARGUMENTS = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "max_position_embeddings": 64,
    "padded_vocab_size": 256, "micro_batch_size": 1,
}  # fmt: skip
JOB = JobDescription(
    micro_batches=4, tensor_parallel=2, pipeline_parallel=2, seq_length=64, sequence_parallel=False, chunks=OWN,
    pipeline_last=True,
)  # fmt: skip
TWO_PIPELINES = ParallelPlan((
    Replica(((0,), (1,)), (0, 2), (Chunk(0, 0, 2), Chunk(1, 2, 6))),
    Replica(((2,), (3,)), (1, 3), (Chunk(0, 0, 4), Chunk(1, 4, 6))),
))  # fmt: skip
V_SHAPE = (Chunk(0, 0, 2), Chunk(1, 2, 4), Chunk(0, 4, 6))


def holding(plan: ParallelPlan, *workers: int) -> dict[int, tuple[Shard, ...]]:
    return {worker: plan.shards_of(worker) for worker in workers}


def plan_for(running: ParallelPlan, *alive: int, **job: Any) -> ParallelPlan:
    return plan_for_few(survivors_of(running, *alive, **job))


def survivors_of(running: ParallelPlan, *alive: int, **job: Any) -> Survivors:
    held = holding(running, *alive)
    return Survivors(SHAPE, OWN, held, spelled_out(running, OWN), running, replace(JOB, **job), ARGUMENTS, 4)


def test_a_replica_that_is_whole_goes_on_alone() -> None:
    plan = plan_for(TWO_PIPELINES, 0, 2, 3)
    [replica] = plan.replicas
    assert (replica.stages, replica.chunks) == (TWO_PIPELINES.replicas[1].stages, TWO_PIPELINES.replicas[1].chunks)
    assert replica.micro_batches == (0, 1, 2, 3)
    assert plan.standbys == {0: (Shard(0, 2, 0, 1),)}, "it keeps what it holds"


def test_survivors_of_broken_replicas_make_one_pipeline() -> None:
    [replica] = plan_for(TWO_PIPELINES, 1, 2).replicas
    assert replica.stages == ((2,), (1,)), "who holds the first layers comes first"
    assert replica.chunks == (Chunk(0, 0, 3), Chunk(1, 3, 6))
    assert replica.micro_batches == (0, 1, 2, 3)


def test_a_replica_may_be_interleaved() -> None:
    layers = (Chunk(0, 0, 2), Chunk(1, 2, 3), Chunk(0, 3, 4), Chunk(1, 4, 6))
    running = ParallelPlan((Replica(((0,), (1,)), (0, 2), layers), Replica(((2,), (3,)), (1, 3), layers)))
    [replica] = plan_for(running, 0, 2, 3).replicas
    assert (replica.stages, replica.chunks) == (((2,), (3,)), layers)


def test_listed_ops_go_with_the_replicas_that_there_were() -> None:
    orders = decode(Schedule, {"name": "explicit", "orders": ["F0.0 F0.2 B0.2 B0.0", "F0.1 B0.1"]})
    running = ParallelPlan((
        Replica(((0,), (1,)), (0,), V_SHAPE, orders), Replica(((2,), (3,)), (1, 2, 3), (Chunk(0, 0, 3), Chunk(1, 3, 6)))
    ))  # fmt: skip
    [replica] = plan_for(running, 0, 1, 3).replicas
    assert replica.schedule is None and len(replica.chunks) == len(replica.stages) == 3


def test_a_plan_that_exceeds_memory_is_none() -> None:
    with pytest.raises(NoPlanError, match="memory exceeded on worker"):
        plan_for(TWO_PIPELINES, 1, 2, device_memory=1000)


def test_the_pipeline_is_taken_where_what_is_left_exceeds_memory() -> None:
    lone = ParallelPlan((Replica(((0,), (1,)), (0, 1), OWN), Replica(((2,),), (2, 3), (Chunk(0, 0, 6),))))
    assert plan_for(lone, 0, 2).replicas[0].stages == ((2,),)
    assert plan_for(lone, 0, 2, device_memory=4_000_000).replicas[0].stages == ((0,), (2,))


def test_who_shares_experts_with_nobody_any_more_has_all_of_them() -> None:
    told = set()
    for degree in (1, 4):
        experts = {"num_experts": 8, "moe_router_topk": 2, "expert_model_parallel_size": degree}
        survivors = replace(survivors_of(TWO_PIPELINES, 1, 2, device_memory=1000), arguments=ARGUMENTS | experts)
        with pytest.raises(NoPlanError, match="memory exceeded on worker") as refused:
            plan_for_few(survivors)
        told.add(str(refused.value))
    assert len(told) == 1, "the plan takes as much memory as if the job had never shared experts"


def test_no_plan_where_sizes_are_not_known() -> None:
    with pytest.raises(NoPlanError, match="have not told the model's sizes"):
        plan_for_few(replace(survivors_of(TWO_PIPELINES, 1, 2), arguments=None))


class TestNextPlan:
    def ask(self, *alive: int, **changed: Any) -> tuple[ParallelPlan, list[dict[str, Any]]]:
        return uniform_or_less(survivors_of(TWO_PIPELINES, *alive, **changed))

    def test_too_few_go_on_and_it_is_said_why(self) -> None:
        plan, [told] = self.ask(0, 2, 3)
        assert plan.members == (0, 2, 3)
        assert told == Planned(
            strategy="fallback", instead_of="uniform", reason="3 survivors are fewer than TP x PP = 4"
        )

    def test_what_is_lost_is_lost(self) -> None:
        with pytest.raises(NoPlanError, match="held by no survivor") as caught:
            self.ask(0, 2)
        assert caught.value.missing

    def test_both_reasons_are_said(self) -> None:
        with pytest.raises(NoPlanError, match="3 survivors are fewer than TP x PP = 4; memory exceeded"):
            self.ask(0, 2, 3, device_memory=1000)
