# SPDX-License-Identifier: Apache-2.0
"""Units that are slow in bursts shorter than an iteration, in which their residual hides it. Imports numpy.

A residual leaves out ops that took much longer than the others, because a hiccup is no slowness. But a device that is
slow in some ops of each iteration loses that time. Where nearly all of the newest iterations show such a loss, and
other units don't, the residual is that of the sums of measured and predicted time, with nothing left out. Units without
bursts keep their residuals, and so their thresholds.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

ITERATIONS: Final = 8
"""Newest iterations that tell."""
FEWEST: Final = 6
"""Iterations of these that must show bursts. Few have none of them by chance; hiccups are in few."""
FEWEST_LATER: Final = 2
"""The same once they have been seen: where few ops are timed, those may be between bursts."""
LOST: Final = 0.1
"""Time lost in bursts, log of the ratio of times, relative to the usual one of all units. Ops on busy hosts lose some
percent at times."""


class Bursts:
    """Which units have bursts at present.

    Args:
        units: their number.
    """

    def __init__(self, units: int) -> None:
        self._lost = np.zeros((ITERATIONS, units))
        self._seen = np.zeros(units, dtype=bool)

    def residuals(self, robust: NDArray[np.float64], plain: NDArray[np.float64]) -> NDArray[np.float64]:
        """[units] the residuals of one iteration, NaN where unknown.

        Args:
            robust, plain: [units] residuals with and without outliers clipped.
        """
        lost = plain - robust
        known = np.isfinite(lost)
        if not known.any():
            return robust
        lost = lost - np.median(lost[known])
        self._lost[1:] = np.where(known, self._lost[:-1], self._lost[1:])
        self._lost[0] = np.where(known, lost, self._lost[0])
        times = (np.abs(self._lost) >= LOST).sum(axis=0)
        begin = (times >= FEWEST) & (self._lost.mean(axis=0) >= LOST)
        self._seen = begin | (self._seen & (times >= FEWEST_LATER))
        return np.where(self._seen, plain, robust)
