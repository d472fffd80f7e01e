# SPDX-License-Identifier: Apache-2.0
"""Greyhound (Wu et al., USENIX ATC 2025; arXiv 2410.12588 as Falcon): four levels of mitigating slow devices and links.

Imports the standard library, `plan`, `cost` and this package.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from megatron_resihp.cost.job import JobCost
from megatron_resihp.plan import ParallelPlan, Replica, even_counts
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.job_shape import NoPlanError
from megatron_resihp.planner.moves import seconds_to_move
from megatron_resihp.planner.shares import fastest_shares, pace_of
from megatron_resihp.planner.steps.rerouting import rerouted
from megatron_resihp.planner.strategies.common import Group, all_well, next_plan, speed_of, spelt_out, with_shares

Rows = list[list[Group]]
"""The groups of each stage, for each replica."""

Judged = tuple[float, ParallelPlan]
"""The seconds of a plan's iteration, and the plan."""

_TOLERANCE = 1e-9


def greyhound(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    """The level that pays until the next expected change of health, as a ski rental.

    S1 does nothing. S2 distributes micro-batches by the replicas' speed, min max m_i · t_i, at no cost. S3 lets workers
    change places, then repeats S2. It gathers slow workers in as few tensor-parallel groups as their node allows, and
    slow groups in as few replicas as possible. It moves slow links to where no pipeline sends over them. S3 pays if the
    time that S2 loses until the next change, compared to healthy devices, exceeds the time to change places: new
    groups, and one stage's state over a link.

    S4, a restart from a checkpoint with healthy nodes instead of slow ones, is left out: there are no spare nodes here,
    and a restart on the same nodes gains nothing over S3. The paper swaps nodes. Here any worker of a node, and any
    group of the same degree, may change places with another, which can only be faster.

    Raises:
        NoPlanError: a working worker is dead, which Greyhound does not handle; or no level fits in memory.
    """
    plan = spelt_out(plan, cost)
    dead = [worker for worker in plan.working if worker not in health.speed]
    if dead:
        raise NoPlanError(f"worker {dead[0]} is dead; Greyhound reacts to slow workers only")
    as_is = _judged(next_plan(plan.replicas, plan, health, cost, plan.migrations), health, cost)
    shared = _fastest(as_is, _shared_out(plan.replicas, plan, health, cost), health, cost)
    gathered = _fastest(shared, _gathered(plan, health, cost), health, cost)
    swapped = _fastest(gathered, _unlinked(gathered[1], health, cost), health, cost)
    return swapped[1] if swapped is not shared and _pays(shared, health, cost) else shared[1]


def _judged(plan: ParallelPlan, health: Health, cost: JobCost) -> Judged:
    return evaluate(plan, health, cost).iteration_s, plan


def _fastest(best: Judged, others: Iterator[ParallelPlan], health: Health, cost: JobCost) -> Judged:
    """The fastest plan; the first of them if several are equally fast."""
    for other in others:
        judged = _judged(other, health, cost)
        if judged[0] < best[0] * (1 - _TOLERANCE):
            best = judged
    return best


def _pays(judged: Judged, health: Health, cost: JobCost) -> bool:
    """Whether this S2 plan loses more time until the next event than the change of places takes."""
    seconds, shared = judged
    even = with_shares(shared.replicas, even_counts(cost.micro_batches, len(shared.replicas)))
    at_best = max(_paced_s(replica, all_well(health), cost) for replica in even)
    lost = cost.until_next_event_s * max(1 - at_best / seconds, 0.0)
    state = max(
        float(cost.bytes(len(members), len(shared.replicas), shared).state[chunk.first : chunk.end].sum())
        for replica in shared.replicas
        for chunk in replica.chunks
        if (members := replica.stages[chunk.stage])
    )
    return lost > seconds_to_move({0: state}, cost)


def _paced_s(replica: Replica, health: Health, cost: JobCost) -> float:
    first, further = pace_of(replica, health, cost)
    return first + (len(replica.micro_batches) - 1) * further


def _shared_out(
    replicas: Sequence[Replica], plan: ParallelPlan, health: Health, cost: JobCost
) -> Iterator[ParallelPlan]:
    """S2: the replicas with micro-batches by speed, and with present counts; plans that cannot run are left out."""
    by_speed = fastest_shares([pace_of(replica, health, cost) for replica in replicas], cost.micro_batches)
    as_now = [len(replica.micro_batches) for replica in replicas]
    for counts in (by_speed, as_now) if by_speed != as_now else (by_speed,):
        try:
            shared, migrations = rerouted(with_shares(replicas, counts), health, cost)
            yield next_plan(shared, plan, health, cost, migrations)
        except NoPlanError:
            continue


def _gathered(plan: ParallelPlan, health: Health, cost: JobCost) -> Iterator[ParallelPlan]:
    """S3 for slow workers: gathered in groups, then in replicas too; each with new shares."""
    in_groups = _rows(plan)
    _gather_in_groups(in_groups, health, cost)
    in_replicas = [list(row) for row in in_groups]
    _gather_in_replicas(in_replicas, health)
    for rows in (in_groups, in_replicas):
        if rows != _rows(plan):
            yield from _shared_out(_placed(plan, rows), plan, health, cost)


def _rows(plan: ParallelPlan) -> Rows:
    return [list(replica.stages) for replica in plan.replicas]


def _placed(plan: ParallelPlan, rows: Rows) -> list[Replica]:
    return [replace(replica, stages=tuple(row)) for replica, row in zip(plan.replicas, rows, strict=True)]


def _gather_in_groups(rows: Rows, health: Health, cost: JobCost) -> None:
    """In each node, swap the fastest members of slow groups for slower members of its other groups."""
    nodes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for r, row in enumerate(rows):
        for s, group in enumerate(row):
            if group:
                nodes[group[0] // cost.workers_per_node].append((r, s))
    for places in nodes.values():
        places.sort(key=lambda place: (speed_of(rows[place[0]][place[1]], health), place))
        for number, target in enumerate(places):
            for other in places[number + 1 :]:
                while _swap_members(rows, target, other, health):
                    pass


def _swap_members(rows: Rows, target: tuple[int, int], other: tuple[int, int], health: Health) -> bool:
    """Swap the fastest member of one group for the slowest of another if that one is slower; returns whether it was."""
    ours, theirs = rows[target[0]][target[1]], rows[other[0]][other[1]]
    fast = max(ours, key=lambda worker: health.speed[worker])
    slow = min(theirs, key=lambda worker: health.speed[worker])
    if health.speed[slow] >= health.speed[fast]:
        return False
    rows[target[0]][target[1]] = tuple(slow if worker == fast else worker for worker in ours)
    rows[other[0]][other[1]] = tuple(fast if worker == slow else worker for worker in theirs)
    return True


def _gather_in_replicas(rows: Rows, health: Health) -> None:
    """Fill the replicas that have the most slow groups with slow groups of others, at the same stage where possible."""
    healthy = max(health.speed[worker] for row in rows for group in row for worker in group)

    def delay(group: Group) -> float:
        return healthy / speed_of(group, health) - 1 if group else 0.0

    order = sorted(range(len(rows)), key=lambda r: (-sum(map(delay, rows[r])), r))
    for number, target in enumerate(order):
        givers = [(r, s) for r in order[number + 1 :] for s, group in enumerate(rows[r]) if delay(group) > 0]
        for r, s in sorted(givers, key=lambda place: -delay(rows[place[0]][place[1]])):
            degree = len(rows[r][s])
            well = [t for t, group in enumerate(rows[target]) if len(group) == degree and delay(group) == 0]
            if well:
                at = s if s in well else well[0]
                rows[target][at], rows[r][s] = rows[r][s], rows[target][at]


def _unlinked(plan: ParallelPlan, health: Health, cost: JobCost) -> Iterator[ParallelPlan]:
    """S3 for slow links: a group at one end changes places so that no pipeline sends over the link."""
    if plan.migrations:
        return
    rows, moved = _rows(plan), False
    for link in sorted(health.link):
        crossing = [
            (r, s) for r, row in enumerate(rows) for s, pair in enumerate(pairwise(row)) if _crosses(link, *pair)
        ]
        for r, s in crossing[:1]:
            swap = _best_swap(plan, rows, ((r, s), (r, s + 1)), health, cost)
            if swap:
                (a, b), (c, d) = swap
                rows[a][b], rows[c][d] = rows[c][d], rows[a][b]
                moved = True
    if moved:
        yield from _shared_out(_placed(plan, rows), plan, health, cost)


def _crosses(link: tuple[int, int], senders: Group, receivers: Group) -> bool:
    first, second = link
    return (first in senders and second in receivers) or (second in senders and first in receivers)


def _best_swap(
    plan: ParallelPlan, rows: Rows, ends: Sequence[tuple[int, int]], health: Health, cost: JobCost
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The swap of an end with another group that most speeds up the slower of both replicas; None if none helps.

    The other groups are those of the same stage in other replicas, which need no state. With one replica, they are
    those of its other stages.
    """

    def worst(changed: Rows, numbers: set[int]) -> float:
        placed = _placed(plan, changed)
        return max(_paced_s(placed[r], health, cost) for r in numbers)

    best, least = None, 1 - _TOLERANCE
    for r, s in ends:
        others = [(q, s) for q in range(len(rows)) if q != r] or [(r, t) for t in range(len(rows[r])) if t != s]
        for q, t in others:
            if t >= len(rows[q]) or len(rows[q][t]) != len(rows[r][s]):
                continue
            changed = [list(row) for row in rows]
            changed[r][s], changed[q][t] = changed[q][t], changed[r][s]
            ratio = worst(changed, {r, q}) / worst(rows, {r, q})
            if ratio < least:
                best, least = ((r, s), (q, t)), ratio
    return best
