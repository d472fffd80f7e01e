# SPDX-License-Identifier: Apache-2.0
"""Links that fail while both ends live: which have, and which side to do without. Pure; imports the standard library.

Two nodes may reach node 0 and not each other. No worker is dead then, and the same plan would fail again and again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

FAILURES: Final = 2
"""One failure may be a passing fault. Two workers that can't meet after so many broken epochs can't work together."""


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
    """The failed links of one job, since a worker last died.

    Attributes:
        node_of: tells a worker's node.
        left_out: workers that were.
    """

    node_of: Callable[[int], int]
    left_out: set[int] = field(default_factory=set)
    _failures: Counter[tuple[int, int]] = field(default_factory=Counter)
    _epoch: int = -1

    def note(self, epoch: int, unreachable: Mapping[int, Collection[int]]) -> None:
        """The workers that each survivor could not reach when this epoch had broken; each epoch counts once."""
        if epoch == self._epoch:
            return
        self._epoch = epoch
        pairs = {(min(pair), max(pair)) for one, others in unreachable.items() for pair in ((one, o) for o in others)}
        self._failures.update(pair for pair in pairs if self.node_of(pair[0]) != self.node_of(pair[1]))

    def forget(self, died: Collection[int]) -> None:
        """Forget earlier failures after a death of another kind: it may have caused them."""
        if not self.left_out.issuperset(died):
            self._failures.clear()

    def separated(self, living: Collection[int], capacity: Callable[[frozenset[int]], int | None]) -> Separated | None:
        """What to do about links that have failed too often.

        Args:
            capacity: how many workers have work without these; None: there is no plan.
        """
        sides: dict[tuple[int, int], tuple[set[int], set[int]]] = {}
        for (one, other), times in self._failures.items():
            if times >= FAILURES and one in living and other in living:
                ends = sorted((one, other), key=self.node_of)
                pair = sides.setdefault((self.node_of(ends[0]), self.node_of(ends[1])), (set(), set()))
                for side, end in zip(pair, ends, strict=True):
                    side.add(end)
        if not sides:
            return None
        found = [(frozenset(side), self._told(*pair)) for pair in sides.values() for side in pair]
        cuts = Counter(side for side, _ in found)
        kept = {side: capacity(side) for side, _ in found}
        possible = [each for each in found if kept[each[0]] is not None]
        if not possible:
            return Separated(frozenset(), found[0][1])
        # The least capacity lost; among equals the side cut off from most, then the fewest, then the later nodes.
        without, why = max(possible, key=lambda each: (kept[each[0]], cuts[each[0]], -len(each[0]), min(each[0])))
        return Separated(without, why)

    def _told(self, one: Collection[int], other: Collection[int]) -> str:
        return f"{self._named(one)} and {self._named(other)} can't reach each other"

    def _named(self, workers: Collection[int]) -> str:
        numbers = ", ".join(map(str, sorted(workers)))
        return f"worker{'s' if len(workers) > 1 else ''} {numbers} (node {self.node_of(min(workers))})"
