# SPDX-License-Identifier: Apache-2.0
"""The part of the residuals that many workers share at one moment, to be removed from each one. Imports numpy.

No estimate hides a fault. The job's level stays 0 unless more than three quarters of the workers moved together. So
does a stage's, over three replicas or more: its work has changed, such as the load of its experts, as devices on
different nodes don't become slow at once. It is less only if all of them are faster. A node's median follows its
workers, so each worker is also judged without it (`tracker`).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FEWEST_PEERS = 3
"""Fewest workers for a median; one slow worker shifts a median of fewer."""
FEWEST_INTERPOLATED = 4
"""Fewest workers for quartiles between two of them."""
FEWEST_REPLICAS = 3
"""Fewest replicas whose workers tell that a stage's work has changed."""


@dataclass(frozen=True)
class Places:
    """Where units are: arrays of numbers from 0.

    Attributes:
        node: [units] the node that they share noise with.
        stage, replica: [units] whose work they do; None for units without work of their own, such as links.
    """

    node: NDArray[np.int64]
    stage: NDArray[np.int64] | None = None
    replica: NDArray[np.int64] | None = None


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


def stage_levels(
    residuals: NDArray[np.float64], usable: NDArray[np.bool_], places: Places, least: float
) -> NDArray[np.float64]:
    """[units] how much the work of each unit's stage has changed, log of the ratio of times; 0 unless by `least`.

    Args:
        residuals: [units] relative to the job's level.
        usable: [units] which are known and healthy.
    """
    levels = np.zeros(residuals.size)
    if places.stage is None or places.replica is None:
        return levels
    known = np.bincount(places.stage, usable)
    moved = np.zeros(known.size, dtype=bool)
    with np.errstate(invalid="ignore"):
        for far in (residuals > least, residuals < -least):
            moved |= (known > 0) & (np.bincount(places.stage, usable & far) >= 0.75 * known)
    for stage in np.flatnonzero(moved):
        members = places.stage == stage
        if np.unique(places.replica[members & usable]).size >= FEWEST_REPLICAS:
            level = _level_of_work(residuals, members, usable, places.node)
            levels[members] = level if abs(level) >= least else 0.0
    return levels


def _level_of_work(
    residuals: NDArray[np.float64], members: NDArray[np.bool_], usable: NDArray[np.bool_], node: NDArray[np.int64]
) -> float:
    """The level of which three quarters of the members have as much at least, unless a node explains it.

    Where they have less, it is what all members show: beside faster ones, who stays as it was must not look slow.
    """
    values = np.sort(residuals[members & usable])
    ends = [float(values[values.size // 4]), float(values[-1])]
    nodes = np.unique(node[members & usable])
    if nodes.size > 1:
        ends += [float(np.median(residuals[members & usable & (node == each)])) for each in nodes]
        return min(max(0.0, min(ends)), max(ends))
    level = min(max(0.0, ends[0]), ends[1])
    others = usable & (node == nodes[0]) & ~members
    # A node on which everybody has moved is slow itself.
    return level if others.any() and abs(job_level(residuals, others)) < abs(level) / 2 else 0.0


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
