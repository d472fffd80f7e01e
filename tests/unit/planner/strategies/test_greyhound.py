# SPDX-License-Identifier: Apache-2.0
"""Greyhound: micro-batches by speed first, then slow workers and links to where they hurt least."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_instances import first_plan, healthy, job

from megatron_resihp.plan import ParallelPlan
from megatron_resihp.planner import NoPlanError
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.strategies.greyhound import greyhound

COST = job(micro_batches=32)
PLAN = first_plan(COST, tensor=2, replicas=2, pipeline=4)
"""Replica 0: 0 1, 4 5, 8 9, 12 13; replica 1: 2 3, 6 7, 10 11, 14 15; nodes of 4."""
SHORT = replace(COST, until_next_event_s=1.0)
"""Too short a time for changing places to pay."""


def seconds(plan: ParallelPlan, health: Health) -> float:
    return evaluate(plan, health, COST).iteration_s


def test_a_slow_replica_gets_fewer_micro_batches() -> None:
    health = healthy(PLAN, slow={12: 0.5})
    plan = greyhound(PLAN, health, SHORT)
    assert [replica.stages for replica in plan.replicas] == [replica.stages for replica in PLAN.replicas]
    counts = [len(replica.micro_batches) for replica in plan.replicas]
    assert counts[0] == pytest.approx(32 / 3, abs=1)
    assert seconds(plan, health) < 0.75 * seconds(PLAN, health)


def test_shares_are_even_again_when_everybody_is_well() -> None:
    plan = greyhound(greyhound(PLAN, healthy(PLAN, slow={12: 0.5}), SHORT), healthy(PLAN), SHORT)
    assert [len(replica.micro_batches) for replica in plan.replicas] == [16, 16]


def test_slow_workers_of_a_node_are_gathered_in_one_group() -> None:
    health = healthy(PLAN, slow={12: 0.5, 14: 0.5})
    plan = greyhound(PLAN, health, COST)
    assert {12, 14} in [set(members) for replica in plan.replicas for members in replica.stages]
    assert seconds(plan, health) < 0.8 * seconds(greyhound(PLAN, health, SHORT), health)


def test_slow_groups_are_gathered_in_one_replica() -> None:
    health = healthy(PLAN, slow={0: 0.5, 1: 0.5, 6: 0.5, 7: 0.5})
    plan = greyhound(PLAN, health, COST)
    slow = [sum(health.speed[worker] < 1 for worker, _ in replica.workers()) for replica in plan.replicas]
    assert sorted(slow) == [0, 4]


def test_changing_places_is_put_off_while_it_would_not_pay() -> None:
    health = healthy(PLAN, slow={12: 0.5, 14: 0.5})
    by_duration = [
        greyhound(PLAN, health, replace(COST, until_next_event_s=duration)).replicas[0].stages
        for duration in (1.0, 3.0, 10.0, 1000.0)
    ]
    assert by_duration[0] == PLAN.replicas[0].stages != by_duration[-1]
    assert by_duration == sorted(by_duration, key=lambda stages: stages != PLAN.replicas[0].stages)


def test_a_slow_link_is_moved_out_of_the_pipelines() -> None:
    cost = job(micro_batches=8, bandwidth=1e9)
    plan = first_plan(cost, tensor=2, replicas=2, pipeline=4)
    health = Health(dict(healthy(plan).speed), {(5, 8): 0.05})
    after = greyhound(plan, health, cost)
    assert evaluate(after, health, cost).iteration_s == pytest.approx(evaluate(plan, healthy(plan), cost).iteration_s)


def test_dead_workers_are_left_to_others() -> None:
    with pytest.raises(NoPlanError, match="worker 3 is dead; Greyhound reacts to slow workers only"):
        greyhound(PLAN, healthy(PLAN, dead=(3,)), COST)
