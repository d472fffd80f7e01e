# SPDX-License-Identifier: Apache-2.0
"""Chooses which micro-batches of a global batch each replica runs. Imports only the standard library.

Micro-batch m of an iteration is always samples [m * mbs, (m + 1) * mbs) of its global batch; replicas differ only in
the m that they run. With equal counts, the dealing is Megatron's own (replica r runs m = r, r + R, r + 2R, ...).
"""

import heapq
from collections.abc import Sequence
from fractions import Fraction


def even_counts(micro_batches: int, replicas: int) -> tuple[int, ...]:
    """Split `micro_batches` over `replicas` so that counts differ by at most one, the larger ones first."""
    if replicas < 1 or micro_batches < replicas:
        raise ValueError(f"{micro_batches} micro-batches cannot give each of {replicas} replicas at least one")
    base, extra = divmod(micro_batches, replicas)
    return tuple(base + 1 if replica < extra else base for replica in range(replicas))


def deal(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Deal micro-batches 0, 1, ... in turns to replicas that still have room; `counts[r]` go to replica r."""
    hands: list[list[int]] = [[] for _ in counts]
    dealt = 0
    while dealt < sum(counts):
        for hand, count in zip(hands, counts, strict=True):
            if len(hand) < count:
                hand.append(dealt)
                dealt += 1
    return tuple(tuple(hand) for hand in hands)


def filled_up(own: Sequence[int], rounds: int) -> tuple[int, ...]:
    """The micro-batches that a replica runs in so many rounds: in those for which it has none, its last one again."""
    return (*own, *[own[-1]] * (rounds - len(own)))


def can_be_grouped(stages: int, micro_batches: int, group: int) -> bool:
    """Whether Megatron's interleaved schedule runs so many in groups of this size: no group, the last one included, may
    be smaller than the number of stages."""
    return stages <= group <= micro_batches and (micro_batches % group or stages) >= stages


def grouped_counts(micro_batches: int, replicas: int, stages: int, group: int, in_step: int = 1) -> tuple[int, ...]:
    """Split them over replicas that are interleaved pipelines: evenly if what each runs can be grouped so, or else in
    whole groups if there are enough, since larger groups need more memory.

    Args:
        in_step: so many replicas in a row run as many as the first of them.
    """
    even = even_counts(micro_batches, replicas)
    groups, rest = divmod(micro_batches, group)
    if rest or groups < replicas or all(can_be_grouped(stages, run, group) for run in even[::in_step]):
        return even
    return tuple(group * count for count in even_counts(groups, replicas))


def counts_by_size(micro_batches: int, sizes: Sequence[int], stages: int) -> tuple[int, ...]:
    """Split them over groups of so many replicas that share sequences, so that the longest time is the least; each has
    one at least, if there are as many.

    A micro-batch takes the shorter the more share it. A group's pipeline takes as long as so many more of them as it
    has stages after the first.
    """
    least = int(micro_batches >= len(sizes))
    counts = [least] * len(sizes)
    # What a group takes with one more.
    waiting = [(Fraction(least + stages, size), number) for number, size in enumerate(sizes)]
    heapq.heapify(waiting)
    for _ in range(micro_batches - sum(counts)):
        seconds, number = waiting[0]
        counts[number] += 1
        heapq.heapreplace(waiting, (seconds + Fraction(1, sizes[number]), number))
    return tuple(counts)


def even_share(micro_batches: int, replicas: int, replica: int) -> tuple[int, ...]:
    """The share of one replica in an even deal; empty for surplus replicas if there are more than micro-batches."""
    busy = min(micro_batches, replicas)
    return deal(even_counts(micro_batches, busy))[replica] if replica < busy else ()
