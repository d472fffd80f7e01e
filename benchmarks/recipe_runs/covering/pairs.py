# SPDX-License-Identifier: Apache-2.0
"""Few rows that have each pair of values of two factors that can be had. Pure; imports the standard library only.

Greedy, as AETG and its like: a row begins with a pair that no row has yet, and then takes for one factor after another
the value that brings most new pairs. Of several such rows, in as many orders of the factors, the best one is kept. No
value is taken after which the rest of the row can't be filled. The same seed gives the same rows.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from random import Random
from typing import Final

Factors = Mapping[str, Sequence[str]]
"""The values of each factor."""
Row = Mapping[str, str]
"""A value of each factor, or of some."""
Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two factors with a value each, in the order of the factors."""
ATTEMPTS: Final = 10
"""Rows of which the best one is kept."""


@dataclass(frozen=True)
class Forbidden:
    """Values that don't go together.

    Attributes:
        values: of some factors, several of one if each of them is meant.
        why: in words.
    """

    values: Mapping[str, Sequence[str]]
    why: str

    def meets(self, row: Row) -> bool:
        return all(row.get(factor) in values for factor, values in self.values.items())


@dataclass(frozen=True)
class Array:
    """Attributes:
    rows: that together have all pairs but the infeasible ones.
    covered: how many pairs these are.
    infeasible: pairs that are in no row that is allowed.
    """

    rows: tuple[dict[str, str], ...]
    covered: int
    infeasible: tuple[Pair, ...]


class Space:
    """The rows that are allowed."""

    def __init__(self, factors: Factors, forbidden: Sequence[Forbidden]) -> None:
        self.factors = factors
        self._forbidden = forbidden

    def pairs(self) -> list[Pair]:
        return [
            ((one, value), (other, its))
            for one, other in combinations(self.factors, 2)
            for value, its in product(self.factors[one], self.factors[other])
        ]

    def is_allowed(self, row: Row) -> bool:
        return not any(forbidden.meets(row) for forbidden in self._forbidden)

    def can_be_filled(self, row: Row) -> bool:
        """Whether some complete row has these values. Only factors that constraints name can stand in the way."""
        if not self.is_allowed(row):
            return False
        named = {factor for forbidden in self._forbidden for factor in forbidden.values}
        free = next((factor for factor in self.factors if factor in named and factor not in row), None)
        return free is None or any(self.can_be_filled({**row, free: value}) for value in self.factors[free])


def covering_array(factors: Factors, forbidden: Sequence[Forbidden], seed: int) -> Array:
    """Each pair of values that some allowed row has is in one of the array's rows."""
    space, random = Space(factors, forbidden), Random(seed)
    pairs = space.pairs()
    infeasible = tuple(pair for pair in pairs if not space.can_be_filled(dict(pair)))
    missing = set(pairs) - set(infeasible)
    covered = len(missing)
    rows: list[dict[str, str]] = []
    while missing:
        candidates = [_row(space, missing, random) for _ in range(ATTEMPTS)]
        best = max(candidates, key=lambda row: len(missing & set(pairs_of(row, factors))))
        missing -= set(pairs_of(best, factors))
        rows.append({factor: best[factor] for factor in factors})
    return Array(tuple(rows), covered, infeasible)


def pairs_of(row: Row, factors: Iterable[str]) -> Iterator[Pair]:
    return combinations([(factor, row[factor]) for factor in factors if factor in row], 2)


def _row(space: Space, missing: set[Pair], random: Random) -> dict[str, str]:
    """A complete row with at least one pair that is missing."""
    row = dict(random.choice(sorted(missing)))
    left = [factor for factor in space.factors if factor not in row]
    random.shuffle(left)
    for factor in left:
        row[factor] = max(
            (value for value in space.factors[factor] if space.can_be_filled({**row, factor: value})),
            key=lambda value: (_gain(space, missing, row, (factor, value)), random.random()),
        )
    return row


def _gain(space: Space, missing: set[Pair], row: Row, new: tuple[str, str]) -> int:
    order = {factor: number for number, factor in enumerate(space.factors)}
    return sum(tuple(sorted((new, old), key=lambda item: order[item[0]])) in missing for old in row.items())
