# SPDX-License-Identifier: Apache-2.0
"""The joint strategy as a user sees it: plans that can be run, for any health, and no worse than what is there."""

import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_instances import first_plan, job, relabelled, relabelled_health
from planner_optimum import optimum

from megatron_resihp.cost.device import Device
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.memory import check_plan
from megatron_resihp.cost.model.layers import model_from_arguments
from megatron_resihp.cost.model.presets import PRESETS
from megatron_resihp.cost.room import check_change
from megatron_resihp.cost.training import Training
from megatron_resihp.plan import Chunk, ParallelPlan, Replica
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.job_shape import NoPlanError
from megatron_resihp.planner.search import starts
from megatron_resihp.planner.search.groups import nodes_of
from megatron_resihp.planner.search.tables import tables_of
from megatron_resihp.planner.strategies.joint import Settings, answers, joint
from megatron_resihp.planner.strategies.malleus import malleus
from megatron_resihp.planner.strategies.resihp import resihp

MODEL = model_from_arguments({**PRESETS["llama2-7b"], "num_layers": 12})
DEVICE = Device(312e12, 0.5, {1: 1.0, 2: 0.95, 4: 0.88}, memory=24 * 2**30, latency=2e-5, bandwidth=25e9)
COST = JobCost(MODEL, Training(4096, sequence_parallel=True), DEVICE, micro_batches=8, workers_per_node=4)
HALVES = (Chunk(0, 0, 7), Chunk(1, 7, 14))
BEFORE = ParallelPlan(
    (
        Replica(((0, 1, 2, 3), (4, 5, 6, 7)), (0, 2, 4, 6), HALVES),
        Replica(((8, 9, 10, 11), (12, 13, 14, 15)), (1, 3, 5, 7), HALVES),
    )
)
QUICK = Settings(uneven=True, starts=2, steps=10, seeds=(), effort=0)

health_of_16 = st.dictionaries(st.integers(0, 15), st.floats(0.2, 1.0), min_size=1).map(Health)


@settings(max_examples=60, deadline=None)
@given(health_of_16)
def test_any_health_gives_a_plan_that_fits_or_a_reason(health: Health) -> None:
    try:
        plan = joint(BEFORE, health, COST, QUICK)
    except NoPlanError as error:
        assert "memory" in str(error)
        return
    check_plan(plan, MODEL, COST.training, DEVICE.memory)
    assert set(plan.members) == health.speed.keys()
    assert plan.micro_batch_count == 8
    assert all(len({worker // 4 for worker in members}) == 1 for r in plan.replicas for members in r.stages)


def test_the_number_of_cores_changes_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts are improved at the same time; each has random numbers of its own."""
    health = Health({worker: 0.7 if worker % 5 else 1.0 for worker in range(15)})
    many = Settings(uneven=True, seeds=(), effort=0)
    found = []
    for cores in (1, 4):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        found.append(joint(BEFORE, health, COST, many))
    assert found[0] == found[1]


def test_unlike_workers_leave_no_replica_without_any() -> None:
    """Two fast workers and a slow one for three replicas: power can't be shared out evenly."""
    cost = job(layers=11, micro_batches=4, workers_per_node=1, memory=20 * 2**30)
    health = Health({1: 1.0, 2: 1.0, 3: 0.2})
    plan = joint(first_plan(cost, 1, 2, 2), health, cost, Settings(uneven=True, seeds=(), effort=0))
    assert set(plan.members) == health.speed.keys()


@settings(max_examples=30, deadline=None)
@given(health_of_16)
def test_more_health_is_never_slower_from_the_plan_for_less(health: Health) -> None:
    try:
        less = joint(BEFORE, health, COST, QUICK)
    except NoPlanError:
        return
    healthy = Health({worker: 1.0 for worker in range(16)})
    more = joint(less, healthy, COST, QUICK)
    assert evaluate(more, healthy, COST).iteration_s <= evaluate(less, health, COST).iteration_s


@pytest.mark.parametrize("link", [(0, 4), (3, 14), (9, 13)])
def test_a_slow_link_is_left_unused(link: tuple[int, int]) -> None:
    speed = {worker: 1.0 for worker in range(16)}
    slow, well = Health(speed, {link: 0.001}), Health(speed)
    plan = joint(BEFORE, slow, COST, QUICK)
    assert evaluate(plan, slow, COST).iteration_s == pytest.approx(
        evaluate(joint(BEFORE, well, COST, QUICK), well, COST).iteration_s
    )


# Workers whose speeds differ by less than a step are alike to the search, and names decide which comes first.
health_in_steps = st.dictionaries(st.integers(0, 15), st.integers(40, 200).map(lambda step: step / 200), min_size=1)


@settings(max_examples=20, deadline=None)
@given(health_in_steps.map(Health), st.permutations(range(4)), st.permutations(range(4)))
def test_other_names_give_a_plan_that_is_as_fast(health: Health, nodes: list[int], places: list[int]) -> None:
    label = {worker: 4 * nodes[worker // 4] + places[worker % 4] for worker in range(16)}
    named = relabelled(BEFORE, label), relabelled_health(health, label)
    try:
        plan = joint(BEFORE, health, COST, QUICK)
    except NoPlanError:
        with pytest.raises(NoPlanError):
            joint(*named, COST, QUICK)
        return
    seconds = evaluate(plan, health, COST).iteration_s
    assert evaluate(joint(*named, COST, QUICK), named[1], COST).iteration_s == pytest.approx(seconds)


parts = st.floats(0.01, 0.99)
speed_with_more = st.tuples(st.integers(40, 199), parts, parts)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.integers(0, 15), speed_with_more, min_size=8))
def test_a_bit_more_of_any_speed_is_never_slower(found: dict[int, tuple[int, float, float]]) -> None:
    less, more = (
        Health({worker: (step + pick(parts)) / 200 for worker, (step, *parts) in found.items()}) for pick in (min, max)
    )
    try:
        before = joint(BEFORE, less, COST, QUICK)
    except NoPlanError:
        return
    after = joint(BEFORE, more, COST, QUICK)
    assert evaluate(after, more, COST).iteration_s <= evaluate(before, less, COST).iteration_s


def test_without_uneven_shards_degrees_divide_the_model() -> None:
    health = Health({worker: 1.0 for worker in range(11)})
    plan = joint(BEFORE, health, COST, replace(QUICK, uneven=False))
    assert {degree for replica in plan.replicas for degree in replica.shape} <= {1, 2, 4}
    assert not plan.uneven_shards


def test_the_plan_in_force_stays_where_nothing_pays() -> None:
    healthy = Health({worker: 1.0 for worker in range(16)})
    best = joint(BEFORE, healthy, COST, QUICK)
    assert joint(best, healthy, COST, QUICK) == best


@settings(max_examples=20, deadline=None)
@given(health_of_16)
def test_the_first_answer_fits_too(health: Health) -> None:
    for plan in answers_or_none(health):
        check_plan(plan, MODEL, COST.training, DEVICE.memory)


def answers_or_none(health: Health) -> list[ParallelPlan]:
    try:
        return list(answers(BEFORE, health, COST, QUICK))
    except NoPlanError:
        return []


def test_split_backward_is_used_where_it_is_allowed_and_pays() -> None:
    health = Health({worker: 1.0 for worker in range(15)})
    whole, split = (joint(BEFORE, health, COST, replace(QUICK, zero_bubble=allowed)) for allowed in (False, True))
    assert not any(replica.schedule for replica in whole.replicas)
    assert evaluate(split, health, COST).iteration_s <= evaluate(whole, health, COST).iteration_s


@pytest.mark.parametrize("dead", [(), (3,), (0, 5)])
def test_plans_of_small_jobs_are_near_the_proven_optimum(dead: tuple[int, ...]) -> None:
    cost = replace(COST, device=replace(DEVICE, memory=80 * 2**30))
    health = Health({worker: 0.7 if worker == 6 else 1.0 for worker in range(8) if worker not in dead})
    plan = joint(BEFORE, health, cost, Settings(uneven=True, zero_bubble=False, seeds=(), effort=0))
    seconds = evaluate(plan, health, cost).iteration_s
    assert optimum(health, cost, seconds) >= seconds / 1.05


def test_tuned_pipelines_fit_and_are_no_slower() -> None:
    health = Health({worker: 1.0 for worker in range(13)})
    untuned, fine = (joint(BEFORE, health, COST, replace(QUICK, effort=effort)) for effort in (0, 20_000))
    check_plan(fine, MODEL, COST.training, DEVICE.memory)
    assert evaluate(fine, health, COST).iteration_s <= evaluate(untuned, health, COST).iteration_s


def test_no_plan_of_the_other_strategies_is_faster() -> None:
    health = Health({worker: 0.5 if worker == 2 else 1.0 for worker in range(15)})
    seeded = joint(BEFORE, health, COST, replace(QUICK, seeds=(resihp, malleus)))
    for strategy in (resihp, malleus):
        other = strategy(BEFORE, health, COST)
        assert evaluate(seeded, health, COST).iteration_s <= evaluate(other, health, COST).iteration_s


@pytest.mark.parametrize("memory_gib", [10, 12, 13, 14])
def test_a_plan_that_leaves_room_for_the_state_before_it_is_looked_for(memory_gib: int) -> None:
    """The fastest of all would run out of memory while both states are there; one that does not is hardly slower."""
    health = Health({worker: 1.0 for worker in range(16) if worker not in (0, 3)})
    cost = replace(COST, device=replace(DEVICE, memory=memory_gib * 2**30))
    plan, fastest = joint(BEFORE, health, cost, QUICK), joint(BEFORE, health, COST, QUICK)
    check_change(BEFORE, plan, MODEL, cost.training, cost.device.memory)
    check_plan(plan, MODEL, cost.training, cost.device.memory)
    assert evaluate(plan, health, cost).iteration_s <= 1.1 * evaluate(fastest, health, COST).iteration_s


def test_too_little_memory_is_told() -> None:
    with pytest.raises(NoPlanError, match="memory"):
        joint(BEFORE, Health({0: 1.0}), COST, QUICK)


def test_groupings_that_are_hopeless_change_no_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 70B model on 1,024 GPUs: with each on its own, most of a long pipeline's time is bubbles."""
    model = model_from_arguments(PRESETS["llama2-70b"])
    device = replace(DEVICE, memory=80 * 2**30)
    cost = JobCost(model, Training(4096), device, micro_batches=256, workers_per_node=8)
    speed = {worker: 0.5 if worker % 20 == 7 else 1.0 for worker in range(1024) if worker % 40}
    nodes = nodes_of(Health(speed), 8)
    tables = tables_of(cost, uneven=False)
    found = []
    for hopeless in (1.1, float("inf")):
        monkeypatch.setattr(starts, "_HOPELESS", hopeless)
        around = starts.Starts(nodes, cost.micro_batches, tables.rate.tolist())
        around.look_around(tables)
        found.append(around.found)
    few, every = found
    assert len(few) < len(every)
    assert (few[0].score, few[0].grouping, few[0].replicas) == (every[0].score, every[0].grouping, every[0].replicas)
