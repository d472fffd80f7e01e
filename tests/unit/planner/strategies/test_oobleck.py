# SPDX-License-Identifier: Apache-2.0
"""Oobleck: pipelines of unlike length, made from templates for as many nodes as are left."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_instances import first_plan, healthy, job

from megatron_resihp.planner import NoPlanError
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.strategies.oobleck import oobleck
from megatron_resihp.planner.strategies.restart import restart

COST = job(layers=12, micro_batches=16, memory=60 * 2**30)
PLAN = first_plan(COST, tensor=2, replicas=2, pipeline=4)
"""8 groups of 2."""
TIGHT = job(layers=12, micro_batches=16, memory=16 * 2**30)
"""A pipeline takes two groups at least."""


def shapes(cost=COST, plan=PLAN, **changes):
    following = oobleck(plan, healthy(plan, **changes), cost)
    return [len(replica.stages) for replica in following.replicas]


def test_a_pipeline_that_lost_a_group_takes_a_shorter_template() -> None:
    plan = oobleck(PLAN, healthy(PLAN, dead=(5,)), COST)
    assert [replica.shape for replica in plan.replicas] == [(2, 2, 2), (2, 2, 2, 2)]
    assert plan.replicas[1].stages == PLAN.replicas[1].stages and plan.replicas[1].chunks == PLAN.replicas[1].chunks
    assert set(plan.standbys) == {4}
    layers = [chunk.end - chunk.first for chunk in plan.replicas[0].chunks]
    assert sum(layers) == COST.layers and max(layers) - min(layers) <= 2
    shares = [len(replica.micro_batches) for replica in plan.replicas]
    assert shares[0] < shares[1], "the shorter pipeline is slower and gets less"


def test_the_whole_cluster_stays_in_use_where_a_restart_would_idle_a_replica() -> None:
    health = healthy(PLAN, dead=(5,))
    plans = [strategy(PLAN, health, COST) for strategy in (oobleck, restart)]
    kept, restarted = (evaluate(plan, health, COST).samples_per_s for plan in plans)
    assert kept > 1.5 * restarted


def test_a_pipeline_that_is_too_short_borrows_groups_and_is_merged_when_none_are_to_spare() -> None:
    assert shapes(TIGHT, dead=(0, 4, 8)) == [2, 3], "1 and 4 groups: one is lent"
    plan = first_plan(job(layers=12, micro_batches=18, memory=16 * 2**30), tensor=2, replicas=3, pipeline=2)
    assert shapes(TIGHT, plan, dead=(0,)) == [3, 2], "1, 2 and 2 groups: the first joins another"


def test_too_few_groups_for_two_pipelines_end_the_job() -> None:
    assert shapes(TIGHT, dead=(0, 4, 10, 14)) == [2, 2]
    with pytest.raises(NoPlanError, match="3 groups of 2 workers are left; Oobleck needs 2 pipelines of 2"):
        oobleck(PLAN, healthy(PLAN, dead=(0, 4, 10, 14, 8)), TIGHT)


def test_a_layer_that_nobody_holds_ends_the_job() -> None:
    with pytest.raises(NoPlanError, match="the state of layer 0 is not held"):
        oobleck(PLAN, healthy(PLAN, dead=(0, 2)), COST)


def test_groups_that_come_back_are_used_again() -> None:
    broken = oobleck(PLAN, healthy(PLAN, dead=(5,)), COST)
    again = oobleck(broken, healthy(PLAN), COST)
    assert not again.standbys
    assert evaluate(again, healthy(PLAN), COST).samples_per_s >= evaluate(PLAN, healthy(PLAN), COST).samples_per_s


def test_nothing_changes_while_everybody_is_there() -> None:
    assert oobleck(PLAN, healthy(PLAN, slow={3: 0.3}), COST) == PLAN


def test_groups_that_held_the_same_layers_keep_the_order_of_their_pipelines() -> None:
    """Not that of their workers' ids: a slow worker may be in any of them."""
    cost = job(layers=12, micro_batches=18, memory=16 * 2**30)
    plan = first_plan(cost, tensor=2, replicas=3, pipeline=2)
    backwards = replace(plan, replicas=plan.replicas[::-1])
    for before in (plan, backwards):
        first, last = before.replicas[0].stages[0], before.replicas[1].stages[0]
        following = oobleck(
            before, healthy(before, dead=(*before.replicas[0].stages[1], *before.replicas[1].stages[1])), cost
        )
        merged = next(replica.stages for replica in following.replicas if first in replica.stages)
        assert merged.index(first) < merged.index(last)
