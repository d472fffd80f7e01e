# SPDX-License-Identifier: Apache-2.0
"""The sequential test: has the level of a series of residuals risen? Imports numpy and scipy.

Two window-limited tests, as generalised likelihood ratio tests for a change of the mean are (Lai, 1995; Basseville and
Nikiforov, Detection of Abrupt Changes, section 2.4), with the false-alarm probability of each window stated:

- run test, for large slowdowns: all of the last n residuals exceed a threshold u. If healthy residuals exceed u with
  probability q independently, the chance of such a run is qⁿ; u is the quantile at q = α^(1/n) of the residuals seen.
  With n = 3 that quantile is far inside what has been seen, whatever the tail, and one stall (or two) cannot alarm.
- mean test, for small ones: the mean of the last n clipped residuals exceeds t(α) √(v/n + d), with v the variance
  of a residual and d that of drift; clipping makes the sum nearly Gaussian and bounds what a stall adds.

Arithmetic of the budget: a user accepts A false alarms in a job of T iterations with U units (workers and links). Each
unit is tested in each iteration in 2 families (see `tracker`) with 2 tests of some windows each. By Bonferroni's
inequality α = A / (2 T U · windows of both tests) for each holds A for the job. Tests of neighbouring windows and
iterations nearly coincide, so that the true rate is several times lower.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from megatron_resihp.detector.judging.noise import Noise

RUNS: Final = (3, 4, 5, 6, 7, 8)
MEANS: Final = (6, 8, 12, 16, 24, 32)
LONGEST: Final = MEANS[-1]
FAMILIES: Final = 2
WINDOW_PER_TRANSIENT: Final = 2.5
"""A mean is taken over windows so many times as long as the transients that have been seen."""

FEWEST_FREEDOM: Final = 10.0
_LENGTHS = np.array(RUNS + MEANS)
_RUN_ROWS, _MEAN_ROWS = np.array(RUNS) - 1, np.array(MEANS) - 1
_MEAN_LENGTHS = np.array(MEANS, dtype=np.float64)[:, None, None]


def window_probability(false_alarms: float, iterations: int, units: int) -> float:
    """α of one window's test; see the module's docstring."""
    return false_alarms / (FAMILIES * max(iterations, 1) * max(units, 1) * (len(RUNS) + len(MEANS)))


@dataclass(frozen=True)
class Thresholds:
    """What the tests compare with, in the unit of residuals; infinite for windows that are not used.

    Attributes:
        runs: [runs, families, units] that all residuals of a run must exceed.
        means: [means, families, units] that the mean of clipped residuals must exceed.
    """

    runs: NDArray[np.float64]
    means: NDArray[np.float64]


def thresholds(noise: Noise, alpha: float, smallest: float, shortest_run: int) -> Thresholds:
    """Thresholds that a healthy unit exceeds with probability `alpha` each, and never below `smallest`.

    Args:
        noise: of healthy residuals.
        alpha: probability for one window.
        smallest: slowdowns below it are not searched.
        shortest_run: runs shorter than this do not count: transients of that length have been seen.
    """
    # Student's t: the variances are estimates from so many residuals.
    z = float(t.isf(alpha, max(noise.freedom, FEWEST_FREEDOM)))
    runs = [noise.quantile(alpha ** (1 / n)) if n >= shortest_run else np.full(FAMILIES, np.inf) for n in RUNS]
    # A drift as large as this has itself a probability of less than α, so it is added, not averaged away.
    run_limits = np.array(runs)[..., None] * np.sqrt(noise.variance) + z * np.sqrt(noise.drift)
    windows = np.array(MEANS, dtype=np.float64)[:, None, None]
    mean_limits = z * np.sqrt(noise.variance / windows + noise.drift)
    # Of a window's residuals a transient may be so many, each clipped to about twice the smallest slowdown.
    mean_limits[np.array(MEANS) < WINDOW_PER_TRANSIENT * (shortest_run - 1)] = np.inf
    return Thresholds(np.maximum(run_limits, smallest), np.maximum(mean_limits, smallest))


def crossing(
    newest_first: NDArray[np.float64], count: NDArray[np.int64], clip: NDArray[np.float64], limits: Thresholds
) -> NDArray[np.int64]:
    """[families, units] length of the shortest window whose test alarms, runs before means; 0 if none does.

    Args:
        newest_first: [LONGEST, families, units] residuals.
        count: [families, units] how many of them there are.
        clip: [families, units] where the mean test clips residuals.
        limits: thresholds.
    """
    least = np.minimum.accumulate(newest_first[: RUNS[-1]], axis=0)[_RUN_ROWS]
    means = np.cumsum(np.clip(newest_first, -clip, clip), axis=0)[_MEAN_ROWS] / _MEAN_LENGTHS
    exceeded = np.concatenate([least > limits.runs, means > limits.means])
    if not exceeded.any():
        return np.zeros(count.shape, dtype=np.int64)
    exceeded &= count >= _LENGTHS[:, None, None]
    return np.where(exceeded.any(axis=0), _LENGTHS[exceeded.argmax(axis=0)], 0)


def change_point(newest_first: NDArray[np.float64]) -> int:
    """How many of the newest residuals of one unit have another mean than 0, by maximum likelihood.

    With the mean before known to be 0 and the one after unknown, the log likelihood ratio of a change n residuals ago
    is (Σ over the n of r)² / 2nv. Far residuals should be clipped, or a stall passes for the change.
    """
    sums = np.cumsum(newest_first)
    return int((sums**2 / np.arange(1, sums.size + 1)).argmax()) + 1
