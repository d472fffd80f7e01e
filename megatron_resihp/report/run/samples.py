# SPDX-License-Identifier: Apache-2.0
"""Was every sample applied exactly once, and in the iteration that it belongs to?

Iteration i must consume the samples of the data stream that follow those of iteration i - 1, as many as its global
batch has. May import: the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


def count_samples(feeds: Iterable[Feed], first: int, last: int, before: Callable[[int], int]) -> SampleCount:
    """Check the feeds of iterations first + 1 .. last against the samples due in them. `before`: iteration → how many
    samples all earlier ones have."""
    intervals: list[tuple[int, int]] = []
    consumed = in_place = 0
    for feed in feeds:
        due = (before(feed.iteration), before(feed.iteration + 1))
        for begin, final in feed.ranges:
            interval = (begin, final + 1)
            intervals.append(interval)
            consumed += _length(interval)
            in_place += _overlap(interval, due)
    distinct = _union(intervals)
    all_due = (before(first + 1), before(max(first, last) + 1))
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
