"""One iteration as the detector sees it: the records of all workers as arrays, indexed by worker and by link.

Imports numpy.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Layout:
    """Where each worker stands in an epoch's plan. All arrays have one element per worker that has work.

    Attributes:
        epoch: the epoch.
        workers: worker ids.
        replica, stage, tp_rank: coordinates in the plan.
        node: index of the machine that the worker runs on.
        links: pairs of worker ids that send each other activations and gradients, shape [links, 2].
    """

    epoch: int
    workers: NDArray[np.int64]
    replica: NDArray[np.int64]
    stage: NDArray[np.int64]
    tp_rank: NDArray[np.int64]
    node: NDArray[np.int64]
    links: NDArray[np.int64]


@dataclass(frozen=True)
class IterationObservations:
    """What happened in one iteration. Times in seconds; NaN where nothing was recorded.

    Attributes:
        epoch: the epoch; its Layout gives the order of workers and links.
        iteration: number of the iteration, from 1.
        compute: [workers, kinds (F, B, W), chunks, micro-batches] duration of each op.
        waited: the same shape; of that duration, the time spent waiting in tensor-parallel collectives; NaN where it
            was not timed, so that the op's duration may hold other members' slowness.
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
