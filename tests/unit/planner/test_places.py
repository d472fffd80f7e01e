# SPDX-License-Identifier: Apache-2.0
"""Workers of a next plan stay where their state is, as far as that makes no stage slower."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planner_instances import first_plan, healthy, job, situations

from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.memory import check_plan
from megatron_resihp.plan import ParallelPlan, Shard
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.job_shape import NoPlanError
from megatron_resihp.planner.moves import bytes_to_move, lacking_bytes, prefix_bytes, shards_held
from megatron_resihp.planner.places import keep_places
from megatron_resihp.planner.strategies.joint import Settings, joint

COST = job(layers=8, memory=40 * 2**30)
QUICK = Settings(uneven=True, starts=2, steps=10, seeds=(), effort=0, zero_bubble=False)


def moved(before: ParallelPlan, after: ParallelPlan, cost: JobCost = COST) -> float:
    return sum(bytes_to_move(before, after, cost).values())


def searched(before: ParallelPlan, health: Health, cost: JobCost = COST) -> ParallelPlan:
    return joint(before, health, cost, QUICK)


shapes = st.sampled_from([(1, 2, 4), (1, 4, 2), (2, 2, 2), (2, 1, 4), (4, 1, 2), (4, 2, 1)])
speeds_of_8 = st.lists(st.sampled_from([1.0, 1.0, 1.0, 1.0, 0.5, 0.0]), min_size=8, max_size=8)


@settings(max_examples=25, deadline=None)
@given(shapes, speeds_of_8)
@example((4, 1, 2), [1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.0])  # a group of two for two single workers elsewhere
def test_no_exchange_of_workers_moves_less(shape: tuple[int, int, int], speeds: list[float]) -> None:
    before = first_plan(COST, *shape)
    health = Health({worker: speed for worker, speed in enumerate(speeds) if speed > 0})
    try:
        after = searched(before, health)
    except NoPlanError:
        return
    kept = keep_places(before, after, health, COST)
    assert moved(before, kept) == pytest.approx(least_by_trying(before, after, health))
    assert evaluate(kept, health, COST).iteration_s <= evaluate(after, health, COST).iteration_s


def test_as_many_nodes_as_workers_do_not_hold_up_planning() -> None:
    """Trying each worker in each node, one by one, would take the better part of an hour."""
    cost = replace(COST, workers_per_node=1)
    before = first_plan(cost, 1, 4, 2)
    health = Health(dict(enumerate([0.5, 1.0, 1.0, 0.7, 1.0, 0.9, 0.7, 0.9])))
    after = searched(before, health, cost)
    kept = keep_places(before, after, health, cost)
    assert moved(before, kept, cost) == pytest.approx(least_by_trying(before, after, health, cost))


def least_by_trying(before: ParallelPlan, after: ParallelPlan, health: Health, cost: JobCost = COST) -> float:
    """Bytes to move with the best of all exchanges that make no stage slower and keep groups inside nodes."""
    groups = [members for replica in after.replicas for members in replica.stages]
    held, wanted = shards_held(before, cost), shards_held(replace(after, standbys={}), cost)
    places = [(min(health.speed[mate] for mate in group), group, worker) for group in groups for worker in group]
    lacking = lacking_bytes(
        [held.get(worker, ()) for worker in health.live],
        [wanted[worker] for _, _, worker in places],
        prefix_bytes(cost, len(after.replicas)),
    )
    least = float("inf")

    def extend(place: int, taken: tuple[int, ...], total: float) -> None:
        nonlocal least
        if total >= least:
            return
        if place == len(places):
            least = total
            return
        speed, group, _ = places[place]
        for row, worker in enumerate(health.live):
            mate = taken[-1] if place and places[place - 1][1] == group else worker
            near = worker // cost.workers_per_node == mate // cost.workers_per_node
            if worker not in taken and near and health.speed[worker] >= speed:
                extend(place + 1, (*taken, worker), total + float(lacking[row, place]))

    extend(0, (), 0.0)
    return least


@settings(max_examples=40, deadline=None)
@given(situations())
def test_no_plan_gets_slower_or_stops_fitting(situation: tuple[ParallelPlan, Health, JobCost]) -> None:
    before, health, cost = situation
    try:
        after = searched(before, health, cost) if health.speed else None
    except NoPlanError:
        return
    if after is not None:
        kept = keep_places(before, after, health, cost)
        check_plan(kept, cost.model, cost.training, cost.device.memory)
        assert kept.members == health.live
        assert evaluate(kept, health, cost).iteration_s <= evaluate(after, health, cost).iteration_s * (1 + 1e-12)
        assert moved(before, kept, cost) <= moved(before, after, cost) * (1 + 1e-9)


def test_the_joint_strategy_keeps_places() -> None:
    before = first_plan(COST, 4, 1, 2)
    health = healthy(before, dead=(5,))
    after = searched(before, health)
    assert moved(before, after) == pytest.approx(least_by_trying(before, after, health))


def test_nothing_moves_where_health_is_the_same() -> None:
    health = healthy(first_plan(COST, 4, 1, 2), dead=(5,))
    once = joint(first_plan(COST, 4, 1, 2), health, COST)
    assert moved(once, joint(once, health, COST)) == 0


def test_standbys_keep_what_they_hold() -> None:
    before = first_plan(COST, 1, 4, 2)
    half = replace(first_plan(COST, 1, 2, 2), standbys=dict.fromkeys(range(4, 8)))
    kept = keep_places(before, half, healthy(before), COST)
    assert moved(before, kept) == 0
    assert sorted(kept.standbys.values(), key=str) == [(Shard(0, 5, 0, 1),)] * 2 + [(Shard(5, 10, 0, 1),)] * 2
    full = replace(COST, device=replace(COST.device, memory=1))
    assert set(keep_places(before, half, healthy(before), full).standbys.values()) == {None}


def test_many_unlike_groups_find_back_to_their_layers() -> None:
    cost = job(layers=78, workers_per_node=8)
    before = first_plan(cost, 4, 1, 80)
    replica = before.replicas[0]
    turned = replace(before, replicas=(replace(replica, stages=replica.stages[::-1]),))
    assert moved(before, turned, cost) > 0
    assert moved(before, keep_places(before, turned, healthy(before), cost), cost) == 0
