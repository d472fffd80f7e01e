# SPDX-License-Identifier: Apache-2.0
"""What holds for every strategy."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_instances import relabelled, relabelled_health, situations

from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.memory import check_plan
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.planner import NoPlanError
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.strategies.registry import STRATEGIES

SEARCHES = {"joint"}
"""Strategies that try moves in an order that depends on names, and may stop at another of many good plans."""
CHOOSE_BY_NAME = {"adaptis", "greyhound", "oobleck+greyhound", "recycle+greyhound", "resihp-paper", "restart"}
"""Strategies that take the worker or the link of the lower name where several serve as well: without slow links their
plans are as fast."""


@pytest.mark.parametrize("name", STRATEGIES)
@settings(max_examples=15)
@given(situation=situations())
def test_any_health_gives_a_valid_plan_or_a_reason(name: str, situation: tuple[ParallelPlan, Health, JobCost]) -> None:
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


@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - SEARCHES))
@settings(max_examples=25)
@given(situation=situations(), random=st.randoms(use_true_random=False))
def test_other_names_of_workers_change_nothing_but_names(
    name: str, situation: tuple[ParallelPlan, Health, JobCost], random: Random
) -> None:
    plan, health, cost = situation
    label = _renamed_blocks(plan, cost, random)
    health = Health(health.speed) if name in CHOOSE_BY_NAME else health
    renamed = relabelled_health(health, label)
    found = _plan_or_none(name, plan, health, cost)
    again = _plan_or_none(name, relabelled(plan, label), renamed, cost)
    assert (found is None) == (again is None)
    if found is None or again is None:
        return
    if name not in CHOOSE_BY_NAME:
        assert again == relabelled(found, label)
    times = [evaluate(found, health, cost).iteration_s, evaluate(again, renamed, cost).iteration_s]
    assert times[0] == pytest.approx(times[1])


def _plan_or_none(name: str, plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan | None:
    try:
        return STRATEGIES[name].strategy(plan, health, cost)
    except NoPlanError:
        return None


def _renamed_blocks(plan: ParallelPlan, cost: JobCost, random: Random) -> dict[int, int]:
    """New ids for everybody: nodes are renamed, and in each node the blocks of workers that are a group."""
    block = plan.grid.tensor_parallel
    nodes = sorted({worker // cost.workers_per_node for worker in plan.members})
    last = (max(plan.members) + 1) % cost.workers_per_node
    whole = nodes[:-1] if last else nodes
    renamed = dict(zip(nodes, [*random.sample(whole, len(whole)), *nodes[len(whole) :]], strict=True))
    label = {}
    for node in nodes:
        first = node * cost.workers_per_node
        blocks = range(first, min(first + cost.workers_per_node, max(plan.members) + 1), block)
        for old, new in zip(blocks, random.sample(blocks, len(blocks)), strict=True):
            moved = new - first + renamed[node] * cost.workers_per_node
            label |= {old + offset: moved + offset for offset in range(block)}
    return label


@settings(max_examples=20)
@given(
    situation=situations(),
    names=st.lists(st.sampled_from(sorted(STRATEGIES)), min_size=2, max_size=4),
    random=st.randoms(use_true_random=False),
)
def test_strategies_go_on_from_each_others_plans(
    situation: tuple[ParallelPlan, Health, JobCost], names: list[str], random: Random
) -> None:
    plan, health, cost = situation
    everybody = plan.members
    for name in names:
        try:
            plan = STRATEGIES[name].strategy(plan, health, cost)
        except NoPlanError:
            continue
        assert plan.members == health.live
        check_plan(plan, cost.model, cost.training, cost.device.memory)
        assert evaluate(plan, health, cost).share_of_bound <= 1 + 1e-9
        speeds = {worker: random.choice([1.0, 1.0, 0.5]) for worker in everybody if random.random() < 0.8}
        health = Health(speeds or {everybody[0]: 1.0})
