# SPDX-License-Identifier: Apache-2.0
"""Checks the durations of ops and transfers, and brings them to full shape. Imports numpy."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_resihp.pipeline.op import OpKind

Array = NDArray[np.float64]


def checked_times(
    stages: int, micro_batches: int, splits_backward: bool, durations: ArrayLike, transfers: ArrayLike
) -> tuple[Array, Array]:
    """Check durations and transfers, and give them every axis.

    Args:
        stages, micro_batches: how many there are.
        splits_backward: whether there are ops of kind W; if not, their durations are ignored.
        durations: seconds, [runs, …], broadcastable to [runs, 3 (F, B, W), stages, micro-batches].
        transfers: seconds, broadcastable to [2 (F, B), stages − 1, micro-batches], or the same with runs in front.

    Returns:
        durations as [runs, 3, stages, micro-batches], transfers as [runs or 1, 2, stages − 1, micro-batches].

    Raises:
        ValueError: shapes do not fit, or a time is negative, infinite or NaN.
    """
    ops, edges = np.asarray(durations, np.float64), np.asarray(transfers, np.float64)
    runs = len(ops) if ops.ndim else 0
    ops = np.broadcast_to(ops, (runs, len(OpKind), stages, micro_batches))
    edge_runs = len(edges) if edges.ndim == 4 else 1
    if edge_runs not in (1, runs):
        raise ValueError(f"transfers of {edge_runs} runs do not fit durations of {runs}")
    edges = np.broadcast_to(edges, (edge_runs, 2, stages - 1, micro_batches))
    kinds = 3 if splits_backward else 2
    for name, times in (("durations", ops[:, :kinds]), ("transfers", edges)):
        if times.size and not (times.min() >= 0.0 and times.max() < np.inf):
            raise ValueError(f"{name} must be finite and not negative")
    # Copies, because Numba compiles code once more for read-only arrays.
    return np.array(ops), np.array(edges)
