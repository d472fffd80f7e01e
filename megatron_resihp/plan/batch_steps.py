# SPDX-License-Identifier: Apache-2.0
"""The sizes of global batches that grow with the samples that a job has consumed. Imports only the standard library.

A batch has the size of the last step that begins at or before its first sample, as in Megatron's
StepBatchsizeNumMicroBatchesCalculator.
"""

import sys
from collections.abc import Iterator
from itertools import pairwise

Steps = tuple[tuple[int, int], ...]
"""(first sample, samples in a batch), in growing order, from sample 0; empty: all batches have one size."""


def size_at(steps: Steps, consumed: int) -> int:
    """Samples of the global batch that follows so many samples."""
    return next(size for first, size in reversed(steps) if first <= consumed)


def consumed_before(steps: Steps, iteration: int) -> int:
    """Samples that a job from sample 0 has consumed before an iteration; the first one is 1."""
    left = iteration - 1
    for consumed, size, count in _stretches(steps):
        if left <= count:
            return consumed + left * size
        left -= count
    raise AssertionError("the last step has no end")


def iterations_until(steps: Steps, samples: int) -> int:
    """Iterations of a job from sample 0 that consume so many samples or, with the last one, more."""
    done = 0
    for consumed, size, count in _stretches(steps):
        needed = -(-(samples - consumed) // size)
        if needed <= count:
            return done + needed
        done += count
    raise AssertionError("the last step has no end")


def _stretches(steps: Steps) -> Iterator[tuple[int, int, int]]:
    """Of each step: samples consumed before it, its size, and its number of iterations."""
    consumed = 0
    for (_, size), (following, _) in pairwise(steps):
        count = max(-(-(following - consumed) // size), 0)
        yield consumed, size, count
        consumed += count * size
    yield consumed, steps[-1][1], sys.maxsize
