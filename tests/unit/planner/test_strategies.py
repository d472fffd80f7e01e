"""What holds for every strategy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from planner_instances import situations

from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.memory import check_plan
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.planner import NoPlanError
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.strategies.registry import STRATEGIES


@pytest.mark.parametrize("name", STRATEGIES)
@settings(max_examples=25)
@given(situation=situations())
def test_any_health_gives_a_valid_plan_or_a_reason(
    name: str, situation: tuple[ParallelPlan, Health, JobCost]
) -> None:
    plan, health, cost = situation
    strategy = STRATEGIES[name].strategy
    try:
        following = strategy(plan, health, cost)
    except NoPlanError as error:
        assert str(error)
        return
    assert following.members == health.live
    assert following.micro_batch_count == cost.micro_batches
    assert all(_inside_a_node(members, cost) for replica in following.replicas for members in replica.stages)
    check_plan(following, cost.model, cost.training, cost.device.memory)
    assert evaluate(following, health, cost).share_of_bound <= 1 + 1e-9
    assert strategy(plan, health, cost) == following


def _inside_a_node(members: tuple[int, ...], cost: JobCost) -> bool:
    return len({worker // cost.workers_per_node for worker in members}) <= 1
