# SPDX-License-Identifier: Apache-2.0
"""Assigns workers to the places of a next plan so that few bytes move. Imports numpy, scipy, `plan`, `cost` and this
package.

A place is a replica, stage and tensor-parallel rank. Workers are interchangeable where that makes no stage slower and
keeps each tensor-parallel group inside a node. Two kinds of exchange alternate until neither gains anything; each is an
assignment problem. In one, groups (idle ones too) take the places of groups. In the other, nodes take the places of
nodes, worker by worker. In jobs of few workers, each group is then tried in every node.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import permutations
from typing import Final, NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from megatron_resihp.cost.job import Array, JobCost
from megatron_resihp.plan import Kept, ParallelPlan, Shard
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.moves import Index, lacking_bytes, prefix_bytes, shards_held, sharers_under

_MOST: Final = 320
"""Most groups or nodes for an assignment of least cost; above it, groups go by their middle layer and nodes stay."""
_MOST_PAIRS: Final = 16_384
"""The limit for different pairs of up to four members, whose orders are all tried at once."""
_MOST_LARGE_PAIRS: Final = 512
"""The limit for pairs with more members, each of which is an assignment problem."""
_MOST_ROUNDS: Final = 4
_FEW: Final = 4
_FEW_WORKERS: Final = 8
_ROUNDING: Final = 64
"""Bytes by which sums of rounded parts may differ from the rounded sum."""
_ANYWHERE: Final = -1
_NOWHERE: Final = -2


def keep_places(before: ParallelPlan, after: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    """The plan with other workers in its places: no slower, fewer bytes to move, and standbys keep the state they hold.

    A worker with a slow link stays in its group, and that group stays in its place.

    Args:
        before: the plan in force; workers that are dead by now are ignored.
        after: the next plan, made of all live workers.
        health, cost: of the workers and the job.

    Raises:
        PlanError: the layers of a plan differ from the model's.
    """
    held = shards_held(before, cost)
    situation, at = _situation(held, after, health, cost)
    live = health.live
    workers = [live[worker] for worker in _settled(situation, at)]
    at_next_place = iter(workers)
    replicas = tuple(
        replace(each, stages=tuple(tuple(next(at_next_place) for _ in members) for members in each.stages))
        for each in after.replicas
    )
    idle = sorted(health.speed.keys() - set(workers))
    standbys: dict[int, Kept] = dict.fromkeys(idle)
    copies = max(sum(all(each.stages) for each in replicas), 1)
    has_room = {
        shards: _has_room(shards, copies, after, cost)
        for shards in dict.fromkeys(held.get(worker, ()) for worker in idle)
        if shards
    }
    standbys |= {worker: held[worker] for worker in idle if has_room.get(held.get(worker, ()), False)}
    return replace(after, replicas=replicas, standbys=standbys)


def _has_room(shards: Sequence[Shard], copies: int, after: ParallelPlan, cost: JobCost) -> bool:
    """Whether a standby can keep its shards; with fewer holders, shares of a distributed optimizer are larger."""
    state = sum(cost.bytes(shard.tp_degree, copies, after).state[shard.first : shard.end].sum() for shard in shards)
    return bool(state <= cost.device.memory - _ROUNDING)


class _WorkerKind(NamedTuple):
    """A class of interchangeable workers.

    Attributes:
        held: the state that they hold.
        speed: p.
        group: the only group that they may be in; ANYWHERE if any, NOWHERE if they must stay idle.
    """

    held: tuple[Shard, ...]
    speed: float
    group: int


class _PlaceKind(NamedTuple):
    """A class of interchangeable places.

    Attributes:
        wanted: the state that a worker needs there.
        speed: the least speed that a worker needs there.
        group: the number of the place's group if its workers must stay in it, otherwise ANYWHERE.
    """

    wanted: tuple[Shard, ...]
    speed: float
    group: int


class _Situation(NamedTuple):
    """Live workers and the places of a plan as numbers from 0 on.

    Attributes:
        kind: of each worker, a row of `lacking`.
        place_kind: of each place, a column of `lacking`.
        groups: the places of each tensor-parallel group.
        nodes: the workers of each node.
        kinds, place_kinds: the kinds that these numbers stand for.
        lacking: bytes that workers of a kind lack at places of a kind; infinite where they may not be.
    """

    kind: list[int]
    place_kind: list[int]
    groups: list[range]
    nodes: list[list[int]]
    kinds: list[_WorkerKind]
    place_kinds: list[_PlaceKind]
    lacking: Array


def _situation(
    held: Mapping[int, tuple[Shard, ...]], after: ParallelPlan, health: Health, cost: JobCost
) -> tuple[_Situation, list[int]]:
    """The live workers and the plan's places, and the worker that the plan has at each place."""
    live = health.live
    linked = {worker for pair in health.link for worker in pair}
    stages = [members for replica in after.replicas for members in replica.stages if members]
    own = {worker: group for group, members in enumerate(stages) for worker in members}
    kind, kinds = _numbered(
        _WorkerKind(
            held.get(worker, ()), health.speed[worker], own.get(worker, _NOWHERE) if worker in linked else _ANYWHERE
        )
        for worker in live
    )
    wanted = shards_held(replace(after, standbys={}), cost)
    places: list[_PlaceKind] = []
    groups: list[range] = []
    for group, members in enumerate(stages):
        groups.append(range(len(places), len(places) + len(members)))
        slowest = min(health.speed[worker] for worker in members)
        tied = _ANYWHERE if linked.isdisjoint(members) else group
        places += [_PlaceKind(wanted[worker], slowest, tied) for worker in members]
    place_kind, place_kinds = _numbered(places)
    number = {worker: index for index, worker in enumerate(live)}
    nodes: dict[int, list[int]] = {}
    for worker in live:
        nodes.setdefault(worker // cost.workers_per_node, []).append(number[worker])
    situation = _Situation(
        kind=kind,
        place_kind=place_kind,
        groups=groups,
        nodes=list(nodes.values()),
        kinds=kinds,
        place_kinds=place_kinds,
        lacking=_lacking(kinds, place_kinds, prefix_bytes(cost, sharers_under(after, cost))),
    )
    return situation, [number[worker] for members in stages for worker in members]


def _numbered[Value: Hashable](values: Iterable[Value]) -> tuple[list[int], list[Value]]:
    """The number of each value, and the distinct values in the order of their numbers."""
    numbers: dict[Value, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values], list(numbers)


def _middle(shards: Sequence[Shard]) -> float:
    """The middle of the layers that the shards cover."""
    layers = sum(shard.end - shard.first for shard in shards)
    return sum((shard.first + shard.end) * (shard.end - shard.first) for shard in shards) / max(2 * layers, 1)


def _lacking(workers: Sequence[_WorkerKind], places: Sequence[_PlaceKind], size: Array) -> Array:
    """`_Situation.lacking`, [kinds of workers, kinds of places]."""
    row, held = _numbered(worker.held for worker in workers)
    column, wanted = _numbered(place.wanted for place in places)
    lacking = lacking_bytes(held, wanted, size)[np.ix_(row, column)]
    speed, needed = np.array([worker.speed for worker in workers]), np.array([place.speed for place in places])
    tied, group = np.array([worker.group for worker in workers]), np.array([place.group for place in places])
    elsewhere = (tied[:, np.newaxis] != _ANYWHERE) & (tied[:, np.newaxis] != group)
    return np.where((speed[:, np.newaxis] < needed) | elsewhere, np.inf, lacking)


def _settled(situation: _Situation, at: list[int]) -> list[int]:
    """The worker at each place once no exchange gains anything."""
    least = _total(situation, at)
    for _ in range(_MOST_ROUNDS):
        moved = _nodes_exchanged(situation, _groups_exchanged(situation, at))
        total = _total(situation, moved)
        if not total < least:
            break
        at, least = moved, total
    return _tried_everywhere(situation, at) if len(situation.kind) <= _FEW_WORKERS else at


def _tried_everywhere(situation: _Situation, at: list[int]) -> list[int]:
    """The best of all ways to place groups in nodes, where each worker takes the place at which it lacks least.

    Groups are placed one after the other. A branch ends once it lacks as much as the best way so far, since more places
    in a node never lack less. Of nodes that are alike so far, only one is tried.
    """
    best, least = None, _total(situation, at)
    known: dict[tuple[int, tuple[int, ...]], float] = {}
    places_of: list[list[int]] = [[] for _ in situation.nodes]
    lacked = [0.0] * len(situation.nodes)
    alike = _numbered(tuple(sorted(situation.kind[worker] for worker in each)) for each in situation.nodes)[0]

    def put(group: int) -> None:
        nonlocal best, least
        if group == len(situation.groups):
            best, least = [list(places) for places in places_of], sum(lacked)
            return
        tried = set()
        for node, there in enumerate(places_of):
            state = alike[node], tuple(there)
            if state in tried:
                continue
            tried.add(state)
            kept, lacked_there = list(there), lacked[node]
            there += situation.groups[group]
            lacked[node] = _least_in(situation, node, there, known)
            if sum(lacked) < least:
                put(group + 1)
            places_of[node][:], lacked[node] = kept, lacked_there

    put(0)
    moved = list(at)
    for node, places in enumerate(best or ()):
        _seat(situation, situation.nodes[node], places, moved)
    return moved


def _least_in(
    situation: _Situation, node: int, places: Sequence[int], known: dict[tuple[int, tuple[int, ...]], float]
) -> float:
    """Bytes that a node's workers lack at these places; places of one kind are interchangeable."""
    key = node, tuple(sorted(situation.place_kind[place] for place in places))
    if key not in known:
        kinds = np.array([situation.kind[worker] for worker in situation.nodes[node]])
        known[key] = _least(situation.lacking, kinds, np.array(key[1], np.int64)[:, np.newaxis])
    return known[key]


def _total(situation: _Situation, at: Sequence[int]) -> float:
    kinds = [situation.kind[worker] for worker in at]
    return float(situation.lacking[kinds, situation.place_kind].sum())


def _groups_exchanged(situation: _Situation, at: Sequence[int]) -> list[int]:
    """Assign working groups, and idle groups of the same degree, to the places of groups of that degree."""
    by_degree: dict[int, list[Sequence[int]]] = {}
    for each in situation.groups:
        by_degree.setdefault(len(each), []).append(each)
    moved = list(at)
    for degree, places_of in by_degree.items():
        members = [[moved[place] for place in places] for places in places_of]
        groups = members + _idle_groups(situation, moved, degree)
        costs = _costs(situation, groups, places_of)
        taken = _in_order(situation, members, places_of) if costs is None else linear_sum_assignment(costs.T)[1]
        for places, group in zip(places_of, taken, strict=True):
            _seat(situation, groups[group], places, moved)
    return moved


def _idle_groups(situation: _Situation, at: Sequence[int], degree: int) -> list[list[int]]:
    """Groups of each node's idle workers; workers that hold the same layers stay together."""
    working = set(at)
    groups = []
    for workers in situation.nodes:
        idle = sorted(set(workers) - working, key=lambda worker: (situation.kinds[situation.kind[worker]], worker))
        groups += [idle[first : first + degree] for first in range(0, len(idle) - degree + 1, degree)]
    return groups


def _nodes_exchanged(situation: _Situation, at: Sequence[int]) -> list[int]:
    """Move all work of one node to another node; inside a node, any worker may take any place."""
    node_of = {worker: node for node, workers in enumerate(situation.nodes) for worker in workers}
    places_of: list[list[int]] = [[] for _ in situation.nodes]
    for place, worker in enumerate(at):
        places_of[node_of[worker]].append(place)
    costs = _costs(situation, situation.nodes, places_of)
    taken = range(len(situation.nodes)) if costs is None else linear_sum_assignment(costs.T)[1]
    moved = list(at)
    for places, node in zip(places_of, taken, strict=True):
        _seat(situation, situation.nodes[node], places, moved)
    return moved


def _seat(situation: _Situation, workers: Sequence[int], places: Sequence[int], at: list[int]) -> None:
    """Give each place to a worker so that the fewest bytes are lacking in total."""
    if not places:
        return
    kinds = [situation.kind[worker] for worker in workers]
    costs = situation.lacking[kinds, [[situation.place_kind[place]] for place in places]]
    for place, worker in zip(places, linear_sum_assignment(costs)[1].tolist(), strict=True):
        at[place] = workers[worker]


def _costs(
    situation: _Situation, workers_of: Sequence[Sequence[int]], places_of: Sequence[Sequence[int]]
) -> Array | None:
    """Bytes that workers lack in their best assignment to places, [workers_of, places_of]; None if too many."""
    who, workers = _numbered(tuple(sorted(situation.kind[worker] for worker in each)) for each in workers_of)
    where, places = _numbered(tuple(sorted(situation.place_kind[place] for place in each)) for each in places_of)
    sizes = {*map(len, workers), *map(len, places)}
    few = len(sizes) == 1 and max(sizes) <= _FEW
    pairs = len(workers) * len(places)
    if max(len(who), len(where)) > _MOST or pairs > (_MOST_PAIRS if few else _MOST_LARGE_PAIRS):
        return None
    if few:
        costs = _least_of_orders(situation.lacking, np.array(workers), np.array(places))
    else:
        rows, columns = [np.array(row) for row in workers], [np.array(column)[:, np.newaxis] for column in places]
        costs = np.array([[_least(situation.lacking, row, column) for column in columns] for row in rows])
    return costs[np.array(who)[:, np.newaxis], where]


def _least_of_orders(lacking: Array, workers: Index, places: Index) -> Array:
    """Bytes that each row of workers lacks at each row of equally many places, in the best order of the workers."""
    each = lacking[workers[:, np.newaxis, :, np.newaxis], places[np.newaxis, :, np.newaxis, :]]
    count = np.arange(workers.shape[1])
    orders = (each[:, :, order, count].sum(axis=2) for order in permutations(count))
    return reduce(np.minimum, orders)


def _least(lacking: Array, workers: Index, places: Index) -> float:
    """Bytes that the workers, [n], lack at all of the places, [≤ n, 1]; infinite if they may not be there."""
    if len(workers) < len(places) or not len(places):
        return np.inf if len(places) else 0.0
    costs = lacking[workers, places]
    try:
        return float(costs[linear_sum_assignment(costs)].sum())
    except ValueError:
        return np.inf


def _in_order(situation: _Situation, members: Sequence[Sequence[int]], places_of: Sequence[Sequence[int]]) -> list[int]:
    """The group for each group's places, among groups of equal speed, in the order of the middles of their layers."""
    middle = [_middle(kind.held) for kind in situation.kinds]
    wanted_middle = [_middle(kind.wanted) for kind in situation.place_kinds]
    alike: dict[tuple[float, int], list[int]] = {}
    for group, places in enumerate(places_of):
        kind = situation.place_kinds[situation.place_kind[places[0]]]
        alike.setdefault((kind.speed, kind.group), []).append(group)
    taken = [0] * len(members)
    for groups in alike.values():
        held = sorted(groups, key=lambda group: sum(middle[situation.kind[worker]] for worker in members[group]))
        wanted = sorted(groups, key=lambda group: wanted_middle[situation.place_kind[places_of[group][0]]])
        for source, target in zip(held, wanted, strict=True):
            taken[target] = source
    return taken
