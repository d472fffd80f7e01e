"""What a job's planner makes of a strategy's plan before it is proposed."""

from dataclasses import replace

import pytest
from planner_instances import first_plan, healthy, job

from megatron_resihp.plan import Chunk, ParallelPlan, Replica, Schedule, shortened
from megatron_resihp.planner.bridge import plainly_ordered, strategy_named
from megatron_resihp.planner.strategies import joint as search

ZERO_BUBBLE = Schedule("zero-bubble-h1")


def test_one_stage_needs_no_special_order() -> None:
    whole, halves = (Chunk(0, 0, 6),), (Chunk(0, 0, 3), Chunk(1, 3, 6))
    alone = [Replica(((worker,),), (worker,), whole, ZERO_BUBBLE) for worker in range(2)]
    assert shortened(plainly_ordered(ParallelPlan(tuple(alone))), whole).not_rectangular is None
    pipeline = Replica(((1,), (2,)), (1,), halves, ZERO_BUBBLE)
    plan = plainly_ordered(ParallelPlan((alone[0], pipeline)))
    assert [replica.schedule for replica in plan.replicas] == [None, ZERO_BUBBLE]


@pytest.mark.parametrize("splits", [True, False])
def test_layers_that_cannot_split_their_backward_get_no_zero_bubble(
    monkeypatch: pytest.MonkeyPatch, splits: bool
) -> None:
    asked: list[search.Settings] = []
    monkeypatch.setattr(search, "joint", lambda plan, health, cost, settings: asked.append(settings))
    cost = job()
    cost = replace(cost, training=replace(cost.training, splits_backward=splits))
    plan = first_plan(cost, 2, 2, 2)
    strategy_named("joint")(plan, healthy(plan), cost)
    assert [(each.zero_bubble, each.uneven) for each in asked] == [(splits, False)]
