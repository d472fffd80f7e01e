# SPDX-License-Identifier: Apache-2.0
"""Malleus (arXiv 2410.13333): groups by speed, pipelines of unequal groups, integer programs for layers and data.

Imports numpy, scipy (also through `planner.minimax`), `plan`, `cost` and `planner`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from itertools import product
from typing import Final

import numpy as np
from scipy.optimize import linear_sum_assignment

from megatron_resihp.cost.job import JobCost
from megatron_resihp.plan import Chunk, ParallelPlan, Replica, deal
from megatron_resihp.plan.layers import chunks_from
from megatron_resihp.planner.balance import balanced_chunks
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.job_shape import NoPlanError
from megatron_resihp.planner.minimax import least_maximum
from megatron_resihp.planner.moves import bytes_to_move
from megatron_resihp.planner.shares import fastest_shares
from megatron_resihp.planner.strategies.common import Group, next_plan, speed_of, spelt_out

TRIED: Final = 3
"""How many candidates get their layers and data solved, most promising first."""

_EQUAL: Final = 1e-3
"""Relative difference of iteration times below which the plan that moves fewer bytes wins."""


def malleus(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    """The bi-level problem of section 4: groups and pipelines above, layers and data below.

    Upper level: for each largest tensor-parallel degree, each node's workers form groups (`_grouped`). For each of a
    few numbers of pipelines, the groups are divided so that all pipelines have about the same Σ 1/y (`_divided`). In
    each pipeline, slow groups come first. Lower level: ILP 1 distributes layers over groups, min max y_j · l_j within
    memory; l = 0 is allowed and leaves a group out. ILP 2 distributes micro-batches over pipelines, min max o_i · m_i.

    Where the text leaves it open: the numbers of pipelines tried are the present one, one fewer, one more, half and
    twice as many. The division is greedy, not the optimum of the paper's program. All upper-level candidates are sorted
    by their iteration time without memory limits. The first few that fit are solved and simulated. Plans within 0.1 %
    of the best count as equal, including the plan in force; of them, the one whose workers lack the fewest bytes of
    state wins. Groups may also keep their present order of stages if that is as fast. The head's work counts for the
    last group.

    Raises:
        NoPlanError: no plan fits the live workers.
    """
    given, plan = plan, spelt_out(plan, cost)
    if not health.live:
        raise NoPlanError("malleus: no worker is left")
    places = {worker: number for number, worker in enumerate(plan.working)}
    estimate = _Estimate(health, cost)
    candidates = sorted(_candidates(plan, health, cost, places), key=estimate.seconds)
    solver = _Layers(cost)
    best = _present(plan, health, cost)
    tried = 0
    for candidate in candidates:
        replicas = _solved(candidate, health, cost, solver)
        if replicas is None:
            continue
        try:
            made = next_plan(replicas, plan, health, cost)
        except NoPlanError:
            continue
        best.append((evaluate(made, health, cost).iteration_s, made))
        tried += 1
        if tried == TRIED:
            break
    if not best:
        raise NoPlanError("malleus: no grouping of the workers that are left holds the model in memory")
    limit = min(seconds for seconds, _ in best) * (1 + _EQUAL)
    equal = [made for seconds, made in best if seconds <= limit]
    following = min(equal, key=lambda made: sum(bytes_to_move(plan, made, cost).values()))
    return given if following == plan else following


def _present(plan: ParallelPlan, health: Health, cost: JobCost) -> list[tuple[float, ParallelPlan]]:
    """The plan in force and its iteration time, if the job can still run it unchanged."""
    if not plan.migrations and all(worker in health.speed for worker in plan.working):
        try:
            same = next_plan(plan.replicas, plan, health, cost)
            return [(evaluate(same, health, cost).iteration_s, same)]
        except NoPlanError:
            pass
    return []


Candidate = tuple[tuple[Group, ...], ...]
"""The groups of each pipeline, in the order of their stages."""


def _candidates(plan: ParallelPlan, health: Health, cost: JobCost, places: dict[int, int]) -> Iterator[Candidate]:
    powers = [degree for degree in cost.degrees if degree.bit_count() == 1 and not cost.uneven(degree)]
    seen = set()
    for largest, splits in product(powers, (False, True)):
        groups = _grouped(health, cost, [degree for degree in powers if degree <= largest], splits, places)
        if groups in seen:
            continue
        seen.add(groups)
        present = len(plan.replicas)
        numbers = {present, present - 1, present + 1, present // 2, 2 * present}
        for number in sorted(numbers):
            if 1 <= number <= min(len(groups), cost.micro_batches):
                yield from _orchestrated(groups, number, plan, health, cost)


def _capacity(group: Group, health: Health, cost: JobCost) -> float:
    """1 / y: 1 / (α_k · rate · weight); rate: 1 / p of the slowest member, α_k: seconds of all layers at degree k."""
    return speed_of(group, health) / float(cost.seconds(len(group)).sum())


def _grouped(
    health: Health, cost: JobCost, degrees: Sequence[int], splits: bool, places: dict[int, int]
) -> tuple[Group, ...]:
    """Groups inside nodes: workers of similar speed together, each of the largest degree that enough workers are left
    for.

    Source: section 4.2. A group is as slow as its slowest member, so the best groups of given sizes are runs of the
    workers in order of speed. A group with a straggler may be split, to keep the other members fast.

    Args:
        health, cost: of the workers.
        degrees: the allowed degrees, ascending from 1.
        splits: whether groups of unequal speeds may be split where that makes Σ 1/y larger.
        places: of workers in the present plan; they break ties between equally fast workers.
    """
    nodes: dict[int, list[int]] = defaultdict(list)
    for worker in sorted(health.live, key=lambda worker: (-health.speed[worker], _place(worker, places))):
        nodes[worker // cost.workers_per_node].append(worker)
    groups: list[Group] = []
    for members in nodes.values():
        while members:
            degree = max(each for each in degrees if each <= len(members))
            group, members = tuple(members[:degree]), members[degree:]
            straggles = health.speed[group[0]] != health.speed[group[-1]]
            groups += _split(group, health, cost, degrees) if splits and straggles else [group]
    return tuple(tuple(sorted(group, key=lambda worker: _place(worker, places))) for group in groups)


def _place(worker: int, places: dict[int, int]) -> tuple[int, int]:
    return places.get(worker, len(places)), worker


def _split(group: Group, health: Health, cost: JobCost, degrees: Sequence[int]) -> list[Group]:
    """The split of a group, sorted by speed, into runs with the largest Σ 1/y; the whole group if that is as good."""
    best: list[tuple[float, list[Group]]] = [(0.0, [])]
    for end in range(1, len(group) + 1):
        runs = [group[end - degree : end] for degree in reversed(degrees) if degree <= end]
        options = [
            (best[end - len(run)][0] + _capacity(run, health, cost), [*best[end - len(run)][1], run]) for run in runs
        ]
        best.append(max(options, key=lambda option: option[0]))
    return best[-1][1] if best[-1][0] > _capacity(group, health, cost) else [group]


def _orchestrated(
    groups: Sequence[Group], number: int, plan: ParallelPlan, health: Health, cost: JobCost
) -> Iterator[Candidate]:
    """The groups in `number` pipelines, in two orders: slow groups first, and as they stand now.

    Slow groups come first so that fast ones, which hold more layers, come where fewer micro-batches are in flight
    (section 4.3).
    """
    capacity = {group: _capacity(group, health, cost) for group in groups}
    stage = {worker: place.stage for replica in plan.replicas for worker, place in replica.workers()}
    divided = _divided(capacity, number, plan)

    def now(group: Group) -> float:
        return sum(stage.get(worker, len(stage)) for worker in group) / len(group)

    orders = {tuple(tuple(sorted(row, key=lambda group: (capacity[group], now(group)))) for row in divided): None}
    orders[tuple(tuple(sorted(row, key=now)) for row in divided)] = None
    yield from orders


def _divided(capacity: dict[Group, float], number: int, plan: ParallelPlan) -> list[list[Group]]:
    """Groups for each pipeline: the next strongest group goes to the weakest pipeline; equal groups stay in place.

    The paper's division is a nonlinear integer program. Without the limits of whole groups and whole micro-batches, its
    optimum gives all pipelines the same Σ 1/y. This greedy method comes near to that, but does not guarantee it.
    """
    alike = Counter(capacity.values())
    totals = np.zeros(number)
    quotas: list[Counter[float]] = [Counter() for _ in range(number)]
    for each in sorted(alike, reverse=True):
        for _ in range(alike[each]):
            weakest = int(totals.argmin())
            totals[weakest] += each
            quotas[weakest][each] += 1
    home = {group: _home(group, plan, number) for group in capacity}
    at_home = Counter((replica, capacity[group]) for group, replica in home.items())
    stays = [[sum(min(n, at_home[r, each]) for each, n in quota.items()) for r in range(number)] for quota in quotas]
    pipelines, replicas = linear_sum_assignment(np.array(stays), maximize=True)
    quota_of = {int(replica): quotas[int(pipeline)] for pipeline, replica in zip(pipelines, replicas, strict=True)}
    rows: list[list[Group]] = [[] for _ in range(number)]
    homeless = []
    for group, replica in home.items():
        if quota_of.get(replica, Counter())[capacity[group]]:
            quota_of[replica][capacity[group]] -= 1
            rows[replica].append(group)
        else:
            homeless.append(group)
    for group in homeless:
        replica = next(each for each in range(number) if quota_of[each][capacity[group]])
        quota_of[replica][capacity[group]] -= 1
        rows[replica].append(group)
    return rows


def _home(group: Group, plan: ParallelPlan, number: int) -> int:
    """The present replica of most members; −1 if they have none or it no longer exists."""
    replicas = Counter(plan.replica_of(worker) for worker in group)
    replica = max(replicas, key=lambda each: (replicas[each], -(len(plan.replicas) if each is None else each)))
    return replica if replica is not None and replica < number else -1


class _Estimate:
    """Iteration time of a candidate by the paper's cost model, (m − 1) · max t + Σ t, without memory limits."""

    def __init__(self, health: Health, cost: JobCost) -> None:
        self._health, self._cost = health, cost
        self._paces: dict[tuple[tuple[int, float], ...], tuple[float, float]] = {}

    def seconds(self, candidate: Candidate) -> float:
        paces = [self._pace(tuple((len(group), speed_of(group, self._health)) for group in row)) for row in candidate]
        counts = fastest_shares(paces, self._cost.micro_batches)
        return max(first + (count - 1) * further for count, (first, further) in zip(counts, paces, strict=True))

    def _pace(self, groups: tuple[tuple[int, float], ...]) -> tuple[float, float]:
        """Seconds of a pipeline's first and each further micro-batch; each layer goes to the group that ends first."""
        if groups not in self._paces:
            each, ends, last = [], [], len(groups) - 1
            for stage, (degree, speed) in enumerate(groups):
                seconds = self._cost.seconds(degree).sum(axis=0) / speed
                each.append(float(seconds[1:-1].mean()))
                ends.append((each[-1] + (float(seconds[-1]) if stage == last else 0.0), stage))
            heapify(ends)
            for _ in range(self._cost.layers - 2):
                end, stage = ends[0]
                heapreplace(ends, (end + each[stage], stage))
            used = [end - each[stage] for end, stage in ends]
            self._paces[groups] = (sum(used), max(used))
        return self._paces[groups]


class _Layers:
    """ILP 1, for all pipelines of a job; equal ones are solved once."""

    def __init__(self, cost: JobCost) -> None:
        self._cost = cost
        self._solved: dict[tuple[object, ...], tuple[tuple[int, ...], tuple[Chunk, ...]] | None] = {}

    def of(
        self, degrees: Sequence[int], speeds: Sequence[float], copies: int, most: int
    ) -> tuple[tuple[int, ...], tuple[Chunk, ...]] | None:
        """Which groups have layers, and their chunks; None if memory is too small.

        Args:
            degrees, speeds: of the groups, first stage first.
            copies: number of pipelines.
            most: largest number of micro-batches in flight at the first stage.
        """
        key = (*degrees, *speeds, copies, most)
        if key not in self._solved:
            self._solved[key] = self._solve(degrees, speeds, copies, most)
        return self._solved[key]

    def _solve(
        self, degrees: Sequence[int], speeds: Sequence[float], copies: int, most: int
    ) -> tuple[tuple[int, ...], tuple[Chunk, ...]] | None:
        cost, stages = self._cost, len(degrees)
        slopes, offsets, room = [], [], []
        for stage, (degree, speed) in enumerate(zip(degrees, speeds, strict=True)):
            seconds, size = cost.seconds(degree).sum(axis=0) / speed, cost.bytes(degree, copies)
            held = size.state + min(stages - stage, most) * size.kept
            # The head is at the last group. The embedding is at the first group that has layers.
            fixed = held[0] + size.working.max() + (held[-1] if stage == stages - 1 else 0.0)
            slopes.append(float(seconds[1:-1].mean()))
            offsets.append(float(seconds[-1]) if stage == stages - 1 else 0.0)
            room.append(int(max((cost.device.memory - 16 - fixed) // held[1:-1].max(), -1)))
        if room[-1] < 0:
            return None
        counts = least_maximum(slopes, offsets, [max(each, 0) for each in room], cost.layers - 2)
        if counts is None:
            return None
        used = tuple(stage for stage in range(stages) if counts[stage] or stage == stages - 1)
        if self._alike:
            layers = [counts[stage] for stage in used]
            layers[0] += 1
            layers[-1] += 1
            return used, chunks_from(layers, len(used))
        in_flight = [min(len(used) - place, most) for place in range(len(used))]
        chunks = balanced_chunks([degrees[s] for s in used], [speeds[s] for s in used], cost, copies, in_flight)
        return (used, chunks) if chunks else None

    @property
    def _alike(self) -> bool:
        """Whether all layers between embedding and head are equal; if not, counts do not determine their split."""
        return len(set(self._cost.model.layers[1:-1])) == 1


def _solved(candidate: Candidate, health: Health, cost: JobCost, solver: _Layers) -> tuple[Replica, ...] | None:
    """Replicas with layers and micro-batches; None if they don't fit."""
    number = len(candidate)
    most = -(-cost.micro_batches // number)
    rows, slopes, offsets = [], [], []
    for groups in candidate:
        degrees, speeds = [len(group) for group in groups], [speed_of(group, health) for group in groups]
        solution = solver.of(degrees, speeds, number, most)
        if solution is None:
            return None
        used, chunks = solution
        seconds = [
            float(cost.seconds(degrees[stage])[:, chunk.first : chunk.end].sum()) / speeds[stage]
            for stage, chunk in zip(used, chunks, strict=True)
        ]
        rows.append((tuple(groups[stage] for stage in used), chunks))
        slopes.append(max(seconds))
        offsets.append(sum(seconds) - max(seconds))
    counts = least_maximum(slopes, offsets, [cost.micro_batches] * number, cost.micro_batches, least=1)
    if counts is None:
        return None
    return tuple(Replica(groups, share, chunks) for (groups, chunks), share in zip(rows, deal(counts), strict=True))
