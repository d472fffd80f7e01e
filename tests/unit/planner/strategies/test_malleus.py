# SPDX-License-Identifier: Apache-2.0
"""Malleus' grouping and orchestration, its integer programs, and what they give together."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_instances import first_plan, healthy, job, relabelled

from megatron_resihp.plan import ParallelPlan
from megatron_resihp.planner import NoPlanError
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.minimax import least_maximum
from megatron_resihp.planner.strategies.common import speed_of
from megatron_resihp.planner.strategies.malleus import malleus


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=4),
    st.integers(1, 8),
    st.integers(0, 1),
)
def test_the_integer_program_finds_the_least_maximum(each: list[tuple[int, int, int]], total: int, least: int) -> None:
    slopes, offsets, most = map(list, zip(*each, strict=True))

    def value(x: tuple[int, ...] | list[int]) -> int:
        return max(slope * count + offset for slope, count, offset in zip(slopes, x, offsets, strict=True))

    possible = [x for x in product(*(range(least, m + 1) for m in most)) if sum(x) == total]
    found = least_maximum(slopes, offsets, most, total, least)
    if found is None:
        assert not possible
        return
    assert tuple(found) in possible
    assert value(found) == min(map(value, possible))


def groups_of(plan: ParallelPlan) -> list[tuple[int, ...]]:
    return [members for replica in plan.replicas for members in replica.stages]


def test_a_straggler_is_taken_out_of_its_group_and_gets_few_layers_or_none() -> None:
    cost = job(layers=16, micro_batches=32, workers_per_node=4)
    plan = first_plan(cost, tensor=4, replicas=2, pipeline=2)
    health = healthy(plan, slow={5: 0.1})
    following = malleus(plan, health, cost)
    together = [members for members in groups_of(following) if 5 in members and len(members) > 1]
    assert not together
    mild = evaluate(plan, healthy(plan), cost).iteration_s
    assert evaluate(following, health, cost).iteration_s < 1.1 * mild
    assert evaluate(plan, health, cost).iteration_s > 3 * mild


def test_faster_pipelines_run_more_micro_batches() -> None:
    cost = job(layers=8, micro_batches=24, workers_per_node=1, memory=400 * 2**30)
    plan = first_plan(cost, tensor=1, replicas=2, pipeline=1)
    following = malleus(plan, healthy(plan, slow={0: 0.5}), cost)
    assert {replica.stages: len(replica.micro_batches) for replica in following.replicas} == {((0,),): 8, ((1,),): 16}


def test_slow_groups_stand_first_where_memory_binds() -> None:
    cost = job(layers=24, micro_batches=32, workers_per_node=2, memory=28 * 2**30)
    plan = first_plan(cost, tensor=2, replicas=1, pipeline=4)
    health = healthy(plan, slow={6: 0.6, 7: 0.6})
    following = malleus(plan, health, cost)
    speeds = [speed_of(members, health) for members in following.replicas[0].stages]
    assert evaluate(following, health, cost).iteration_s < 0.8 * evaluate(plan, health, cost).iteration_s
    assert speeds == sorted(speeds)


def test_of_equally_fast_plans_the_one_that_is_there_already() -> None:
    cost = job(layers=8, micro_batches=8, workers_per_node=2)
    health = Health(dict.fromkeys(range(8), 1.0))
    # Each time it looks at numbers of pipelines near the present one.
    plan = malleus(malleus(first_plan(cost, tensor=2, replicas=2, pipeline=2), health, cost), health, cost)
    names = {0: 5, 5: 0}
    moved = relabelled(plan, {worker: names.get(worker, worker) for worker in plan.members})
    assert malleus(plan, health, cost) == plan
    assert malleus(moved, health, cost) == moved


def test_who_is_back_works_again() -> None:
    cost = job(layers=8, micro_batches=8, workers_per_node=4)
    plan = first_plan(cost, tensor=4, replicas=1, pipeline=2)
    wounded = malleus(plan, healthy(plan, dead=(1, 2)), cost)
    assert sorted(malleus(wounded, healthy(plan), cost).working) == list(range(8))


def test_too_little_memory_is_said() -> None:
    cost = job(layers=8)
    plan = first_plan(cost, tensor=2, replicas=1, pipeline=2)
    tiny = replace(cost, device=replace(cost.device, memory=4 * 2**30))
    with pytest.raises(NoPlanError, match="no grouping of the workers that are left holds the model"):
        malleus(plan, healthy(plan, dead=(0,)), tiny)
    with pytest.raises(NoPlanError, match="no worker is left"):
        malleus(plan, Health({}), cost)
