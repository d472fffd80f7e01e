# SPDX-License-Identifier: Apache-2.0
"""The part of the residuals that many workers share at one moment, to be removed from each one. Imports numpy.

Neither estimate hides a fault. The job's level stays 0 unless more than three quarters of the workers moved together. A
node's median follows its workers, so each worker is also judged without it (`tracker`).
"""

import numpy as np
from numpy.typing import NDArray

FEWEST_PEERS = 3
"""Fewest workers for a median; one slow worker shifts a median of fewer."""
FEWEST_INTERPOLATED = 4
"""Fewest workers for quartiles between two of them."""


def job_level(residuals: NDArray[np.float64], usable: NDArray[np.bool_]) -> float:
    """The point nearest to 0 between the lower and the upper quartile of the usable residuals; 0 if there are none.

    Independent noise gives 0. A shift that all workers share gives that shift, less two thirds of a standard deviation
    of the unshared noise, or more among two or three workers. Up to three quarters of slow workers (such as a whole
    node of two) give 0; a median would blame half of their slowness on the healthy workers.
    """
    values = residuals[usable]
    if values.size < 2:
        return 0.0
    values.sort()
    # Linear interpolation between order statistics, as numpy.quantile does at many times the cost. Not among so few
    # that one slow worker is more than a quarter: the job's level would get a part of its fault.
    place, part = divmod(0.25 * (values.size - 1), 1.0) if values.size >= FEWEST_INTERPOLATED else (0.0, 0.0)
    first = int(place)
    low = values[first] + part * (values[first + 1] - values[first])
    high = values[-1 - first] - part * (values[-1 - first] - values[-2 - first])
    return float(min(max(0.0, low), high))


def peer_medians(
    residuals: NDArray[np.float64], usable: NDArray[np.bool_], group: NDArray[np.int64]
) -> NDArray[np.float64]:
    """For each unit, the median of its group's *other* usable residuals; NaN if fewer than FEWEST_PEERS are usable.

    The unit's own residual is left out. A median that includes it follows it in its usual range but not in its tail, so
    the variance of the difference would say too little about the tail.

    Args:
        residuals, usable: [units].
        group: [units], numbers from 0.
    """
    groups = int(group.max()) + 1 if group.size else 0
    members = np.flatnonzero(usable)
    order = members[np.lexsort((residuals[members], group[members]))]
    count = np.bincount(group[members], minlength=groups)
    first = (np.cumsum(count) - count)[group]
    # Units that are not usable rank behind all others.
    rank = np.full(group.size, group.size)
    rank[order] = np.arange(order.size) - first[order]
    others = count[group] - usable
    enough = others >= FEWEST_PEERS
    medians = np.full(group.size, np.nan)
    low_place, high_place = ((others - 1) // 2)[enough], (others // 2)[enough]
    low, high = (first[enough] + place + (place >= rank[enough]) for place in (low_place, high_place))
    medians[enough] = (residuals[order[low]] + residuals[order[high]]) / 2
    return medians
