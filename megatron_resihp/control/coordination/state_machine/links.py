# SPDX-License-Identifier: Apache-2.0
"""Links that fail while both ends live: which have, and which side to do without. Pure; imports the standard library.

Two nodes may reach node 0 and not each other. No worker is dead then, and the same plan would fail again and again.
Two nodes whose link has failed too often are kept apart for a while, whatever workers they have meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field
from math import inf
from typing import Final

FAILURES: Final = 2
"""One failure may be a passing fault. Two workers that can't meet after so many broken epochs can't work together."""
GOOD_S: Final = 3600.0
"""A link that has not failed for so long is good again: what failed before does not count any more."""


@dataclass(frozen=True)
class Separated:
    """Two sides that do not reach each other, on two nodes.

    Attributes:
        without: the side to be left out; empty: there is no plan without either.
        why: in words.
    """

    without: frozenset[int]
    why: str


@dataclass
class FailedLinks:
    """The failed links of one job.

    Attributes:
        node_of: tells a worker's node.
        left_out: workers that were.
        good_in: pairs of nodes that are kept apart → seconds until their link is good again.
    """

    node_of: Callable[[int], int]
    left_out: set[int] = field(default_factory=set)
    good_in: dict[tuple[int, int], float] = field(default_factory=dict)
    _failures: dict[tuple[int, int], int] = field(default_factory=dict)
    """Pair of workers → how often their link failed, since a worker last died."""
    _forgotten_in: dict[tuple[int, int], float] = field(default_factory=dict)
    """Pair of workers with failures → seconds until these don't count any more."""
    _epoch: int = -1

    def note(self, epoch: int, unreachable: Mapping[int, Collection[int]]) -> None:
        """The workers that each survivor could not reach when this epoch had broken; each epoch counts once."""
        if epoch == self._epoch:
            return
        self._epoch = epoch
        pairs = {(min(pair), max(pair)) for one, others in unreachable.items() for pair in ((one, o) for o in others)}
        for pair in pairs:
            if (nodes := self._nodes(pair)) is None:
                continue
            self._failures[pair] = self._failures.get(pair, 0) + 1
            self._forgotten_in[pair] = GOOD_S
            if self._failures[pair] >= FAILURES or nodes in self.good_in:
                self.good_in[nodes] = GOOD_S

    def forget(self, died: Collection[int]) -> None:
        """Forget single failures after a death of another kind: it may have caused them."""
        if not self.left_out.issuperset(died):
            self._failures.clear()
            self._forgotten_in.clear()

    @property
    def quiet_s(self) -> float:
        """In how much time none is forgotten; infinite: there is none."""
        return min((*self._forgotten_in.values(), *self.good_in.values()), default=inf)

    def passed(self, seconds: float) -> bool:
        """So much time has passed; whether a link is good again by now."""
        for pair in _run_down(self._forgotten_in, seconds):
            del self._failures[pair]
        return bool(_run_down(self.good_in, seconds))

    def kept_apart(self, workers: Collection[int], others: Collection[int]) -> str:
        """Why one of these workers can't be in a plan with the others, in words; empty: all can."""
        for nodes, left_s in sorted(self.good_in.items()):
            here, there = ([self._at(node, group) for node in nodes] for group in (workers, others))
            if (here[0] and there[1]) or (here[1] and there[0]):
                return (
                    f"nodes {nodes[0]} and {nodes[1]} have failed to reach each other {FAILURES} times or more, and "
                    f"are kept apart until their link has been good for {GOOD_S:g} s, {left_s:.0f} s from now"
                )
        return ""

    def _at(self, node: int, workers: Collection[int]) -> bool:
        return any(self.node_of(worker) == node for worker in workers)

    def _nodes(self, pair: tuple[int, int]) -> tuple[int, int] | None:
        """The nodes of two workers; None: they are on one."""
        first, second = sorted(map(self.node_of, pair))
        return None if first == second else (first, second)

    def separated(self, living: Set[int], capacity: Callable[[frozenset[int]], int | None]) -> Separated | None:
        """What to do about links that have failed too often.

        Args:
            capacity: how many workers have work without these; None: there is no plan.
        """
        bad = {
            nodes
            for pair, times in self._failures.items()
            if (nodes := self._nodes(pair)) and living >= set(pair) and (times >= FAILURES or nodes in self.good_in)
        }
        # A node's workers share the work of looking for others, so that one may speak for all.
        sides = [[frozenset(w for w in living if self.node_of(w) == node) for node in nodes] for nodes in sorted(bad)]
        if not sides:
            return None
        found = [(side, self._told(*pair)) for pair in sides for side in pair]
        cuts = Counter(side for side, _ in found)
        kept = {side: capacity(side) for side, _ in found}
        possible = [each for each in found if kept[each[0]] is not None]
        if not possible:
            # A link that is only remembered to be bad may have failed in passing this time. So go on as at first.
            again = any(times >= FAILURES and set(pair) <= living for pair, times in self._failures.items())
            return Separated(frozenset(), found[0][1]) if again else None
        # The least capacity lost; among equals the side cut off from most, then the fewest, then the later nodes.
        without, why = max(possible, key=lambda each: (kept[each[0]], cuts[each[0]], -len(each[0]), min(each[0])))
        return Separated(without, why)

    def _told(self, one: Collection[int], other: Collection[int]) -> str:
        return f"{self._named(one)} and {self._named(other)} can't reach each other"

    def _named(self, workers: Collection[int]) -> str:
        numbers = ", ".join(map(str, sorted(workers)))
        return f"worker{'s' if len(workers) > 1 else ''} {numbers} (node {self.node_of(min(workers))})"


def _run_down(seconds_left: dict[tuple[int, int], float], passed_s: float) -> list[tuple[int, int]]:
    """Take time off; what has run out is removed and returned."""
    for pair in seconds_left:
        seconds_left[pair] -= passed_s
    over = [pair for pair, left_s in seconds_left.items() if left_s <= 0]
    for pair in over:
        del seconds_left[pair]
    return over
