# SPDX-License-Identifier: Apache-2.0
"""Layouts in which no shard, and no part of a shared optimizer with its copy, lives on one node only."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_resihp.plan import ParallelPlan
from megatron_resihp.plan.copies import lost_parts
from megatron_resihp.planner import JobShape, NoPlanError, initial_plan, plan_uniform
from megatron_resihp.planner.spreading import fatal_nodes


def ends_a_job(shape: JobShape, plan: ParallelPlan, node: int) -> bool:
    """Whether the survivors of a node lack something; found out by losing it."""
    survivors = [worker for worker in plan.members if shape.node_of(worker) != node]
    if shape.distributed_optimizer and lost_parts(plan, survivors, shape.node_of):
        return True
    try:
        plan_uniform(shape, {worker: plan.coordinate_of(worker) for worker in survivors}, plan)
    except NoPlanError as error:
        return bool(error.missing)
    return False


@st.composite
def jobs(draw: st.DrawFn) -> tuple[JobShape, int, bool]:
    """A job that wants to be spread, its number of workers, and Megatron's order of ranks."""
    tensor, pipeline, replicas = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 8))
    shape = JobShape(
        tensor, pipeline, replicas, draw(st.integers(1, 12)),
        distributed_optimizer=draw(st.booleans()), spread_replicas=True,
    )  # fmt: skip
    workers = replicas * shape.replica_size
    assume(workers % shape.workers_per_node == 0)
    return shape, workers, draw(st.booleans())


def can_be_spread(shape: JobShape, workers: int) -> bool:
    """Where groups don't cross the borders of nodes."""
    replicas, nodes = workers // shape.replica_size, workers // shape.workers_per_node
    in_turns = replicas % 2 == 0 or nodes > 2 or not shape.distributed_optimizer
    return replicas > 1 and nodes > 1 and in_turns


class TestFirstPlan:
    @given(job=jobs())
    def test_no_node_ends_a_job_where_that_can_be(self, job: tuple[JobShape, int, bool]) -> None:
        shape, workers, pipeline_last = job
        tensor, node = shape.tensor_parallel, shape.workers_per_node
        assume(node % tensor == 0 or tensor % node == 0)
        plan = initial_plan(shape, workers, pipeline_last)
        fatal = [node for node in range(workers // node) if ends_a_job(shape, plan, node)]
        assert not fatal or not can_be_spread(shape, workers)

    @settings(max_examples=20)
    @given(job=jobs())
    def test_fatal_nodes_are_those_whose_loss_ends_a_job(self, job: tuple[JobShape, int, bool]) -> None:
        """In any layout: as it is spread, and as Megatron has it."""
        shape, workers, pipeline_last = job
        for each in (shape, replace(shape, spread_replicas=False)):
            plan = initial_plan(each, workers, pipeline_last)
            nodes = range(workers // shape.workers_per_node)
            fatal = fatal_nodes(plan, shape.node_of, shape.distributed_optimizer)
            assert fatal == {node for node in nodes if ends_a_job(shape, plan, node)}

    @given(job=jobs())
    def test_tensor_parallel_groups_stay_as_they_are(self, job: tuple[JobShape, int, bool]) -> None:
        """All workers have work, and micro-batches go to replicas as before."""
        shape, workers, pipeline_last = job
        plan = initial_plan(shape, workers, pipeline_last)
        before = initial_plan(replace(shape, spread_replicas=False), workers, pipeline_last)
        assert {group for each in plan.replicas for group in each.stages} == {
            group for each in before.replicas for group in each.stages
        }
        assert [each.micro_batches for each in plan.replicas] == [each.micro_batches for each in before.replicas]

    @given(job=jobs())
    def test_what_is_spread_already_is_left_alone(self, job: tuple[JobShape, int, bool]) -> None:
        shape, workers, pipeline_last = job
        before = initial_plan(replace(shape, spread_replicas=False), workers, pipeline_last)
        if not fatal_nodes(before, shape.node_of, shape.distributed_optimizer):
            assert initial_plan(shape, workers, pipeline_last) == before

    def test_replicas_of_one_stage_on_a_node(self) -> None:
        """TP 2 x PP 2 on two nodes of eight: each node gets whole replicas, not a stage of all."""
        plan = initial_plan(JobShape(2, 2, 4, 8, spread_replicas=True), 16)
        assert [replica.stages for replica in plan.replicas] == [
            ((0, 1), (2, 3)), ((4, 5), (6, 7)), ((8, 9), (10, 11)), ((12, 13), (14, 15)),
        ]  # fmt: skip

    def test_copies_of_parts_are_on_other_nodes(self) -> None:
        """As many replicas on a node as before, counted in turns."""
        shape = JobShape(2, 1, 8, 8, distributed_optimizer=True, spread_replicas=True)
        plan = initial_plan(shape, 16)
        assert [shape.node_of(replica.stages[0][0]) for replica in plan.replicas] == [0, 1] * 4

    def test_a_replica_that_does_not_fill_its_node(self) -> None:
        """Three stages on nodes of four: neither of Megatron's orders has all copies on other nodes."""
        shape = JobShape(1, 3, 4, 4, distributed_optimizer=True, spread_replicas=True)
        plans = [initial_plan(replace(shape, spread_replicas=False), 12, last) for last in (True, False)]
        assert all(fatal_nodes(plan, shape.node_of, True) for plan in plans)
        assert not fatal_nodes(initial_plan(shape, 12), shape.node_of, True)

    @pytest.mark.parametrize(("workers", "node"), [(4, 2), (8, 8)], ids=["one replica", "one node"])
    def test_what_cannot_be_spread_is_left_alone(self, workers: int, node: int) -> None:
        shape = JobShape(2, 2, 4, node)
        assert initial_plan(replace(shape, spread_replicas=True), workers) == initial_plan(shape, workers)


class TestAfterDeaths:
    @pytest.mark.parametrize(("spread", "mover"), [(True, 3), (False, 5)])
    def test_a_worker_moves_where_it_brings_a_shard_to_a_second_node(self, spread: bool, mover: int) -> None:
        """Of the first stage only worker 6 on node 1 is left. Unasked, a worker of that node joins it."""
        shape = JobShape(1, 2, 12, 4, spread_replicas=spread)
        before = initial_plan(replace(shape, spread_replicas=True), 8)
        held = {worker: before.coordinate_of(worker) for worker in (1, 3, 5, 6, 7)}
        plan = plan_uniform(shape, held, before)
        assert [worker for worker in plan.working if plan.coordinate_of(worker) != held[worker]] == [mover]
        assert fatal_nodes(plan, shape.node_of, shared_optimizer=False) == (set() if spread else {1})

    @given(job=jobs(), data=st.data())
    def test_spread_plans_have_no_more_fatal_nodes(self, job: tuple[JobShape, int, bool], data: st.DataObject) -> None:
        shape, workers, pipeline_last = job
        before = initial_plan(shape, workers, pipeline_last)
        survivors = data.draw(st.sets(st.sampled_from(before.members), min_size=1))
        held = {worker: before.coordinate_of(worker) for worker in survivors}
        try:
            spread = plan_uniform(shape, held, before)
        except NoPlanError:
            return
        plain = plan_uniform(replace(shape, spread_replicas=False), held, before)
        found = [len(fatal_nodes(plan, shape.node_of, shared_optimizer=False)) for plan in (spread, plain)]
        assert found[0] <= found[1]
