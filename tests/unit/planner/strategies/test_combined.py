# SPDX-License-Identifier: Apache-2.0
"""A strategy for dead workers, then Greyhound for slow ones."""

from __future__ import annotations

import pytest
from planner_instances import first_plan, healthy, job

from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.strategies.combined import oobleck_greyhound, recycle_greyhound
from megatron_resihp.planner.strategies.oobleck import oobleck
from megatron_resihp.planner.strategies.recycle import recycle
from megatron_resihp.planner.strategy import Strategy

COST = job(micro_batches=32)
PLAN = first_plan(COST, tensor=2, replicas=2, pipeline=4)


@pytest.mark.parametrize(("fail_stop", "both"), [(recycle, recycle_greyhound), (oobleck, oobleck_greyhound)])
def test_slow_workers_cost_less_than_with_the_fail_stop_strategy_alone(fail_stop: Strategy, both: Strategy) -> None:
    health = healthy(PLAN, dead=(2,), slow={12: 0.4})
    plans = [strategy(PLAN, health, COST) for strategy in (fail_stop, both)]
    alone, combined = (evaluate(plan, health, COST).iteration_s for plan in plans)
    assert combined < 0.9 * alone


@pytest.mark.parametrize("both", [recycle_greyhound, oobleck_greyhound])
def test_both_kinds_of_failure_come_and_go(both: Strategy) -> None:
    plan = PLAN
    for dead, slow in [((2,), {}), ((2,), {12: 0.5}), ((2, 9), {12: 0.5, 14: 0.7}), ((), {14: 0.7}), ((), {})]:
        health = healthy(PLAN, dead=dead, slow=slow)
        plan = both(plan, health, COST)
        assert plan.members == health.live
    assert evaluate(plan, health, COST).iteration_s <= 1.02 * evaluate(PLAN, health, COST).iteration_s
