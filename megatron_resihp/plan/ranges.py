# SPDX-License-Identifier: Apache-2.0
"""State that is cut by elements: who holds which part of a parameter, and who sends what. Standard library only.

Megatron's distributed optimizer lays all parameters of a shard out in flat buffers and cuts these into equal parts, one
for each replica, wherever a parameter ends. So a worker's part is a list of ranges of flattened parameters.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple


class Range(NamedTuple):
    """Elements start … end − 1 of a flattened parameter.

    Attributes:
        name: of the parameter, the same on all its holders.
    """

    name: str
    start: int
    end: int

    def common(self, other: "Range") -> "Range | None":
        """The elements that both have."""
        start, end = max(self.start, other.start), min(self.end, other.end)
        return Range(self.name, start, end) if self.name == other.name and start < end else None


class RangeMove(NamedTuple):
    """`source` gives ranges to `target`, each within one of its own and one of the target's; both may be one worker."""

    source: int
    target: int
    ranges: tuple[Range, ...]


Ranges = Mapping[int, Sequence[Range]]
"""For each worker ranges that do not overlap."""


def plan_range_moves(holdings: Ranges, wanted: Ranges) -> tuple[list[RangeMove], tuple[Range, ...]]:
    """Who gives which elements to whom; the same on every worker.

    A worker takes from itself what it has, and the rest from others, spread over those who have it.

    Args:
        holdings: for each living worker what it holds, current.
        wanted: for each worker what it needs.

    Returns:
        the moves in an order in which they can be made one after the other, and what nobody holds.
    """
    holders = _by_name(holdings)
    sent = dict.fromkeys(holdings, 0)
    pairs: dict[tuple[int, int], list[Range]] = {}
    missing = []
    for target in sorted(wanted):
        for whole in sorted(wanted[target]):
            for piece, sources in _pieces(whole, holders.get(whole.name, ())):
                if not sources:
                    missing.append(piece)
                    continue
                source = target if target in sources else min(sources, key=lambda each: (sent[each], each))
                sent[source] += piece.end - piece.start if source != target else 0
                pairs.setdefault((source, target), []).append(piece)
    return [RangeMove(*pair, tuple(pieces)) for pair, pieces in sorted(pairs.items())], tuple(missing)


def _by_name(holdings: Ranges) -> dict[str, list[tuple[Range, int]]]:
    found: dict[str, list[tuple[Range, int]]] = {}
    for worker in sorted(holdings):
        for each in holdings[worker]:
            found.setdefault(each.name, []).append((each, worker))
    return found


def _pieces(whole: Range, holders: Iterable[tuple[Range, int]]) -> Iterator[tuple[Range, list[int]]]:
    """A range cut wherever some holder's begins or ends, and who holds each piece."""
    overlaps = [(part, worker) for held, worker in holders if (part := whole.common(held)) is not None]
    ends = sorted({whole.start, whole.end, *(end for part, _ in overlaps for end in (part.start, part.end))})
    for start, end in pairwise(ends):
        piece = Range(whole.name, start, end)
        yield piece, [worker for part, worker in overlaps if part.start <= start and end <= part.end]
