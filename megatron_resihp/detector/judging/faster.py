# SPDX-License-Identifier: Apache-2.0
"""Which healthy units run faster than their levels at present: they do not tell what is normal for the others.

A unit whose warm-up was slow, or whose stage's costs were learned from slow iterations, becomes faster later. Beside
it, units that run as before must not look slow. Its own healthy level stays as it is, since a level that followed would
make the return to it a slow-down. Imports numpy and this package.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.judging.recent import KEPT, moved
from megatron_resihp.detector.judging.sequential import LONGEST

WINDOWS: Final = (3, 8, LONGEST)
"""Numbers of residuals whose mean tells. The shortest is no longer than the shortest run that alarms."""
PRESENT: Final = WINDOWS[1]
"""Number of residuals that tell the present level of a unit that has been faster for LONGEST residuals."""
LOWERED: Final = 2.5
"""Standard errors below 0 from which a mean counts; less than any alarm needs, so that this is known first."""
SETTLED: Final = KEPT
"""Residuals after which no pair of old ones, from which noise is learned, has the change between them."""
_ROWS = np.array(WINDOWS) - 1
_LENGTHS = np.array(WINDOWS, dtype=np.float64)[:, None]


class Faster:
    """The newest residuals of each unit against its own level, without any common part removed.

    Args:
        units: their number.
        smallest: smallest slowdown to report, log of the ratio of times.

    Attributes:
        now: [units] whether the unit is faster than its level.
        level: [units] the present level of units that have been faster for long, below 0; otherwise 0.
        steady: [units] residuals since the level became or ceased to be 0.
    """

    def __init__(self, units: int, smallest: float) -> None:
        self._smallest = smallest
        self.level = np.zeros(units)
        self.steady = np.full(units, SETTLED)
        self.forget()

    def forget(self) -> None:
        """Forget all residuals; the levels that lasted stay known until others are."""
        units = self.level.size
        self.now = np.zeros(units, dtype=bool)
        self._newest = np.zeros((LONGEST, units))
        self._count = np.zeros(units, dtype=np.int64)

    def move(self, source: NDArray[np.int64]) -> None:
        """Switch to other units: `source` gives each one's old number, or -1 if it is new."""
        self.level = moved(self.level, source)
        self.steady = np.where(source < 0, SETTLED, moved(self.steady, source))
        self.forget()

    def see(
        self,
        own: NDArray[np.float64],
        variance: NDArray[np.float64],
        drift: NDArray[np.float64],
        clip: NDArray[np.float64],
    ) -> None:
        """Take in one iteration's residuals, [units], NaN where unknown; the rest is the units' noise."""
        arriving = np.isfinite(own)
        self._newest[1:] = np.where(arriving, self._newest[:-1], self._newest[1:])
        self._newest[0] = np.where(arriving, own, self._newest[0])
        self._count = np.minimum(self._count + arriving, LONGEST)
        means = np.cumsum(np.clip(self._newest, -clip, clip), axis=0)[_ROWS] / _LENGTHS
        limits = np.maximum(self._smallest / 2, LOWERED * np.sqrt(variance / _LENGTHS + drift))
        lasting = means[-1] < -limits[-1]
        present = np.where(lasting, np.minimum(np.median(self._newest[:PRESENT], axis=0), 0.0), 0.0)
        level = np.where(self._count == LONGEST, present, self.level)
        self.steady = np.where((level < 0) == (self.level < 0), np.minimum(self.steady + arriving, SETTLED), 0)
        self.level = level
        self.now = ((means - self.level < -limits) & (self._count >= _LENGTHS)).any(axis=0)
