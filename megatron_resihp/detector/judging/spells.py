# SPDX-License-Identifier: Apache-2.0
"""How residuals vary while a unit is slow, which may be much more than while it is healthy.

A device that throttles or shares its node with another job is not evenly slow. Judged by its healthy noise, each of its
swings would be a recovery or another severity. Imports numpy and this package.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.judging.level_tests import SEVERITY_WINDOW, LevelChange, Series, UnitNoise
from megatron_resihp.detector.judging.noise import CLIP, SIGNIFICANT
from megatron_resihp.detector.judging.recent import moved
from megatron_resihp.detector.judging.sequential import LONGEST, MEANS, RUNS
from megatron_resihp.detector.verdict import Change

LAGS: Final = (1, 5, 11, 17)
"""Lags of the variogram in residuals. The first tells the variance, the greatest of the others what swings add."""
REMEMBERED: Final = 96
"""Pairs of residuals after which a variance is forgotten: slowness that grew and then stays is steady again."""
PROVEN: Final = MEANS[-2]
"""Healthy residuals of a recovery after a relapse; the longest window that leaves some to compare with."""
NEVER: Final = -(10**9)
"""An iteration that was long ago."""
FEWEST_PAIRS: Final = 4
"""Pairs of residuals from which a variance counts."""


class Spells:
    """What was seen of each unit while it was slow. It stays known after a recovery, for the next onset.

    Args:
        units: their number.
    """

    def __init__(self, units: int) -> None:
        self._half_squares = np.zeros((len(LAGS), units))
        self._pairs = np.zeros((len(LAGS), units))
        self._since_onset = np.zeros(units, dtype=np.int64)
        self._since_severity = np.zeros(units, dtype=np.int64)
        self._recovered = np.full(units, NEVER)
        self._relapsed = np.zeros(units, dtype=bool)

    def move(self, source: NDArray[np.int64]) -> None:
        """Go on with other units; `source` gives each one's number before, or -1 if it is new."""
        for name in ("_half_squares", "_pairs", "_since_onset", "_since_severity", "_recovered", "_relapsed"):
            setattr(self, name, moved(getattr(self, name), source))
        self._recovered[source < 0] = NEVER

    def see(self, unit: int, series: Series, healthy: UnitNoise) -> None:
        """Take in a slow unit's residuals since its level last changed, newest first, after each new one.

        The newest are left out: they may have another level, which has not been found yet. A
        stall counts as CLIP standard deviations, or it would hide a recovery.
        """
        self._since_onset[unit] += 1
        self._since_severity[unit] += 1
        for row, lag in enumerate(LAGS):
            if series.size > SEVERITY_WINDOW + lag:
                usual = self._half_squares[row, unit]
                half_square = (series[SEVERITY_WINDOW] - series[SEVERITY_WINDOW + lag]) ** 2 / 2
                half_square = min(half_square, CLIP**2 * max(usual, healthy.variance))
                self._pairs[row, unit] = min(self._pairs[row, unit] + 1, REMEMBERED)
                self._half_squares[row, unit] += (half_square - usual) / self._pairs[row, unit]

    def noise(self, unit: int, healthy: UnitNoise) -> UnitNoise:
        """The noise of a unit while it is slow, at least that of its healthy time."""
        pairs, found = self._pairs[:, unit], self._half_squares[:, unit]
        if pairs[0] < FEWEST_PAIRS:
            return healthy
        near, far = found[0], found[1:]
        chance = SIGNIFICANT * near * np.sqrt(3 / pairs[0] + 3 / np.maximum(pairs[1:], 1))
        swings = float(np.where(pairs[1:] >= FEWEST_PAIRS, far - near - chance, 0.0).max())
        variance, drift = max(healthy.variance, float(near)), max(healthy.drift, swings)
        return UnitNoise(variance, drift, max(healthy.clip, CLIP * float(np.sqrt(variance + drift))))

    def told(self, unit: int, change: Change, iteration: int) -> None:
        """A change of the unit's level was told in this iteration."""
        if change is Change.ONSET:
            self._since_onset[unit], self._since_severity[unit] = 0, LONGEST
            # Iterations may have been lost: a restarted job counts them again.
            self._relapsed[unit] = 0 <= iteration - self._recovered[unit] <= LONGEST
        elif change is Change.RECOVERY:
            self._recovered[unit] = iteration
        elif change is Change.SEVERITY:
            self._since_severity[unit] = 0

    def may_tell(self, unit: int, found: LevelChange) -> bool:
        """Whether a change may be told by now.

        Severities may be no closer, so that nobody plans for each swing. Slowness can only have faded after its onset,
        though the level may have changed earlier.
        """
        if found.change is Change.SEVERITY:
            return bool(self._since_severity[unit] >= LONGEST)
        return not found.faded or bool(self._since_onset[unit] >= LONGEST)

    def shortest_window(self, unit: int) -> int:
        """Fewest healthy residuals of a recovery: more for a unit that became slow again right after the last one."""
        return PROVEN if self._relapsed[unit] else RUNS[0]
