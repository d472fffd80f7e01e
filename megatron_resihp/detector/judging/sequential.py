# SPDX-License-Identifier: Apache-2.0
"""The sequential test: has the level of a series of residuals risen? Imports numpy and scipy.

Two window-limited tests, like generalised likelihood ratio tests for a change of the mean (Lai, 1995; Basseville and
Nikiforov, Detection of Abrupt Changes, section 2.4). Each window has a stated false-alarm probability:

- run test, for large slowdowns: all of the last n residuals exceed a threshold u. If healthy residuals exceed u with
probability q independently, the chance of such a run is qⁿ. So u is the quantile of the seen residuals at q = α^(1/n).
With n = 3 that quantile is well inside the seen range, whatever the tail, and one or two stalls cannot alarm.
- mean test, for small slowdowns: the mean of the last n clipped residuals exceeds t(α) √(v/n + d). v is the variance of
a residual, and d that of drift. Clipping makes the sum nearly Gaussian and bounds the effect of a stall.

Budget: a user accepts A false alarms in a job of T iterations with U units (workers and links). Each unit is tested in
each iteration in 2 families (see `tracker`), with 2 tests of several windows each. By Bonferroni's inequality, α = A /
(2 T U · windows of both tests) for each window keeps the job within A. Tests of neighbouring windows and iterations
nearly coincide, so the true rate is several times lower.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from megatron_resihp.detector.judging.noise import KnownNoise, Noise

RUNS: Final = (3, 4, 5, 6, 7, 8)
MEANS: Final = (6, 8, 12, 16, 24, 32)
LONGEST: Final = MEANS[-1]
FAMILIES: Final = 2
REFRESH: Final = 8
"""Iterations after which noise, levels and thresholds are computed again."""
WINDOW_PER_TRANSIENT: Final = 2.5
"""Fewest times that a mean's window must be as long as the longest transient seen."""

FEWEST_FREEDOM: Final = 10.0
_LENGTHS = np.array(RUNS + MEANS)
_RUN_ROWS, _MEAN_ROWS = np.array(RUNS) - 1, np.array(MEANS) - 1
_MEAN_LENGTHS = np.array(MEANS, dtype=np.float64)[:, None, None]


def window_probability(false_alarms: float, iterations: int, units: int) -> float:
    """α of one window's test; see the module's docstring."""
    return false_alarms / (FAMILIES * max(iterations, 1) * max(units, 1) * (len(RUNS) + len(MEANS)))


@dataclass(frozen=True)
class Thresholds:
    """Limits for the tests, in the unit of residuals; infinite for windows that are not used.

    Attributes:
        runs: [runs, families, units] limit that all residuals of a run must exceed.
        means: [means, families, units] limit that the mean of clipped residuals must exceed.
    """

    runs: NDArray[np.float64]
    means: NDArray[np.float64]


def thresholds(noise: Noise, alpha: float, smallest: float, shortest_run: int) -> Thresholds:
    """Thresholds that a healthy unit exceeds with probability `alpha` each, and never below `smallest`.

    Args:
        noise: of healthy residuals.
        alpha: probability for one window.
        smallest: smallest slowdown to look for.
        shortest_run: shorter runs do not count, since transients of that length have been seen.
    """
    # Student's t, since the variances are estimates from a limited number of residuals.
    z = float(t.isf(alpha, max(noise.freedom, FEWEST_FREEDOM)))
    runs = [noise.quantile(alpha ** (1 / n)) if n >= shortest_run else np.full(FAMILIES, np.inf) for n in RUNS]
    # Such a large drift has itself a probability below α, so it is added, not averaged away.
    run_limits = np.array(runs)[..., None] * np.sqrt(noise.variance) + z * np.sqrt(noise.drift)
    windows = np.array(MEANS, dtype=np.float64)[:, None, None]
    mean_limits = z * np.sqrt(noise.variance / windows + noise.drift)
    # A transient may fill this part of a window, with residuals clipped to about twice the smallest slowdown.
    mean_limits[np.array(MEANS) < WINDOW_PER_TRANSIENT * (shortest_run - 1)] = np.inf
    return Thresholds(np.maximum(run_limits, smallest), np.maximum(mean_limits, smallest))


class OnsetLimits:
    """The thresholds in force, for a job's accepted false alarms and after the transients that it has had.

    Args:
        smallest: smallest slowdown to report, log of the ratio of times.
        known: what an earlier run has learned.

    Attributes:
        shortest_run: shorter runs do not count: transients of that length have been seen.
        false_alarm: accepted false alarms per iteration and unit.
        thresholds: of `refresh`.
    """

    def __init__(self, smallest: float, known: KnownNoise | None) -> None:
        self.shortest_run = max(RUNS[0], known.transient + 1) if known else RUNS[0]
        self.false_alarm = 0.0
        self.thresholds = Thresholds(np.empty(0), np.empty(0))
        self._smallest = smallest
        self._alpha = 0.0
        self._refresh_in = 0

    def budget(self, false_alarms: float, iterations: int, units: int) -> None:
        """Set the accepted false alarms of a job; `units` counts the units of all trackers together."""
        self._alpha = window_probability(false_alarms, iterations, units)
        self.false_alarm = false_alarms / (max(iterations, 1) * max(units, 1))
        self._refresh_in = 0

    def outlast(self, newest_first: NDArray[np.float64], valid: NDArray[np.bool_], noise: Noise) -> None:
        """Take the longest run of healthy residuals that a run test would count for a transient: it ended by itself.

        Args:
            newest_first: [rows, families, units] residuals.
            valid: likewise, whether one is known and of a healthy unit.
        """
        limit = thresholds(noise, self._alpha, self._smallest, RUNS[0]).runs[0]
        run = np.zeros(valid.shape[1:], dtype=np.int64)
        longest = 0
        for above in (newest_first > limit) & valid:
            run = np.where(above, run + 1, 0)
            longest = max(longest, int(run.max(initial=0)))
        self.shortest_run = min(max(self.shortest_run, longest + 1), RUNS[-1])

    def remember_transient(self, length: int) -> None:
        """Remember that a slow run of this length ended by itself; shorter runs no longer count."""
        if self.shortest_run <= length < RUNS[-1]:
            self.shortest_run = length + 1
            self._refresh_in = 0

    def due(self) -> bool:
        """Called in each iteration: whether to `refresh` in this one."""
        self._refresh_in -= 1
        return self._refresh_in < 0

    def refresh(self, noise: Noise) -> None:
        """Compute the thresholds again."""
        self.thresholds = thresholds(noise, self._alpha, self._smallest, self.shortest_run)
        self._refresh_in = REFRESH - 1


def crossing(
    newest_first: NDArray[np.float64], count: NDArray[np.int64], clip: NDArray[np.float64], limits: Thresholds
) -> NDArray[np.int64]:
    """[families, units] length of the shortest window whose test alarms, runs before means; 0 if none does.

    Args:
        newest_first: [LONGEST, families, units] residuals.
        count: [families, units] number of valid residuals.
        clip: [families, units] where the mean test clips residuals.
        limits: the tests' thresholds.
    """
    least = np.minimum.accumulate(newest_first[: RUNS[-1]], axis=0)[_RUN_ROWS]
    means = np.cumsum(np.clip(newest_first, -clip, clip), axis=0)[_MEAN_ROWS] / _MEAN_LENGTHS
    exceeded = np.concatenate([least > limits.runs, means > limits.means])
    if not exceeded.any():
        return np.zeros(count.shape, dtype=np.int64)
    exceeded &= count >= _LENGTHS[:, None, None]
    return np.where(exceeded.any(axis=0), _LENGTHS[exceeded.argmax(axis=0)], 0)


def change_point(newest_first: NDArray[np.float64]) -> int:
    """How many of one unit's newest residuals have another mean than 0, by maximum likelihood.

    With a mean of 0 before and an unknown mean after, the log likelihood ratio of a change n residuals ago is (Σ over
    the n of r)² / 2nv. Far residuals should be clipped, or a stall looks like a change.
    """
    sums = np.cumsum(newest_first)
    return int((sums**2 / np.arange(1, sums.size + 1)).argmax()) + 1
