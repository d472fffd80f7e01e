# SPDX-License-Identifier: Apache-2.0
"""Splits layers over the stages of a pipeline: contiguous, within memory, with the fastest possible slowest stage.

Imports numpy, `cost`, `plan` and this package.
"""

from collections.abc import Sequence

import numpy as np

from megatron_resihp.cost.job import Array, JobCost
from megatron_resihp.plan import Chunk

_TOLERANCE = 1e-9
_ROUNDING = 8
"""Bytes by which `memory_of`, which rounds each kind of memory up, may exceed the sum here."""


def balanced_chunks(
    degrees: Sequence[int], speeds: Sequence[float], cost: JobCost, copies: int, in_flight: Sequence[int]
) -> tuple[Chunk, ...] | None:
    """The contiguous split with the least time of the slowest stage; among equals, the one with the least variance.

    Args:
        degrees, speeds: of each stage, the tensor-parallel degree and the slowest member's speed.
        cost: of the job.
        copies: how many replicas hold each layer and share a distributed optimizer's state.
        in_flight: micro-batches whose activations each stage keeps at once.

    Returns:
        One chunk for each stage, with at least one layer; None if no split fits in memory.
    """
    if len(degrees) > cost.layers:
        return None
    spans = [
        _spans(degree, speed, cost, copies, kept)
        for degree, speed, kept in zip(degrees, speeds, in_flight, strict=True)
    ]
    slowest = _least(spans, np.maximum)[0][-1]
    if slowest == np.inf:
        return None
    capped = [np.where(times <= slowest * (1 + _TOLERANCE), times**2, np.inf) for times in spans]
    _, before = _least(capped, np.add)
    ends = [cost.layers]
    for choice in reversed(before):
        ends.append(int(choice[ends[-1]]))
    ends.reverse()
    return tuple(Chunk(stage, *ends[stage : stage + 2]) for stage in range(len(degrees)))


def _spans(degree: int, speed: float, cost: JobCost, copies: int, kept: int) -> Array:
    """Seconds of a micro-batch in layers first, …, end − 1: [first, end]; infinite if they do not fit in memory."""
    sizes = cost.bytes(degree, copies)
    seconds = np.append(0.0, cost.seconds(degree).sum(axis=0).cumsum()) / speed
    held = np.append(0.0, (sizes.state + kept * sizes.kept).cumsum())
    first, end = np.indices((len(held), len(held)))
    working = np.where(end > first, np.append(0.0, sizes.working), 0.0)
    used = held - held[:, np.newaxis] + np.maximum.accumulate(working, axis=1)
    fits = (end > first) & (used <= cost.device.memory - _ROUNDING)
    return np.where(fits, seconds - seconds[:, np.newaxis], np.inf)


def _least(spans: Sequence[Array], join: np.ufunc) -> tuple[Array, list[Array]]:
    """Dynamic program over stages: the least joined value up to each layer, and where each last stage begins."""
    best = np.full(len(spans[0]), np.inf)
    best[0] = 0.0
    before = []
    for values in spans:
        joined = join(best[:, np.newaxis], values)
        before.append(joined.argmin(axis=0))
        best = joined.min(axis=0)
    return best, before
