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


def consumed_after(steps: Steps, iterations: int, consumed: int = 0) -> int:
    """Samples that a job has consumed so many iterations after it had consumed `consumed`."""
    left = iterations
    for reached, size, count in _stretches(steps, consumed):
        if left <= count:
            return reached + left * size
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


def _stretches(steps: Steps, consumed: int = 0) -> Iterator[tuple[int, int, int]]:
    """Of each step, from that sample on: samples consumed before it, its size, and its number of iterations."""
    for (_, size), (following, _) in pairwise(steps):
        count = max(-(-(following - consumed) // size), 0)
        yield consumed, size, count
        consumed += count * size
    yield consumed, steps[-1][1], sys.maxsize
