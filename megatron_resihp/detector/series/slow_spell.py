# SPDX-License-Identifier: Apache-2.0
"""A slow series: how slow it is, and whether it has recovered or changed. Imports numpy and this package."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.series.level_rows import Array
from megatron_resihp.detector.series.shift_test import MAJORITY, ShiftTest
from megatron_resihp.detector.series.spread import REFERENCE, WINDOWS, Level, Noise, median, quantile

SMALLEST_SEVERITY: Final = 0.04
SEVERITY_WINDOW: Final = 8
RECOVERY_PROBABILITY: Final = 1e-4
"""Probability that one window reports the end of a level that has not ended."""


class SlowSpell:
    """From the onset of a slow-down to its recovery.

    Attributes:
        healthy, level: rows of the healthy level, and their `Level`.
        excess: how slow the series is now, log of the ratio of times.
        first_excess: the same at the onset.
    """

    def __init__(self, healthy: Array, level: Level, excess: float, noise: Noise, test: ShiftTest) -> None:
        self.healthy, self.level = healthy, level
        self.excess = self.first_excess = excess
        self._noise, self._test = noise, test

    def measure(self, rows: Array) -> None:
        """Set the excess from these slow rows."""
        self.excess = slow_level(rows, self.level.mean) - self.level.mean

    def recovered(self, rows: Array) -> tuple[int, float] | None:
        """The window whose rows are healthy again, and the level before it; None if there is none."""
        if median(rows[-3:]) - self.level.mean < 0.8 * self.excess and (found := self._in_windows(rows)):
            return found
        return None

    def _in_windows(self, rows: Array) -> tuple[int, float] | None:
        healthy, smallest = self.level, self._test.smallest
        variance, freedom = self._noise.of_differences(healthy, WINDOWS, many(self.healthy))
        z = quantile(RECOVERY_PROBABILITY, int(freedom))
        for place, window in enumerate(WINDOWS.tolist()):
            rest = rows[: rows.size - window][-REFERENCE:]
            if rest.size < 1:
                break
            slow = slow_level(rest, healthy.mean)
            excess = max(slow - healthy.mean, smallest)
            newest = rows[-window:] - healthy.mean
            reach = max(excess, self._test.reach(healthy, 0.0))
            mean = float(np.clip(newest, -reach, excess + reach).mean())
            error = float(np.sqrt(variance[place] + healthy.variance / min(rest.size, 16)))
            below = int((newest < excess / 2).sum())
            near = mean < max(0.25 * excess, min(2 * error, 0.45 * excess))
            if near and excess - mean > z * error and below >= max(3, MAJORITY * window):
                return window, slow
        if rows.size >= 24:
            newest = rows[-16:] - healthy.mean
            if median(newest) < max(0.5 * smallest, 0.2 * self.first_excess):
                return 16, self.first_excess + healthy.mean
        return None

    def other_level(self, rows: Array) -> float | None:
        """The slow level before the newest rows, if these have another level that is not healthy either."""
        healthy, window = self.level, SEVERITY_WINDOW
        rest = rows[:-window][-REFERENCE:]
        if rest.size < 4:
            return None
        slow = slow_level(rest, healthy.mean)
        newest = rows[-window:] - slow
        variance, freedom = self._noise.of_differences(healthy, WINDOWS[:5], many(self.healthy))
        error = np.sqrt(float(variance[-1]) + healthy.variance / min(rest.size, 16))
        limit = max(SMALLEST_SEVERITY, quantile(self._test.probability, int(freedom)) * float(error))
        mean = median(newest)
        if abs(mean) < limit or (np.sign(mean) * newest > limit / 2).sum() < 6:
            return None
        return slow


def slow_level(slow: Array, healthy: float) -> float:
    """The mean of slow rows, where single stalls do not count in full."""
    middle = median(slow)
    reach = max(abs(middle - healthy), 0.05)
    return float(np.clip(slow, middle - reach, middle + reach).mean())


def many(rows: Array) -> NDArray[np.int64]:
    """The number of reference rows, as `Noise.of_differences` takes it."""
    return np.array([min(max(rows.size, 1), REFERENCE)])
