# SPDX-License-Identifier: Apache-2.0
"""ResiHP's three steps, and what they give together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_instances import first_plan, healthy, job

from megatron_resihp.cost.job import JobCost
from megatron_resihp.pipeline.joint import JointProgram, simulate_joint
from megatron_resihp.pipeline.op import Op, OpKind
from megatron_resihp.plan import deal, even_counts
from megatron_resihp.planner import NoPlanError
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.steps.groups import fastest, regroup
from megatron_resihp.planner.steps.migration import Stages, migrate
from megatron_resihp.planner.steps.repartition import Lane, Partitioner
from megatron_resihp.planner.strategies.common import next_plan
from megatron_resihp.planner.strategies.resihp import resihp


def even_job(layers: int, micro_batches: int = 8) -> JobCost:
    """All decoder layers cost the same; embedding and head cost next to nothing."""
    cost = job(layers, micro_batches)
    alone = np.repeat(np.array([[1.0], [1.0], [1.0]]), layers + 2, axis=1)
    alone[:, [0, -1]] = 1e-3
    return replace(cost, alone=alone)


@pytest.mark.parametrize(
    ("speeds", "chosen"),
    [
        ((1.0, 1.0, 1.0, 0.9), (0, 1, 2, 3)),
        ((1.0, 0.4, 1.0, 1.0), (0, 2)),
        ((1.0, 1.0, 0.5, 1.0), (0, 1)),
        ((1.0, 1.0, 1.0), (0, 1)),
        ((0.2, 1.0, 0.3), (1,)),
    ],
)
def test_the_subset_with_the_most_speed_times_members(speeds: Sequence[float], chosen: tuple[int, ...]) -> None:
    members = range(len(speeds))
    assert fastest(members, (1, 2, 4), Health(dict(enumerate(speeds)))) == chosen


def test_no_group_is_smaller_than_memory_asks_for() -> None:
    assert fastest((0, 1, 2, 3), (4,), Health({0: 1.0, 1: 1.0, 2: 1.0, 3: 0.1})) == (0, 1, 2, 3)


def test_who_is_left_over_strengthens_the_weakest_group_of_its_node() -> None:
    cost = job(workers_per_node=8)
    plan = first_plan(cost, tensor=4, replicas=2, pipeline=1)
    grouping = regroup(plan, healthy(plan, dead=(3, 5, 6, 7)), (1, 2, 4), (1,), cost.workers_per_node)
    assert grouping.groups == (((0, 1),), ((4, 2),))
    assert grouping.free == ()


@pytest.mark.parametrize(
    ("lanes", "counts"),
    [
        ([[Lane(2, 1.0)] * 2] * 3, [5, 4, 5]),
        ([[Lane(2, 1.0)] * 2, [Lane(2, 0.4)] * 2, [Lane(2, 1.0)] * 2], [6, 2, 6]),
    ],
)
def test_slow_stages_run_fewer_layers(lanes: list[list[Lane]], counts: list[int]) -> None:
    cost = even_job(12)
    ends = Partitioner(cost).split(lanes, [3, 2, 1], near=[5, 9, 14])
    assert ends is not None
    assert np.diff([0, *ends]).tolist() == counts


def test_a_lane_that_memory_rules_out_does_not_hold_the_stage_back() -> None:
    cost = replace(job(12), device=replace(job().device, memory=20 * 2**30))
    lanes = [Lane(4, 1.0), Lane(1, 1.0)]
    partitioner = Partitioner(cost)
    assert partitioner.fitting(lanes, 1, 0, cost.layers) == [True, False]
    assert partitioner.split([lanes], [1], [cost.layers]) == [cost.layers]


def test_work_of_a_dead_stage_is_done_by_the_other_replica() -> None:
    cost = job(layers=8, micro_batches=8, workers_per_node=2)
    plan = first_plan(cost, tensor=2, replicas=2, pipeline=2)
    following = resihp(plan, healthy(plan, dead=(0, 1)), cost)
    assert [replica.shape for replica in following.replicas] == [(0, 2), (2, 2)]
    assert {(each.chunk, each.replica) for each in following.migrations} >= {(0, 1)}
    assert sum(each.chunk == 0 for each in following.migrations) == 4


def test_replicas_that_are_slow_in_different_stages_help_each_other() -> None:
    cost = job(layers=16, micro_batches=32, workers_per_node=1)
    plan = first_plan(cost, tensor=1, replicas=2, pipeline=4)
    slow = {plan.replicas[0].stages[1][0]: 0.5, plan.replicas[1].stages[2][0]: 0.5}
    health = healthy(plan, slow=slow)
    following = resihp(plan, health, cost)
    assert following.migrations
    alone = evaluate(plan, healthy(plan), cost).iteration_s
    # Without help each replica runs at half the speed of its other stages.
    assert evaluate(plan, health, cost).iteration_s > 1.6 * alone
    assert evaluate(following, health, cost).iteration_s < 1.35 * alone


def test_a_healthy_plan_stands() -> None:
    cost = job(layers=8)
    plan = first_plan(cost, tensor=2, replicas=2, pipeline=2)
    assert resihp(plan, healthy(plan), cost) == plan


def test_everybody_works_again_when_everybody_is_well_again() -> None:
    cost = job(layers=8, workers_per_node=8)
    plan = first_plan(cost, tensor=4, replicas=2, pipeline=2)
    wounded = resihp(plan, healthy(plan, dead=(0, 1, 2, 9), slow={5: 0.3}), cost)
    well = resihp(wounded, healthy(plan), cost)
    assert evaluate(well, healthy(plan), cost).iteration_s == evaluate(plan, healthy(plan), cost).iteration_s


def test_a_node_that_held_a_stage_of_all_replicas_is_done_without_and_taken_back() -> None:
    cost = job(layers=8, workers_per_node=8)
    plan = first_plan(cost, tensor=4, replicas=2, pipeline=2)
    without = resihp(plan, healthy(plan, dead=tuple(range(8))), cost)
    assert [replica.shape for replica in without.replicas] == [(4,), (4,)]
    again = resihp(without, healthy(plan), cost)
    assert sorted(again.working) == list(range(16))
    # As fast as at first or faster: what comes back needs not become a stage.
    assert evaluate(again, healthy(plan), cost).iteration_s <= evaluate(plan, healthy(plan), cost).iteration_s * 1.001


def test_a_replica_that_lost_everybody_is_dropped_and_formed_again() -> None:
    cost = job(layers=8, workers_per_node=4)
    plan = first_plan(cost, tensor=4, replicas=2, pipeline=2)
    gone = tuple(worker for worker, _ in plan.replicas[1].workers())
    without = resihp(plan, healthy(plan, dead=gone), cost)
    assert len(without.replicas) == 1
    again = resihp(without, healthy(plan), cost)
    assert sorted(again.working) == list(range(16))


def test_a_standby_without_room_for_what_it_held_keeps_nothing() -> None:
    # With one replica instead of two each holder has all of its shard's optimizer.
    cost = job(layers=12, micro_batches=4, workers_per_node=4, memory=20 * 2**30)
    plan = first_plan(cost, tensor=4, replicas=2, pipeline=1)
    health = healthy(plan, dead=(2, 3))
    worn = resihp(plan, health, cost)
    assert [replica.stages for replica in worn.replicas] == [((0, 1),), ((4, 5, 6, 7),)]
    rest = (replace(worn.replicas[1], micro_batches=(0, 1, 2, 3)),)
    assert next_plan(rest, worn, health, cost).standbys == {0: None, 1: None}


def test_no_worker_or_too_little_memory_is_said() -> None:
    cost = job(layers=8)
    plan = first_plan(cost, tensor=2, replicas=1, pipeline=2)
    with pytest.raises(NoPlanError, match="no worker is left"):
        resihp(plan, Health({}), cost)
    with pytest.raises(NoPlanError, match="no split of the layers fits"):
        resihp(plan, healthy(plan, dead=(0,)), replace(cost, device=replace(cost.device, memory=8 * 2**30)))


@st.composite
def stages(draw: st.DrawFn) -> tuple[Stages, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Up to three replicas of up to three stages, each of them live somewhere."""
    replicas, count = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    room = np.array(draw(st.lists(st.integers(0, 4), min_size=replicas * count, max_size=replicas * count)))
    room = room.reshape(replicas, count)
    room[0, ~room.any(axis=0)] = 1
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    owner = np.empty(draw(st.integers(replicas, 8)), np.int64)
    for number, share in enumerate(deal(even_counts(len(owner), replicas))):
        owner[list(share)] = number
    seconds = random.random((2, replicas, count))
    return Stages(seconds, room, random.random((count - 1, replicas, replicas))), owner


@given(stages(), st.sampled_from([0.0, 1.0, 3.0, float("inf")]), st.integers(0, 3))
def test_migration_runs_every_op_once_within_memory(
    given: tuple[Stages, np.ndarray[tuple[int], np.dtype[np.int64]]], delta: float, ahead: int
) -> None:
    devices, owner = given
    outcome = migrate(devices, owner, delta, ahead)
    count, micro_batches = outcome.executor.shape
    assert len({tuple(op[1:]) for op in outcome.ops.tolist()}) == len(outcome.ops) == 2 * count * micro_batches
    held = np.zeros_like(devices.room)
    for replica, stage, kind, micro_batch in outcome.ops.tolist():
        assert outcome.executor[stage, micro_batch] == replica
        held[replica, stage] += 1 if kind == 0 else -1
        assert held[replica, stage] <= devices.room[replica, stage]
    assert not held.any()
    if delta == float("inf"):
        live = devices.room[owner].T > 0
        assert (outcome.executor == owner)[live].all()


@given(stages(), st.sampled_from([0.0, 1.0, 3.0]), st.integers(0, 3))
def test_the_simulator_is_no_slower_than_the_migration_foresaw(
    given: tuple[Stages, np.ndarray[tuple[int], np.dtype[np.int64]]], delta: float, ahead: int
) -> None:
    devices, owner = given
    outcome = migrate(devices, owner, delta, ahead)
    count, micro_batches = outcome.executor.shape
    orders: dict[tuple[int, int], list[Op]] = {}
    durations = np.zeros((3, count, micro_batches))
    for replica, stage, kind, micro_batch in outcome.ops.tolist():
        orders.setdefault((replica, stage), []).append(Op(OpKind(kind), stage, micro_batch))
        durations[kind, stage, micro_batch] = devices.seconds[kind, replica, stage]
    boundary = np.arange(count - 1)[:, np.newaxis]
    transfers = devices.transfers[boundary, outcome.executor[:-1], outcome.executor[1:]]
    program = JointProgram(tuple(map(tuple, orders.values())), (count - 1,) * micro_batches)
    assert simulate_joint(program, durations, transfers[np.newaxis]).makespan <= outcome.makespan + 1e-9
