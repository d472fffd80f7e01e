# SPDX-License-Identifier: Apache-2.0
"""Tests of one slow unit: has it recovered, or become slow in another degree? Pure; imports numpy and this package.

A series holds the unit's residuals since its level last changed, newest first.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.judging.noise import Noise
from megatron_resihp.detector.judging.sequential import LONGEST, MEANS, RUNS, change_point
from megatron_resihp.detector.verdict import Change

Series = NDArray[np.float64]

RECOVERY_ODDS: Final = 1e6
"""How much likelier "healthy again" must be than "as slow as before"."""
RECOVERED: Final = 3.0
"""Standard errors by which the level of a unit that recovers gradually must lie below the smallest slowdown. By as many
a level must differ from the one that was told."""
SEVERITY_WINDOW: Final = 8
SMALLEST_SEVERITY: Final = 0.04
FAR_FROM_MEDIAN: Final = 2.0
"""Standard deviations from the median at which residuals are clipped in a mean."""


@dataclass(frozen=True)
class UnitNoise:
    """Noise of one unit's residuals.

    Attributes:
        variance: of one residual.
        drift: variance of the level's drift.
        clip: where residuals are clipped.
    """

    variance: float
    drift: float
    clip: float

    @property
    def deviation(self) -> float:
        """Standard deviation of one residual."""
        return float(np.sqrt(self.variance))

    def error(self, count: int) -> float:
        """Standard error of the level that this many residuals tell."""
        return float(np.sqrt(self.variance / max(count, 1) + self.drift))


def noise_of(noise: Noise, family: int, unit: int) -> UnitNoise:
    """The noise of one unit in one family."""
    return UnitNoise(noise.variance[family, unit], noise.drift[family, unit], noise.clip[family, unit])


@dataclass(frozen=True)
class LevelChange:
    """A change of a slow unit's level.

    Attributes:
        change: what happened.
        window: how many residuals decided.
        rows: how many residuals ago the level changed.
        faded: the unit recovered gradually, so nothing tells how long it was slow.
    """

    change: Change
    window: int
    rows: int
    faded: bool = False


def recovery(
    series: Series, first_excess: float, noise: UnitNoise, smallest: float, healthy: UnitNoise, shortest: int = RUNS[0]
) -> LevelChange | None:
    """Likelihood ratio test of "level 0 by now" against "one level all the time", on the newest and earlier residuals.

    The earlier level is estimated. From few residuals it is uncertain, and too high where luck helped to find it.
    If the slowness faded, there is no earlier level; then all residuals kept must be small.

    Args:
        first_excess: the level when it was found; used while there are few residuals.
        noise: of the unit while it is slow.
        smallest: smallest slowdown to report, log of the ratio of times.
        healthy: noise of the unit while it is not.
        shortest: fewest newest residuals that may tell.
    """
    for window in (n for n in (*RUNS, *MEANS) if shortest <= n < series.size):
        rest = series[window:]
        before = mean_of(rest, noise) if rest.size >= RUNS[0] else first_excess
        newest = np.clip(series[:window], -noise.clip, before + noise.clip)
        variance = noise.variance + window * noise.drift
        earlier = max(rest.size, RUNS[0])
        common = earlier / (window + earlier) * (newest.mean() - before) ** 2
        odds = window / (2 * variance) * (common - newest.mean() ** 2)
        if odds > np.log(RECOVERY_ODDS) and (newest < before / 2).sum() >= RUNS[0]:
            still_slow = np.median(series[:window]) > max(smallest, before / 4)
            change = Change.SEVERITY if still_slow else Change.RECOVERY
            return LevelChange(change, window, rows_since(series - before, window, noise.clip))
    error = healthy.error(LONGEST)
    if series.size == LONGEST and mean_of(series, noise) + RECOVERED * error < smallest:
        return LevelChange(Change.RECOVERY, LONGEST, LONGEST, faded=True)
    return None


def severity(series: Series, told: float, noise: UnitNoise, smallest: float) -> LevelChange | None:
    """Whether the newest residuals have another mean than earlier ones, or all of them than was told, by much.

    Args:
        told: the level that others know of.
        noise: of the unit while it is slow.
        smallest: smallest slowdown to report, log of the ratio of times.
    """
    window = SEVERITY_WINDOW
    if series.size < 2 * window:
        return None
    before, now = mean_of(series[window:], noise), mean_of(series[:window], noise)
    error = np.sqrt(noise.variance / window + noise.variance / (series.size - window) + noise.drift)
    z = np.sqrt(2 * np.log(RECOVERY_ODDS))
    if abs(now - before) > max(SMALLEST_SEVERITY, z * error):
        rows = rows_since(series - before, window, noise.clip)
        # A healthy lull of an unevenly slow unit is no severity.
        still_slow = min(now, mean_of(series[:rows], noise)) > smallest
        return LevelChange(Change.SEVERITY, window, rows) if still_slow else None
    # What has become steady is no longer as uneven as it was.
    level, error = mean_of(series, noise), min(noise.error(LONGEST), float(series.std()))
    crept = abs(level - told) > max(SMALLEST_SEVERITY, RECOVERED * error)
    if series.size == LONGEST and crept and level > smallest:
        return LevelChange(Change.SEVERITY, LONGEST, LONGEST)
    return None


def rows_since(series: Series, window: int, clip: float) -> int:
    """How many of the newest residuals have another mean than 0, judged by the newest `window` of them."""
    # A large change is found before it fills the window. The clipping must exceed a stall's size for it, or earlier
    # healthy residuals would weigh as much.
    levels = [abs(float(np.median(series[:length]))) for length in (window, RUNS[0])]
    reach = max(clip, 2 * max(levels))
    return change_point(np.clip(series, -reach, reach))


def mean_of(series: Series, noise: UnitNoise) -> float:
    """Mean of residuals, clipped around their median."""
    reach = FAR_FROM_MEDIAN * np.sqrt(noise.variance + noise.drift)
    centre = np.median(series)
    return float(np.clip(series, centre - reach, centre + reach).mean())
