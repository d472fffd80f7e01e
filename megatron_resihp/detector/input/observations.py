# SPDX-License-Identifier: Apache-2.0
"""One iteration as the detector sees it: the records of all workers as arrays, indexed by worker and by link.

Imports numpy and `cost.arrays`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.cost.arrays import Ints


@dataclass(frozen=True)
class Layout:
    """Where each worker stands in an epoch's plan. All arrays have one element per worker that has work.

    Attributes:
        epoch: the epoch.
        workers: worker ids.
        replica, stage, tp_rank: coordinates in the plan.
        node: index of the machine that the worker runs on.
        links: pairs of worker ids that send each other activations and gradients, shape [links, 2].
        native: whether Megatron's own schedule runs the plan, so that iterations can be predicted.
    """

    epoch: int
    workers: Ints
    replica: Ints
    stage: Ints
    tp_rank: Ints
    node: Ints
    links: Ints
    native: bool = True


@dataclass(frozen=True)
class IterationObservations:
    """What happened in one iteration. Times in seconds; NaN where nothing was recorded.

    Attributes:
        epoch: the epoch; its Layout gives the order of workers and links.
        iteration: number of the iteration, from 1.
        compute: [workers, kinds (F, B, W), chunks, micro-batches] duration of each op.
        waited: the same shape; the part of that duration spent waiting in tensor-parallel collectives. NaN where it was
            not timed, so that the op's duration may contain other members' slowness.
        tokens, squares: [workers, micro-batches] N and Σ l² of the micro-batch.
        transfer: [links, transfers] duration of each transfer, without the wait for a peer that was not there yet.
        transfer_bytes: [links, transfers].
        spans: [workers, SpanKind] total time in each kind of span.
        seconds: [workers] the iteration's duration on that worker's clock.
        reported: [workers] whether the worker's record arrived.
    """

    epoch: int
    iteration: int
    compute: NDArray[np.float64]
    waited: NDArray[np.float64]
    tokens: NDArray[np.float64]
    squares: NDArray[np.float64]
    transfer: NDArray[np.float64]
    transfer_bytes: NDArray[np.float64]
    spans: NDArray[np.float64]
    seconds: NDArray[np.float64]
    reported: NDArray[np.bool_]


def stacked(observations: Sequence[IterationObservations], name: str) -> NDArray[np.float64]:
    """One array of all iterations, padded with NaN where some recorded less than others."""
    return padded([getattr(each, name) for each in observations])


def padded(arrays: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """One array of all of them, padded with NaN to the largest."""
    shape = np.max([array.shape for array in arrays], axis=0)
    result = np.full((len(arrays), *shape), np.nan)
    for row, array in zip(result, arrays, strict=True):
        row[tuple(map(slice, array.shape))] = array
    return result


def with_chunks(observations: IterationObservations, chunks: int) -> IterationObservations:
    """The observations with this number of model chunks per worker, padded with NaN or cut."""
    compute, waited = observations.compute, observations.waited
    if compute.shape[2] == chunks:
        return observations
    missing = [(0, 0), (0, 0), (0, max(chunks - compute.shape[2], 0)), (0, 0)]
    compute, waited = (np.pad(each[:, :, :chunks], missing, constant_values=np.nan) for each in (compute, waited))
    return replace(observations, compute=compute, waited=waited)


def without(observations: IterationObservations, workers: NDArray[np.bool_]) -> IterationObservations:
    """The observations without these workers' op measurements, [workers]."""
    if not workers.any():
        return observations
    compute = np.where(workers[:, None, None, None], np.nan, observations.compute)
    return replace(observations, compute=compute)
