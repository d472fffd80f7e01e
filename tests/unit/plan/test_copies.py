# SPDX-License-Identifier: Apache-2.0
"""Which deaths a distributed optimizer survives: those that leave each part or its copy."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.plan import Coordinate, ParallelPlan, Replica
from megatron_resihp.plan.copies import (
    copies_at,
    expert_copies_at,
    far_apart,
    in_turns,
    instances_under,
    kept_copies,
    kept_expert_copies,
    lost_parts,
)

ONLY = Coordinate(0, 0)


def alone(worker: int) -> int:
    """The node of a worker that has one for itself."""
    return worker


def replicas(count: int, *standbys: int) -> ParallelPlan:
    each = tuple(Replica(((worker,),), (worker,)) for worker in range(count))
    return ParallelPlan(each, {worker: ONLY for worker in standbys})


@given(st.integers(2, 7), st.integers(0, 2))
def test_any_one_death_leaves_everything(count: int, idle: int) -> None:
    plan = replicas(count, *range(count, count + idle))
    for dead in plan.members:
        assert not lost_parts(plan, set(plan.members) - {dead}, alone)


def test_two_deaths_lose_a_part_only_if_they_are_neighbours() -> None:
    plan = replicas(5)
    for pair in combinations(range(5), 2):
        neighbours = (pair[1] - pair[0]) in (1, 4)
        assert lost_parts(plan, set(range(5)) - set(pair), alone) == ((ONLY,) if neighbours else ())


def test_a_standby_keeps_the_copy_of_a_last_replica() -> None:
    plan = ParallelPlan((Replica(((0, 1),), (0,)),), {2: Coordinate(0, 1), 3: None})
    assert copies_at(plan, Coordinate(0, 1), alone) == ((1, 2),) and copies_at(plan, ONLY, alone) == ()
    assert lost_parts(plan, {0, 2, 3}, alone) == ()
    assert lost_parts(plan, {1, 2, 3}, alone) == (ONLY,)


def test_replicas_with_the_same_experts_keep_copies_for_each_other() -> None:
    """Four replicas in two pairs, and one pair that has each expert once."""
    plan = replace(replicas(4), expert_parallel=2)
    assert copies_at(plan, ONLY, alone) == ((0, 2), (2, 0), (1, 3), (3, 1))
    assert lost_parts(plan, {0, 1}, alone) == () and lost_parts(plan, {0, 2}, alone) == (ONLY,)
    assert copies_at(replace(replicas(2), expert_parallel=2), ONLY, alone) == ((0, 1), (1, 0))


@given(st.integers(2, 8), st.integers(1, 8))
def test_a_node_takes_no_part_with_it_where_all_share_experts(count: int, of_node: int) -> None:
    """Unless it has more than half of them. As copies of experts without a distributed optimizer are placed."""
    plan = replace(replicas(count), expert_parallel=count)
    for node in {worker // of_node for worker in range(count)}:
        survivors = {worker for worker in range(count) if worker // of_node != node}
        lost = lost_parts(plan, survivors, lambda worker: worker // of_node)
        assert bool(lost) == (count - len(survivors) > count / 2)


def test_buddies_in_other_instances_own_the_same_part_where_each_has_every_expert_once() -> None:
    pairs = replace(replicas(4), expert_parallel=2)
    assert instances_under(pairs, 2) == 2 and kept_copies(pairs, 2, alone) == {}
    assert kept_copies(pairs, 1, alone) == {2: 0, 0: 2, 3: 1, 1: 3}
    assert kept_copies(replace(replicas(8), expert_parallel=2), 2, alone)[2] == 0, (
        "each instance has every expert twice"
    )
    assert kept_copies(replicas(4), 2, alone)[1] == 0, "neighbours are in one instance"


@pytest.mark.parametrize(("count", "shares", "expected"), [(4, 1, 2), (3, 1, 1), (2, 1, 1), (8, 2, 2), (6, 2, 1)])
def test_instances_have_as_many_replicas_with_the_same_experts(count: int, shares: int, expected: int) -> None:
    assert instances_under(replace(replicas(count), expert_parallel=shares), 2) == expected


@given(st.integers(2, 8), st.integers(1, 8))
def test_a_copy_of_experts_is_on_another_node_unless_one_has_more_than_half(count: int, of_node: int) -> None:
    """Without a distributed optimizer, too. Each worker keeps one and is kept one of."""
    plan = replace(replicas(count), expert_parallel=count)
    edges = expert_copies_at(plan, ONLY, lambda worker: worker // of_node)
    assert sorted(owner for owner, _ in edges) == sorted(keeper for _, keeper in edges) == list(range(count))
    together = [edge for edge in edges if edge[0] // of_node == edge[1] // of_node]
    assert bool(together) == (min(of_node, count) > count / 2)
    assert kept_expert_copies(plan, lambda worker: worker // of_node) == {keeper: owner for owner, keeper in edges}


def test_experts_that_others_hold_too_have_no_copy() -> None:
    assert expert_copies_at(replace(replicas(4), expert_parallel=2), ONLY, lambda worker: worker) == ()
    assert kept_expert_copies(replicas(2), lambda worker: worker) == {}


def test_a_ring_of_two_nodes_goes_to_and_fro() -> None:
    assert far_apart(range(8), lambda worker: worker // 4) == [0, 4, 1, 5, 2, 6, 3, 7]


@given(st.integers(1, 9), st.integers(0, 2))
def test_parts_are_passed_on_in_at_most_three_turns(count: int, idle: int) -> None:
    edges = copies_at(replicas(count, *range(count, count + idle)), ONLY, alone)
    ordered = in_turns(edges)
    assert sorted(ordered) == sorted(edges)
    free_at: dict[int, int] = {}
    for owner, buddy in ordered:
        turn = max(free_at.get(owner, 0), free_at.get(buddy, 0)) + 1
        free_at[owner] = free_at[buddy] = turn
    assert max(free_at.values(), default=0) <= 3
