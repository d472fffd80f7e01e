# SPDX-License-Identifier: Apache-2.0
"""Levels of units' residuals: which units are healthy, and which were slow all the time. Imports numpy."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

FEWEST_PEERS: Final = 4
OUTLYING: Final = 6.0


def healthy_levels(
    history: NDArray[np.float64], peers: NDArray[np.int64], slowest: float
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Each unit's healthy level, and whether it was slow throughout warm-up.

    The level is the median of the unit's residuals. A unit counts as slow from the start if its level exceeds its
    peers' median by more than `slowest` and by more than OUTLYING robust standard deviations of the peers' levels. Its
    healthy level is then that of its peers. With fewer than FEWEST_PEERS peers, no unit counts as slow.

    Args:
        history: [iterations, units], NaN where unknown.
        peers: [units] group number; units with the same number have the same work.
        slowest: share of additional time.
    """
    level = column_medians(history)
    slow = np.zeros(level.size, dtype=bool)
    for number in np.unique(peers):
        members = np.flatnonzero(peers == number)
        if members.size < FEWEST_PEERS:
            continue
        centre = np.median(level[members])
        spread = 1.4826 * np.median(np.abs(level[members] - centre))
        slow[members] = level[members] - centre > max(np.log1p(slowest), OUTLYING * spread)
        level[members[slow[members]]] = centre
    return level, slow


def new_levels(
    history: NDArray[np.float64],
    peers: NDArray[np.int64],
    slowest: float,
    new: NDArray[np.bool_],
    healthy: NDArray[np.bool_],
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """As `healthy_levels`, for units of which some are new. One peer that was healthy before is enough for these.

    Predictions are scaled to the known units, so that a new one like them has a level of 0. What a few iterations tell
    of its level is uncertain by their own noise.

    Args:
        history, peers, slowest: as in `healthy_levels`.
        new, healthy: [units] whether nothing was known of the unit before, or that it was healthy.
    """
    seen = column_medians(history)
    level, slow = healthy_levels(history, peers, slowest)
    count = np.isfinite(history).sum(axis=0)
    error = 1.4826 * column_medians(np.abs(history - seen)) * np.sqrt(np.pi / 2 / np.maximum(count, 1))
    few = np.bincount(peers)[peers] < FEWEST_PEERS
    told = few & new & (np.bincount(peers, healthy) > 0)[peers]
    found = told & (seen > np.maximum(np.log1p(slowest), OUTLYING * error))
    return np.where(found, 0.0, level), slow | found


def column_medians(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Median over the first axis, 0 in columns without a known value."""
    known = ~np.isnan(values).all(axis=0)
    result = np.zeros(values.shape[1:])
    if values.size:
        result[known] = np.nanmedian(values[:, known], axis=0)
    return result
