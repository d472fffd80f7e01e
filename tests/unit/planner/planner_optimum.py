"""The proven optimum of small instances, by branch and bound; slow, and independent of the search that it measures.

What is searched, all of it: in each node any groups of allowed degrees out of any workers, the rest idle; up to three
replicas made of any groups, in any order, with any layers, none included; any shares of the micro-batches; 1F1B. Left
out are only groups that are not cut out of a node's workers sorted by speed, as they can't be better (`search.groups`:
the others are as fast, and a faster group in a pipeline never makes 1F1B, a fixed order of ops, longer). Stages without
layers can be: they let those before them run further ahead.
"""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np

from megatron_resihp.cost.job import JobCost
from megatron_resihp.pipeline.compiled import compiled
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.search.makespan import pipeline_makespan
from megatron_resihp.planner.search.tables import tables_of

Group = tuple[int, float]
"""Degree and speed of the slowest member."""
Bag = tuple[tuple[Group, int], ...]
"""Groups and how many there are of each, sorted."""
MOST_REPLICAS = 3


def optimum(health: Health, cost: JobCost, known: float = np.inf) -> float:
    """Seconds of the fastest plan; `known` if there is no faster one than that.

    Args:
        health: of up to about sixteen workers.
        cost: of the job; optimizer states are not distributed, so that memory doesn't depend on the replicas.
        known: of some plan.
    """
    return _Search(health, cost, known).run()


class _Search:
    def __init__(self, health: Health, cost: JobCost, known: float) -> None:
        self._micro_batches = cost.micro_batches
        self._tables = _Costs.of(cost)
        self._best = known
        self._health = health
        self._cost = cost
        self._least: dict[tuple[Bag, int], float] = {}
        self._proven: dict[tuple[Bag, int], float] = {}

    def run(self) -> float:
        for groups in sorted(self._groupings() - {()}, key=lambda bag: -self._power(bag)):
            if self._micro_batches / self._power(groups) < self._best:
                self._partition(groups, (), MOST_REPLICAS, 0)
        return self._best

    def _power(self, bag: Bag) -> float:
        """Models per second, at most."""
        return sum(self._tables.power(group) * count for group, count in bag)

    def _groupings(self) -> set[Bag]:
        """All groups of all nodes, each combination once."""
        nodes: dict[int, list[float]] = {}
        for worker, speed in self._health.speed.items():
            nodes.setdefault(worker // self._cost.workers_per_node, []).append(speed)
        choices = [
            {_bag(groups) for groups in _cuts(tuple(sorted(speeds, reverse=True)), self._cost.degrees)}
            for speeds in nodes.values()
        ]
        return {_bag(group for bag in each for group, count in bag for _ in range(count)) for each in product(*choices)}

    def _partition(self, left: Bag, taken: tuple[Bag, ...], replicas: int, done: int) -> None:
        """Try all ways to make the groups that are left into replicas beside those that are taken.

        `done` micro-batches can be run by those at most, within the best time known.
        """
        if not left:
            if done >= self._micro_batches:
                self._shares(taken)
            return
        if replicas == 0 or done + self._most(self._power(left)) < self._micro_batches:
            return
        for bag in _parts(left):
            # Of replicas with the same groups in another order, the first comes first.
            if replicas > 1 or bag == left:
                most = self._possible(bag)
                if most > 0 and not (taken and bag < taken[-1]):
                    self._partition(_without(left, bag), (*taken, bag), replicas - 1, done + most)

    def _most(self, power: float) -> int:
        return int(min(self._best * power * (1 + 1e-9), self._micro_batches))

    def _possible(self, bag: Bag) -> int:
        """Micro-batches that a replica of these groups may run within the best time, by the bounds that are known."""
        count = min(self._most(self._power(bag)), self._micro_batches)
        while count > 0 and self._bound(bag, count) >= self._best:
            count -= 1
        return count

    def _bound(self, bag: Bag, micro_batches: int) -> float:
        key = (bag, micro_batches)
        if key not in self._proven:
            self._proven[key] = self._tables.bound(bag, micro_batches)
        return self._proven[key]

    def _shares(self, bags: tuple[Bag, ...]) -> None:
        """Make the replicas' counts exact one after another; where they still do, there is a better plan."""
        while True:
            counts = [self._possible(bag) for bag in bags]
            if min(counts) == 0 or sum(counts) < self._micro_batches:
                return
            unsure = [pair for pair in zip(bags, counts, strict=True) if pair not in self._least]
            if unsure:
                self._solve(*unsure[0])
                continue
            # All can run more than they have to within the best time: take the least that is needed.
            while sum(counts) > self._micro_batches:
                counts[int(np.argmax(counts))] -= 1
            for pair in zip(bags, counts, strict=True):
                if pair not in self._least:
                    self._solve(*pair)
            found = max(self._least[pair] for pair in zip(bags, counts, strict=True))
            self._best = min(self._best, found)

    def _solve(self, bag: Bag, micro_batches: int) -> None:
        """The least makespan of a replica, or a proof that it is not below the best time."""
        seconds = self._tables.least(bag, micro_batches, self._best)
        self._proven[bag, micro_batches] = max(min(seconds, self._best), self._bound(bag, micro_batches))
        if seconds < np.inf:
            self._least[bag, micro_batches] = seconds


def _bag(groups: object) -> Bag:
    return tuple(sorted(Counter(groups).items()))  # type: ignore[call-overload]


def _cuts(speeds: tuple[float, ...], degrees: tuple[int, ...]) -> Iterator[tuple[Group, ...]]:
    """All ways to cut groups out of the first of a node's workers; the others are idle."""
    yield ()
    for degree in degrees:
        if degree <= len(speeds):
            for rest in _cuts(speeds[degree:], degrees):
                yield ((degree, speeds[degree - 1]), *rest)


def _parts(bag: Bag) -> Iterator[Bag]:
    """All bags but the empty one that can be taken out of a bag."""
    for counts in product(*(range(count + 1) for _, count in bag)):
        if any(counts):
            yield tuple((group, count) for (group, _), count in zip(bag, counts, strict=True) if count)


def _without(bag: Bag, taken: Bag) -> Bag:
    gone = dict(taken)
    return tuple((group, count - gone.get(group, 0)) for group, count in bag if count > gone.get(group, 0))


class _Arrays(NamedTuple):
    """Rows are degrees.

    Attributes:
        forward, backward, state, kept, working: of each layer, [degrees + 1, layers].
        transfer: [degrees + 1, degrees + 1].
        needed: share of a model's work in the layers from each one on, at least, [layers + 1].
        memory: bytes.
        forward_share: of a stage's time, at most.
    """

    forward: np.ndarray
    backward: np.ndarray
    state: np.ndarray
    kept: np.ndarray
    working: np.ndarray
    transfer: np.ndarray
    needed: np.ndarray
    memory: float
    forward_share: float


class _Costs:
    """What groups and replicas of them can do."""

    def __init__(self, arrays: _Arrays, rate: np.ndarray) -> None:
        self._arrays = arrays
        self._rate = rate

    @classmethod
    def of(cls, cost: JobCost) -> "_Costs":
        tables = tables_of(cost, True)
        total = tables.forward + tables.backward
        degrees = list(cost.degrees)
        least = (total[degrees] * tables.rate[degrees, np.newaxis]).min(axis=0)
        needed = np.append(least[::-1].cumsum()[::-1], 0.0)
        shares = np.divide(tables.forward, total, out=np.zeros_like(total), where=np.isfinite(total) & (total > 0))
        arrays = _Arrays(
            tables.forward, tables.backward, tables.held + tables.shared, tables.kept, tables.working,
            tables.transfer, needed / needed[0], tables.memory, float(shares.max()),
        )  # fmt: skip
        return cls(arrays, tables.rate / needed[0])

    @cache  # noqa: B019
    def power(self, group: Group) -> float:
        """Models per second, at most."""
        degree, speed = group
        return float(self._rate[degree]) * speed

    def bound(self, bag: Bag, micro_batches: int) -> float:
        """Seconds that a replica takes at least; see `_rest_bound`."""
        powers, counts = self._by_power(bag)[2:]
        both = _rest_bound(powers, counts, counts.sum(), micro_batches, self._arrays.forward_share)
        return max(float(both), micro_batches / float(powers @ counts))

    def least(self, bag: Bag, micro_batches: int, below: float) -> float:
        """The least makespan of a replica of all these groups, infinite if there is none below that."""
        degrees, speeds, powers, counts = self._by_power(bag)
        stages = int(counts.sum())
        rows = np.zeros((6, stages + 1))
        chosen = np.zeros(stages, np.int64)
        found = _extend(
            self._arrays, degrees, speeds, powers, counts.copy(), stages, micro_batches, 0, 0, 0.0, rows, chosen, below
        )
        return found if found < below else np.inf

    def _by_power(self, bag: Bag) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Degrees, speeds, powers and counts, the most powerful first."""
        ordered = sorted(bag, key=lambda item: -self.power(item[0]))
        return (
            np.array([group[0] for group, _ in ordered]),
            np.array([group[1] for group, _ in ordered]),
            np.array([self.power(group) for group, _ in ordered]),
            np.array([count for _, count in ordered]),
        )


@compiled
def _rest_bound(powers, counts, stages, micro_batches, forward_share):  # type: ignore[no-untyped-def]
    """Seconds for one model's work in the last stages of a pipeline, at least.

    Stage s with F of share φ of its time t can't begin its first B before its first F has been to the end and back,
    and runs at most w = S − 1 − s other F meanwhile; so an iteration lasts Σ t + (m − 1 − w φ) t of any stage at least.
    Σ t is least for a given longest t if the most powerful groups take that long; between such points both are linear.
    """
    weight = max(micro_batches - 1 - (stages - 1) * forward_share, 0.0)
    least, number, power = np.inf, 0, 0.0
    for kind in range(len(powers)):
        if counts[kind] > 0:
            if number == 0:
                least = (1 + weight) / powers[kind]
            number += counts[kind]
            power += counts[kind] * powers[kind]
            least = min(least, (number + weight) / power)
    return least


@compiled
def _extend(  # type: ignore[no-untyped-def]
    arrays, degrees, speeds, powers, counts, stages, micro_batches, stage, first, before, rows, chosen, best
):
    """The least makespan below `best` with the stages before this one as they are; `best` if there is none.

    Args:
        arrays, degrees, speeds, powers: what is given.
        counts: groups that are left.
        stages, micro_batches: of the replica.
        stage, first: the stage to fill, and its first layer.
        before: seconds of one micro-batch in the stages before.
        rows: F, B, transfer, two rows of scratch, and W (zeros), [6, stages + 1].
        chosen: kind of each stage's group.
        best: seconds.
    """
    layers = arrays.forward.shape[1]
    forward, backward, transfer = rows[0], rows[1], rows[2]
    last = stage == stages - 1
    for kind in range(len(counts)):
        if counts[kind] == 0:
            continue
        counts[kind] -= 1
        chosen[stage] = kind
        k = degrees[kind]
        forward[stage] = backward[stage] = memory = working = 0.0
        if stage > 0:
            transfer[stage - 1] = arrays.transfer[degrees[chosen[stage - 1]], k]
        in_flight = min(stages - stage, micro_batches)
        for end in range(first, layers + 1):
            if end > first:
                forward[stage] += arrays.forward[k, end - 1] / speeds[kind]
                backward[stage] += arrays.backward[k, end - 1] / speeds[kind]
                memory += arrays.state[k, end - 1] + arrays.kept[k, end - 1] * in_flight
                working = max(working, arrays.working[k, end - 1])
            own = forward[stage] + backward[stage]
            if memory + working > arrays.memory or before + micro_batches * own >= best:
                break
            if last:
                if end == layers:
                    seconds = pipeline_makespan(
                        forward, backward, rows[5], transfer, stages, micro_batches, rows[3], rows[4]
                    )
                    best = min(best, seconds)
            elif _may_be_better(arrays, powers, counts, stages, micro_batches, stage, end, before + own, rows, best):
                best = _extend(
                    arrays, degrees, speeds, powers, counts, stages, micro_batches, stage + 1, end, before + own,
                    rows, chosen, best,
                )  # fmt: skip
        counts[kind] += 1
    return best


@compiled
def _may_be_better(arrays, powers, counts, stages, micro_batches, stage, end, before, rows, best):  # type: ignore[no-untyped-def]
    """Whether some way to fill the stages after this one may be below `best`, by bounds."""
    needed = arrays.needed[end]
    most = 0.0
    for kind in range(len(counts)):
        if counts[kind] > 0:
            most = max(most, powers[kind])
    rest = stages - stage - 1
    if before + needed * _rest_bound(powers, counts, rest, micro_batches, arrays.forward_share) >= best:
        return False
    # Of each stage: what comes before it, its own work, and its waits at both ends of the iteration.
    beyond = needed / most
    for other in range(stage, -1, -1):
        forward, backward, ahead = rows[0, other], rows[1, other], stages - 1 - other
        before -= forward + backward
        first_wait, last_wait = max(0.0, beyond - ahead * forward), max(0.0, beyond - ahead * backward)
        waits = first_wait + last_wait if micro_batches - 1 > ahead else max(first_wait, last_wait)
        if before + micro_batches * (forward + backward) + waits >= best:
            return False
        beyond += forward + backward
    return True
