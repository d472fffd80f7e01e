# SPDX-License-Identifier: Apache-2.0
"""ResiHP (arXiv 2605.06374): smaller tensor-parallel groups, other layers per stage, then migration between replicas.

Imports numpy, `plan`, `cost` and `planner`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import batched, product
from typing import Final

import numpy as np

from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.memory import with_layers
from megatron_resihp.plan import Migration, ParallelPlan, PlanError, Replica, Schedule, deal, even_counts
from megatron_resihp.plan.layers import chunks_from
from megatron_resihp.plan.schedule import ONE_F_ONE_B, ZERO_BUBBLE
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.job_shape import NoPlanError
from megatron_resihp.planner.shares import fastest_shares
from megatron_resihp.planner.steps.groups import Group, Grouping, regroup
from megatron_resihp.planner.steps.migration import Array, Integers, Migrated, Stages, migrate
from megatron_resihp.planner.steps.repartition import Lane, Partitioner
from megatron_resihp.planner.strategies.common import groups_in_nodes, job_degree, next_plan, spelt_out

DELTAS: Final = (0.0, 1.0, 2.0, 3.0)
"""Values of δ in Algorithm 1 to try, since the paper gives none; the fastest in the simulation wins."""

AHEAD: Final = (0, 1, 2, 4, 8, 16)
"""Micro-batches that a stage may run ahead of 1F1B, within its memory; chosen the same way."""

NEVER: Final = float("inf")


def resihp(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    """The three steps in the order TP, PP, DP; see `fastest`, `Partitioner.split` and `migrate` for each.

    Where the text leaves it open: a replica without any live worker is dropped, and so is a stage that is dead in every
    replica. Once enough workers for whole groups are back, they become stages or replicas again, if that is faster.
    Micro-batches are dealt evenly if work migrates. If none has to, they are dealt by speed if that is faster. The even
    split of layers stays while all stages are equally fast.

    Raises:
        NoPlanError: replicas have different numbers of stages, or no split of the layers fits the live workers.
    """
    stages = {len(replica.stages) for replica in plan.replicas}
    if len(stages) != 1:
        raise NoPlanError(f"resihp-paper needs replicas with the same number of stages, not {sorted(stages)}")
    if _nothing_to_do(plan, health):
        return plan
    given, plan = plan, spelt_out(plan, cost)
    partitioner = Partitioner(cost)
    ends = _current_ends(plan, cost)
    powers = [degree for degree in cost.degrees if degree.bit_count() == 1 and not cost.uneven(degree)]
    smallest = _smallest_degrees(powers, ends, len(plan.replicas), cost, partitioner)
    grouping = _without_dead(regroup(plan, health, powers, smallest, cost.workers_per_node), cost)
    dealt = []
    for groups in (grouping, *_grown(grouping, plan, health, cost)):
        layout = _repartition(groups, ends, health, cost, partitioner)
        if layout is not None:
            dealt.append((layout, *_deal(layout, health, cost)))
    if not dealt:
        raise NoPlanError("resihp-paper: no split of the layers fits into the memory of the groups that are left")
    layout, counts, outcome = min(dealt, key=lambda each: each[2].makespan)
    replicas, migrations = _replicas(layout, counts, outcome, _schedule_of(plan))
    following = next_plan(replicas, plan, health, cost, migrations)
    return given if following == plan else following


@dataclass(frozen=True)
class _Layout:
    """Groups and their layers.

    Attributes:
        groups: of each stage of each replica; if empty, its work must migrate.
        ends: where each stage's layers end.
        room: micro-batches whose activations each group has room for, [replicas][stages].
        free: the workers left over.
    """

    groups: tuple[tuple[Group, ...], ...]
    ends: tuple[int, ...]
    room: tuple[tuple[int, ...], ...]
    free: Group


def _nothing_to_do(plan: ParallelPlan, health: Health) -> bool:
    """Whether all workers run at full speed; only then can an interleaved order stay, as ResiHP makes none."""
    interleaved = any(len(replica.stage_of_chunk) > len(replica.stages) for replica in plan.replicas)
    return interleaved and set(plan.working) == health.speed.keys() and set(health.speed.values()) == {1.0}


def _current_ends(plan: ParallelPlan, cost: JobCost) -> list[int]:
    """Where the stages' layers end now; an even split if the stages do not have one chunk each."""
    chunks, stages = plan.replicas[0].chunks, len(plan.replicas[0].stages)
    return [chunk.end for chunk in chunks] if len(chunks) == stages else _spread(cost.layers, stages)


def _spread(layers: int, stages: int) -> list[int]:
    return [round(layers * (stage + 1) / stages) for stage in range(stages)]


def _in_flight(replicas: int, stages: int, cost: JobCost) -> list[int]:
    """1F1B's micro-batches in flight at each stage."""
    most = -(-cost.micro_batches // replicas)
    return [min(stages - stage, most) for stage in range(stages)]


def _smallest_degrees(
    powers: Sequence[int], ends: Sequence[int], replicas: int, cost: JobCost, partitioner: Partitioner
) -> list[int]:
    """k_min of each stage: the smallest degree with which its present layers fit in memory."""
    kept = zip(_ranges(ends), _in_flight(replicas, len(ends), cost), strict=True)
    return [
        next((k for k in powers if partitioner.room(k, replicas, first, end) >= in_flight), powers[-1])
        for (first, end), in_flight in kept
    ]


def _without_dead(grouping: Grouping, cost: JobCost) -> Grouping:
    """The grouping without dead replicas and stages, and without replicas beyond the number of micro-batches."""
    rows = [row for row in grouping.groups if any(row)]
    if len(rows) > cost.micro_batches:
        rows = sorted(rows, key=lambda row: -sum(map(len, row)))[: cost.micro_batches]
    stages = [stage for stage in range(len(grouping.groups[0])) if any(row[stage] for row in rows)]
    if not stages:
        raise NoPlanError("resihp-paper: no worker is left")
    groups = tuple(tuple(row[stage] for stage in stages) for row in rows)
    live = (*grouping.free, *(worker for row in grouping.groups for group in row for worker in group))
    return Grouping(groups, _left_over(live, groups))


def _grown(grouping: Grouping, plan: ParallelPlan, health: Health, cost: JobCost) -> list[Grouping]:
    """Groupings with more replicas, or more stages, formed from free workers in whole groups; usually none."""
    groups = groups_in_nodes(grouping.free, job_degree(plan, cost), plan, health, cost)
    rows, stages = grouping.groups, len(grouping.groups[0])
    grown = []
    if stages <= len(groups) and len(rows) < cost.micro_batches:
        more = min(len(groups) // stages, cost.micro_batches - len(rows))
        grown.append((*rows, *batched(groups[: more * stages], stages)))
    if len(rows) <= len(groups) and stages < cost.layers:
        more = min(len(groups) // len(rows), cost.layers - stages)
        grown.append(tuple((*row, *groups[number * more : (number + 1) * more]) for number, row in enumerate(rows)))
    return [Grouping(each, _left_over(grouping.free, each)) for each in grown]


def _left_over(free: Group, rows: Sequence[Sequence[Group]]) -> Group:
    return tuple(sorted(set(free) - {worker for row in rows for group in row for worker in group}))


def _repartition(
    grouping: Grouping, near: Sequence[int], health: Health, cost: JobCost, partitioner: Partitioner
) -> _Layout | None:
    """The PP step; groups that cannot hold their new layers become empty. None if no split fits."""
    rows = grouping.groups
    stages = len(rows[0])
    in_flight = _in_flight(len(rows), stages, cost)
    lanes = [[_lane(row[stage], health) for row in rows] for stage in range(stages)]
    if len(near) != stages:
        near = _spread(cost.layers, stages)
    ends = None
    if all(sorted(each, key=repr) == sorted(lanes[0], key=repr) for each in lanes):
        ends = _unmoved(near, lanes, in_flight, cost, partitioner)
    ends = ends or partitioner.split(lanes, in_flight, near)
    if ends is None:
        return None
    kept: list[list[Group]] = [[] for _ in rows]
    room: list[list[int]] = [[] for _ in rows]
    for stage, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        fits = partitioner.fitting(lanes[stage], in_flight[stage], first, end)
        for number, row in enumerate(rows):
            kept[number].append(row[stage] if fits[number] else ())
            degree = len(row[stage])
            room[number].append(partitioner.room(degree, sum(fits), first, end) if fits[number] else 0)
    free = _left_over((*grouping.free, *(worker for row in rows for group in row for worker in group)), kept)
    if not all(map(any, kept)):
        fewer = tuple(row for row, left in zip(rows, kept, strict=True) if any(left))
        return _repartition(Grouping(fewer, free), near, health, cost, partitioner)
    return _Layout(tuple(map(tuple, kept)), tuple(ends), tuple(map(tuple, room)), free)


def _unmoved(
    near: Sequence[int],
    lanes: Sequence[Sequence[Lane]],
    in_flight: Sequence[int],
    cost: JobCost,
    partitioner: Partitioner,
) -> list[int] | None:
    """The present split or the even one, whichever is faster; None if neither fits."""
    candidates = [list(near)]
    try:
        stage_like = Replica(tuple((stage,) for stage in range(len(lanes))), (0,))
        candidates.append([chunk.end for chunk in with_layers(stage_like, cost.model).chunks])
    except PlanError:
        pass
    times = [partitioner.slowest(lanes, in_flight, ends) for ends in candidates]
    best = min(range(len(candidates)), key=lambda number: times[number])
    return candidates[best] if times[best] < float("inf") else None


def _lane(group: Group, health: Health) -> Lane:
    return Lane(len(group), min((health.speed[worker] for worker in group), default=0.0))


def _deal(layout: _Layout, health: Health, cost: JobCost) -> tuple[tuple[int, ...], Migrated]:
    """The DP step: the faster of dealing by speed and Algorithm 1 with each δ; returns counts and outcome."""
    stages = _stages(layout, health, cost)
    even = even_counts(cost.micro_batches, len(layout.groups))
    owner = _owners(even)
    trials = []
    if stages.room.all():
        each = stages.seconds.sum(axis=0)
        paces = [(float(row.sum()), float(row.max())) for row in each]
        for counts in {tuple(fastest_shares(paces, cost.micro_batches)): None, even: None}:
            if _holds_1f1b(counts, stages.room):
                trials.append((counts, migrate(stages, _owners(counts), NEVER, 0)))
        if (each == each[0]).all():
            return trials[0]
    # No stage can be ahead by more than all micro-batches.
    for ahead, delta in product([each for each in AHEAD if each < max(even)], DELTAS):
        outcome = migrate(stages, owner, delta, ahead)
        if (outcome.executor != owner).any():
            trials.append((even, outcome))
    return min(trials, key=lambda trial: trial[1].makespan)


def _holds_1f1b(counts: Sequence[int], room: Integers) -> bool:
    """Whether 1F1B's activations fit with `counts` micro-batches per replica; `_in_flight` checks even counts only."""
    depth = np.arange(room.shape[1], 0, -1)
    return bool((np.minimum(depth, np.array(counts)[:, np.newaxis]) <= room).all())


def _stages(layout: _Layout, health: Health, cost: JobCost) -> Stages:
    replicas, stages = len(layout.groups), len(layout.ends)
    seconds = np.zeros((2, replicas, stages))
    for number, row in enumerate(layout.groups):
        for stage, (first, end) in enumerate(_ranges(layout.ends)):
            if row[stage]:
                f, b, w = cost.seconds(len(row[stage]))[:, first:end].sum(axis=1)
                seconds[:, number, stage] = np.array([f, b + w]) / min(health.speed[w] for w in row[stage])
    return Stages(seconds, np.array(layout.room), _transfers(layout.groups, health, cost))


def _transfers(groups: Sequence[Sequence[Group]], health: Health, cost: JobCost) -> Array:
    """Seconds from each replica's stage to the next stage of each replica, [stages − 1, replicas, replicas]."""
    healthy = cache(cost.transfer)

    def seconds(sender: Group, receiver: Group) -> float:
        if not (sender and receiver):
            return 0.0
        return healthy(len(sender), len(receiver)) / health.between(sender, receiver)

    stages = len(groups[0])
    return np.array(
        [[[seconds(a[s], b[s + 1]) for b in groups] for a in groups] for s in range(stages - 1)], np.float64
    ).reshape(stages - 1, len(groups), len(groups))


def _ranges(ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip([0, *ends], ends, strict=False)


def _owners(counts: Sequence[int]) -> Integers:
    """The replica of each micro-batch."""
    owner = np.empty(sum(counts), np.int64)
    for number, micro_batches in enumerate(deal(counts)):
        owner[list(micro_batches)] = number
    return owner


def _replicas(
    layout: _Layout, counts: Sequence[int], outcome: Migrated, schedule: Schedule | None
) -> tuple[tuple[Replica, ...], tuple[Migration, ...]]:
    """The replicas, with an explicit order of ops in those that take part in migrations, and the migrations."""
    owner = _owners(counts)
    moved = outcome.migrations(owner)
    involved = {number for each in moved for number in (each.replica, int(owner[each.micro_batch]))}
    orders = outcome.schedules() if moved else ()
    chunks = chunks_from([end - first for first, end in _ranges(layout.ends)], len(layout.ends))
    replicas = tuple(
        Replica(row, share, chunks, orders[number] if number in involved else schedule)
        for number, (row, share) in enumerate(zip(layout.groups, deal(counts), strict=True))
    )
    return replicas, moved


def _schedule_of(plan: ParallelPlan) -> Schedule | None:
    """The schedule of replicas that take no part in migrations."""
    schedule = plan.replicas[0].schedule
    return schedule if schedule is not None and schedule.name in (ONE_F_ONE_B, ZERO_BUBBLE) else None
