# SPDX-License-Identifier: Apache-2.0
"""The proven optimum of small instances, by branch and bound; slow, and independent of the search that it measures.

What is searched, all of it: in each node any groups of allowed degrees out of any workers, the rest idle; up to three
replicas made of any groups, in any order, with any layers, none included; any shares of the micro-batches; 1F1B. Left
out are only groups that are not cut out of a node's workers sorted by speed, as they can't be better (`search.groups`:
the others are as fast, and a faster group in a pipeline never makes 1F1B, a fixed order of ops, longer). Stages without
layers can be: they let those before them run further ahead.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from itertools import product

import numpy as np
from planner_optimum_pipeline import Bag, Costs, Group

from megatron_resihp.cost.job import JobCost
from megatron_resihp.planner.health import Health

MOST_REPLICAS = 3


class NotProvenError(Exception):
    """The trials were spent."""


def optimum(health: Health, cost: JobCost, known: float = np.inf, trials: int = sys.maxsize) -> float:
    """Seconds of the fastest plan; `known` if there is no faster one than that.

    Args:
        health: of up to about sixteen workers.
        cost: of the job; optimizer states are not distributed, so that memory doesn't depend on the replicas.
        known: of some plan.
        trials: stages that may be filled, and replicas chosen, in the search.

    Raises:
        NotProvenError: that was not enough.
    """
    return _Search(health, cost, known, trials).run()


class _Search:
    def __init__(self, health: Health, cost: JobCost, known: float, trials: int) -> None:
        self._left = np.array([trials])
        self._micro_batches = cost.micro_batches
        self._tables = Costs.of(cost)
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
            self._left -= 1
            if self._left[0] <= 0:
                raise NotProvenError
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
        seconds = self._tables.least(bag, micro_batches, self._best, self._left)
        if self._left[0] <= 0:
            raise NotProvenError
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
