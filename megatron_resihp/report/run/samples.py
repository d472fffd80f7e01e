# SPDX-License-Identifier: Apache-2.0
"""Was every sample applied exactly once, and in the iteration that it belongs to?

Iteration i must consume samples [(i - 1) * B, i * B) of the data stream, B being the global batch size.
May import: the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Feed(NamedTuple):
    """The samples that one replica fed to the model in an applied attempt of `iteration`."""

    iteration: int
    ranges: Sequence[Sequence[int]]
    """[first, last] sample indices, both included."""


class SampleCount(NamedTuple):
    consumed: int
    """Number of applications of samples."""
    applied_twice: int
    """Applications of a sample after its first, in whatever iteration."""
    lost: int
    """Samples due in the iterations that were run, but never applied."""
    out_of_place: int
    """Applications in an iteration other than the sample's own."""


def count_samples(feeds: Iterable[Feed], first: int, last: int, batch: int) -> SampleCount:
    """Check the feeds of iterations first + 1 .. last against the samples due in them."""
    intervals: list[tuple[int, int]] = []
    consumed = in_place = 0
    for feed in feeds:
        due = ((feed.iteration - 1) * batch, feed.iteration * batch)
        for begin, final in feed.ranges:
            interval = (begin, final + 1)
            intervals.append(interval)
            consumed += _length(interval)
            in_place += _overlap(interval, due)
    distinct = _union(intervals)
    all_due = (first * batch, max(first, last) * batch)
    found = sum(_overlap(interval, all_due) for interval in distinct)
    return SampleCount(
        consumed=consumed,
        applied_twice=consumed - sum(map(_length, distinct)),
        lost=_length(all_due) - found,
        out_of_place=consumed - in_place,
    )


def _length(interval: tuple[int, int]) -> int:
    return max(0, interval[1] - interval[0])


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> int:
    return _length((max(a[0], b[0]), min(a[1], b[1])))


def _union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same samples as disjoint intervals in ascending order."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged
