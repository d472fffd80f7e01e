# SPDX-License-Identifier: Apache-2.0
"""The sizes of global batches that grow with the samples that a job has consumed. Imports only the standard library.

A batch has the size of the last step that begins at or before its first sample, as in Megatron's
StepBatchsizeNumMicroBatchesCalculator.
"""

from itertools import pairwise
from math import inf

Steps = tuple[tuple[int, int], ...]
"""(first sample, samples in a batch), in growing order, from sample 0; empty: all batches have one size."""


def size_at(steps: Steps, consumed: int) -> int:
    """Samples of the global batch that follows so many samples."""
    return next(size for first, size in reversed(steps) if first <= consumed)


def consumed_before(steps: Steps, iteration: int) -> int:
    """Samples that a job from sample 0 has consumed before an iteration; the first one is 1."""
    consumed, done = 0, 1
    for (_, size), (following, _) in pairwise((*steps, (inf, 0))):
        here = (
            iteration - done
            if following == inf
            else min(max(-(-(int(following) - consumed) // size), 0), iteration - done)
        )
        consumed, done = consumed + here * size, done + here
    return consumed
