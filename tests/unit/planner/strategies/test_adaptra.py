# SPDX-License-Identifier: Apache-2.0
"""Adaptra: more forwards ahead where a link is slow, as far as memory allows."""

from __future__ import annotations

import pytest
from planner_instances import first_plan, healthy, job

from megatron_resihp.cost.job import JobCost
from megatron_resihp.plan import Replica
from megatron_resihp.planner import NoPlanError
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.strategies.adaptra import adaptra

COST = job(micro_batches=32, bandwidth=1e9)
PLAN = first_plan(COST, tensor=2, replicas=2, pipeline=4)
HEALTH = Health(dict(healthy(PLAN).speed), {(5, 8): 0.1})
"""The link from stage 1 to stage 2 of replica 0."""


def warm_up(replica: Replica, stage: int) -> int:
    """Forwards before the first backward."""
    assert replica.schedule is not None
    return [op.kind for op in replica.schedule.orders[stage]].index("B")


def seconds(cost: JobCost, health: Health = HEALTH) -> tuple[float, float]:
    """Of an iteration before and after."""
    before, after = (evaluate(plan, health, cost).iteration_s for plan in (PLAN, adaptra(PLAN, health, cost)))
    return before, after


def test_a_slow_link_is_absorbed_by_forwards_that_run_ahead() -> None:
    before, after = seconds(COST)
    well = evaluate(PLAN, healthy(PLAN), COST).iteration_s
    assert before > 1.3 * well
    assert after < 1.1 * well
    replica = adaptra(PLAN, HEALTH, COST).replicas[0]
    assert warm_up(replica, 1) > 3, "1F1B takes 3 forwards there before the first backward"


def test_memory_limits_how_far_forwards_run_ahead() -> None:
    tight = job(micro_batches=32, bandwidth=1e9, memory=13 * 2**30)
    assert seconds(tight)[0] == pytest.approx(seconds(COST)[0])
    assert seconds(COST)[1] < seconds(tight)[1] < seconds(tight)[0]


def test_nobody_changes_places_and_shares_stay() -> None:
    plan = adaptra(PLAN, HEALTH, COST)
    assert [replica.stages for replica in plan.replicas] == [replica.stages for replica in PLAN.replicas]
    assert [replica.micro_batches for replica in plan.replicas] == [replica.micro_batches for replica in PLAN.replicas]


def test_nothing_changes_while_all_is_well() -> None:
    assert adaptra(PLAN, healthy(PLAN), COST) == PLAN


def test_dead_workers_are_left_to_others() -> None:
    with pytest.raises(NoPlanError, match="worker 3 is dead; Adaptra reacts to slow links and workers only"):
        adaptra(PLAN, healthy(PLAN, dead=(3,)), COST)
