# SPDX-License-Identifier: Apache-2.0
"""ReCycle: peers take over a dead stage, into the bubbles of their own pipelines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_instances import first_plan, healthy, job

from megatron_resihp.cost.job import JobCost
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.planner import NoPlanError
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.strategies.drop_replica import drop_replica
from megatron_resihp.planner.strategies.recycle import recycle

COST = job(layers=16, micro_batches=16)
PLAN = first_plan(COST, tensor=1, replicas=4, pipeline=4)
"""Stage s of replica r is worker r + 4 s."""


def seconds(plan: ParallelPlan, cost: JobCost = COST, **changes: tuple[int, ...]) -> float:
    return evaluate(plan, healthy(PLAN, **changes), cost).iteration_s


def test_peers_run_the_micro_batches_of_a_dead_stage_in_turns() -> None:
    plan = recycle(PLAN, healthy(PLAN, dead=(9,)), COST)
    assert [replica.shape for replica in plan.replicas] == [(1, 1, 1, 1), (1, 1, 0, 1), (1, 1, 1, 1), (1, 1, 1, 1)]
    assert [(moved.micro_batch, moved.chunk, moved.replica) for moved in plan.migrations] == [
        (1, 2, 0), (5, 2, 2), (9, 2, 3), (13, 2, 0)
    ]  # fmt: skip
    assert not plan.standbys


def test_few_failures_cost_nothing_where_bubbles_are_large() -> None:
    plan = recycle(PLAN, healthy(PLAN, dead=(9,)), COST)
    assert seconds(plan, dead=(9,)) <= seconds(PLAN)
    assert seconds(drop_replica(PLAN, healthy(PLAN, dead=(9,)), COST), dead=(9,)) > 1.15 * seconds(PLAN)


def test_weight_gradients_wait_for_bubbles_as_far_as_memory_allows() -> None:
    cost = job(layers=16, micro_batches=8)
    plan = first_plan(cost, tensor=1, replicas=2, pipeline=4)
    health = healthy(plan, dead=(3,))
    times = []
    for gigabytes in (80, 40, 24):
        tight = replace(cost, device=replace(cost.device, memory=gigabytes * 2**30))
        times.append(evaluate(recycle(plan, health, tight), health, tight).iteration_s)
    assert times[0] <= times[1] < times[2]


def test_with_one_peer_left_throughput_halves() -> None:
    cost = job(layers=16, micro_batches=64)
    plan = first_plan(cost, tensor=1, replicas=2, pipeline=2)
    health = healthy(plan, dead=(0,))
    slower = evaluate(recycle(plan, health, cost), health, cost).iteration_s
    assert slower / evaluate(plan, healthy(plan), cost).iteration_s == pytest.approx(2, abs=0.4)


def test_failures_are_spread_over_the_stages() -> None:
    plan = recycle(PLAN, healthy(PLAN, dead=(8, 9)), COST)
    alive = [sum(bool(replica.stages[stage]) for replica in plan.replicas) for stage in range(4)]
    assert sorted(alive) == [3, 3, 4, 4], "not 2 of stage 2: a group was moved to it"


def test_a_dead_worker_takes_its_group_with_it() -> None:
    plan = first_plan(job(), tensor=2, replicas=2, pipeline=2)
    after = recycle(plan, healthy(plan, dead=(3,)), job())
    assert set(after.standbys) == {2} and after.replicas[1].shape == (0, 2)


def test_a_stage_without_peers_ends_the_job() -> None:
    with pytest.raises(NoPlanError, match="stage 1 lost all its data-parallel peers"):
        recycle(PLAN, healthy(PLAN, dead=(4, 5, 6, 7)), COST)


def test_everybody_is_back_at_work_after_a_rejoin() -> None:
    broken = recycle(PLAN, healthy(PLAN, dead=(9,)), COST)
    assert recycle(broken, healthy(PLAN), COST) == PLAN


def test_a_second_failure_is_planned_from_the_first_ones_plan() -> None:
    broken = recycle(PLAN, healthy(PLAN, dead=(9,)), COST)
    again = recycle(broken, healthy(PLAN, dead=(9, 14)), COST)
    assert sum(not members for replica in again.replicas for members in replica.stages) == 2
