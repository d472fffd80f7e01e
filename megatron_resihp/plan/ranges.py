# SPDX-License-Identifier: Apache-2.0
"""State cut by elements: which worker holds which part of a parameter, and which sends what. Standard library only.

Megatron's distributed optimizer puts all parameters of a shard into flat buffers. It cuts each buffer into equal parts,
one for each replica, regardless of where parameters end. So a worker's part is a list of ranges of flattened
parameters.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple


class Range(NamedTuple):
    """Elements start … end − 1 of a flattened parameter.

    Attributes:
        name: name of the parameter, the same on all its holders.
    """

    name: str
    start: int
    end: int

    def common(self, other: "Range") -> "Range | None":
        """The elements that both ranges contain."""
        start, end = max(self.start, other.start), min(self.end, other.end)
        return Range(self.name, start, end) if self.name == other.name and start < end else None


class RangeMove(NamedTuple):
    """`source` gives ranges to `target`, each inside one range of either; both may be the same worker."""

    source: int
    target: int
    ranges: tuple[Range, ...]


Ranges = Mapping[int, Sequence[Range]]
"""For each worker, ranges that do not overlap."""


def plan_range_moves(holdings: Ranges, wanted: Ranges) -> tuple[list[RangeMove], tuple[Range, ...]]:
    """Which worker gives which elements to which; the same on every worker.

    A worker takes what it has from itself, and the rest from other workers, spread over the holders.

    Args:
        holdings: for each living worker, the ranges that it holds up to date.
        wanted: for each worker, the ranges that it needs.

    Returns:
        the moves, in an order in which they can run one after the other, and the ranges that no worker holds.
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
    """The pieces of a range, cut where a holder's range begins or ends, and the holders of each piece."""
    overlaps = [(part, worker) for held, worker in holders if (part := whole.common(held)) is not None]
    ends = sorted({whole.start, whole.end, *(end for part, _ in overlaps for end in (part.start, part.end))})
    for start, end in pairwise(ends):
        piece = Range(whole.name, start, end)
        yield piece, [worker for part, worker in overlaps if part.start <= start and end <= part.end]
