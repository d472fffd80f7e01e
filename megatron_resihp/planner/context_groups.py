# SPDX-License-Identifier: Apache-2.0
"""Sequences shared in groups of unlike sizes, where no groups of one size use all replicas as well. Imports nothing.

After a death, the replicas that are left seldom go evenly into groups of the job's own size, and smaller groups may not
have the memory for their parts of a sequence. Seven replicas of a job that shares each sequence among four do it best
as four, two and one, or where one can't hold a sequence, as four and two.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations_with_replacement

MOST_SMALLER = 8
"""By how many groups of the largest size there may be fewer than replicas suffice for."""


def fastest_groups(replicas: int, micro_batches: int, stages: int, degrees: Sequence[int]) -> tuple[int, ...]:
    """The sizes of the groups that need the least time, the largest first; of several such, groups of one size come
    first, then the fewest groups.

    A group's time is that of a pipeline without bubbles but its start and end, in which a micro-batch takes the shorter
    the more share it.

    Args:
        replicas: how many there are; some may be left over.
        micro_batches: of the global batch; each group has one at least.
        stages: of each replica.
        degrees: the sizes that groups may have.

    Returns:
        (): there are too few replicas or micro-batches for any.
    """
    timed = [
        (seconds, len(sizes) > 1, sum(sizes.values()), sorted(sizes.elements(), reverse=True))
        for sizes in _candidates(replicas, micro_batches, degrees)
        if (seconds := _seconds(sizes, micro_batches, stages)) is not None
    ]
    return tuple(min(timed)[-1]) if timed else ()


def _candidates(replicas: int, micro_batches: int, degrees: Sequence[int]) -> Iterator[Counter[int]]:
    """Groups of one size, as many as there are micro-batches for; and so many of a size, and of the rest as large ones
    as are allowed."""
    for degree in degrees:
        if degree <= replicas:
            yield Counter({degree: min(replicas // degree, micro_batches)})
    for least, most, largest in combinations_with_replacement(sorted(degrees), 3):
        whole = replicas // largest
        for count in range(max(whole - MOST_SMALLER, 1), whole + 1) if most < largest else ():
            sizes, left = Counter({largest: count}), replicas - count * largest
            for degree in sorted(degrees, reverse=True):
                if least <= degree <= most and left >= degree:
                    sizes[degree], left = left // degree, left % degree
            yield sizes


def _seconds(sizes: Mapping[int, int], micro_batches: int, stages: int) -> Fraction | None:
    """The least time of the slowest group, in that of a micro-batch that one replica runs in one stage; None: there are
    more groups than micro-batches. `sizes`: how many groups there are of each size."""
    groups = sum(sizes.values())
    if groups > micro_batches:
        return None
    fill = stages - 1
    replicas = sum(size * count for size, count in sizes.items())
    seconds = max(Fraction(micro_batches + groups * fill, replicas), Fraction(stages, min(sizes)))
    while sum(count * (int(seconds * size) - fill) for size, count in sizes.items()) < micro_batches:
        seconds = min(Fraction(int(seconds * size) + 1, size) for size in sizes)
    return seconds
