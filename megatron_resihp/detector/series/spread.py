# SPDX-License-Identifier: Apache-2.0
"""Estimates how far the means of healthy rows of a series differ from means of earlier rows. Imports numpy, scipy.

Rows are logarithms of times. The tests look at D(n): the mean of the last n rows (outliers clipped) minus the level of
the reference rows before them. Its variance combines two sources:

- a model: σ² (g(n) / n + g(r) / r) for r reference rows, with the variance inflation g(n) = 1 + 2 Σ (1 − k/n) ρ(k) of
rows with the autocorrelation ρ (Bayley and Hammersley, 1946). With few rows, σ and ρ lean on the usual values for
iteration times.
- D(n)² itself in healthy rows, which contains any noise and drift.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

Array = NDArray[np.float64]
Rows = NDArray[np.int64]

WINDOWS: Final = np.array((3, 4, 5, 6, 8, 12, 16, 24, 32))
"""Rows under test."""
LONGEST: Final = int(WINDOWS[-1])
REFERENCE: Final = 96
"""Most reference rows before those under test, as the level may drift."""
USUAL_NOISE: Final = 0.03
USUAL_ROWS: Final = 4.0
"""Number of rows that the usual noise counts as."""
MOST_SURPRISE: Final = 2.0
"""Largest ratio of the usual noise to the measured noise."""
USUAL_CORRELATION: Final = 0.5
CORRELATION_ROWS: Final = 12.0
"""Number of rows that the usual autocorrelation counts as."""
LAGS: Final = 16
MOST_BIAS: Final = 0.3
MEMORY: Final = 400.0
"""Rows after which noise is forgotten."""
SEEN_WORTH: Final = 0.5
"""Independent values that D(n) counts as, for every n rows; the rows overlap."""
MODEL_WORTH: Final = 8.0
"""Independent values that the model counts as beside them."""
_LAG = np.arange(1.0, LAGS + 1)
_USUAL = USUAL_CORRELATION ** np.arange(LAGS + 1)
CLIP: Final = 4.0
"""A row counts as at most so many standard deviations."""
LEAST_NOISE: Final = 1e-3


@dataclass(frozen=True)
class Level:
    """The level and noise of some rows.

    Attributes:
        mean: robust mean of the rows.
        variance: of one row.
        correlation: [LAGS + 1] autocorrelation, from lag 0.
        rows: how many rows the noise estimate uses.
    """

    mean: float
    variance: float
    correlation: Array
    rows: float


class Noise:
    """A series' noise, learned from all its segments."""

    def __init__(self) -> None:
        self._square = self._weight = 0.0
        self._products = np.zeros(LAGS + 1)
        self._seen = np.zeros(WINDOWS.size)
        self._seen_weight = np.zeros(WINDOWS.size)

    def describe(self, rows: Array, tested: Array | None = None) -> Level:
        """The level of some rows, with noise from these rows and all earlier segments.

        Args:
            rows: of one level.
            tested: rows that may have another level; they add to the noise estimate around their own mean.
        """
        mean, deviations = centred(rows)
        square, products, weight = _moments(deviations)
        if tested is None:
            return self._level(mean, square, products, weight, rows.size)
        more = _moments(centred(tested)[1])
        square, products, weight = square + more[0], products + more[1], weight + more[2]
        return self._level(mean, square, products, weight, (rows.size + tested.size) / 2)

    def _level(self, mean: float, square: float, products: Array, weight: float, rows: float) -> Level:
        total = self._weight + weight
        products = self._products + products
        correlation = products / products[0] if products[0] > 0 else np.zeros(LAGS + 1)
        # A mean from the rows themselves lowers each autocorrelation by about g / rows, and their variance by the same
        # share.
        bias = min((1.0 + 2.0 * float(_positive(correlation)[1:].sum())) / max(rows, 1.0), MOST_BIAS)
        square /= 1.0 - bias
        usual = min(USUAL_NOISE**2, MOST_SURPRISE**2 * (self._square + square) / total)
        variance = (self._square + square + USUAL_ROWS * usual) / (total + USUAL_ROWS)
        correlation = correlation * (1.0 - bias) + bias
        correlation = (total * correlation + CORRELATION_ROWS * _USUAL) / (total + CORRELATION_ROWS)
        return Level(mean, max(variance, LEAST_NOISE**2), _positive(correlation), weight)

    def learn(self, rows: Array) -> None:
        """Add the noise of a segment, or part of one, that is over."""
        if rows.size < 3:
            return
        _, deviations = centred(rows)
        square, products, weight = _moments(deviations)
        keep = max(0.0, 1.0 - weight / MEMORY)
        self._square = keep * self._square + square
        self._weight = keep * self._weight + weight
        self._products = keep * self._products + products

    def learn_differences(self, differences: Array) -> None:
        """Add D(n) of healthy rows, [rows, WINDOWS], NaN where there was none."""
        known = np.isfinite(differences)
        count = known.sum(axis=0)
        keep = np.maximum(0.0, 1.0 - count / MEMORY)
        self._seen = keep * self._seen + (np.where(known, differences, 0.0) ** 2).sum(axis=0)
        self._seen_weight = keep * self._seen_weight + count

    def of_differences(self, level: Level, windows: Rows, references: Rows) -> tuple[Array, float]:
        """Variance of D(n), and its degrees of freedom.

        Args:
            level: its noise estimate.
            windows: the n: all of WINDOWS, or the first of them.
            references: number of reference rows for each; broadcast with `windows`.
        """
        model = level.variance * (inflation(level.correlation, windows) / windows
                                  + inflation(level.correlation, references) / references)  # fmt: skip
        seen, worth = self._seen[: windows.size], SEEN_WORTH * self._seen_weight[: windows.size] / windows
        seen_mean = seen / np.maximum(self._seen_weight[: windows.size], 1.0)
        variance = np.maximum((MODEL_WORTH * model + worth * seen_mean) / (MODEL_WORTH + worth), 0.5 * model)
        # Correlated rows tell less about the variance, and about their correlation, than independent ones.
        overlap = float(inflation(level.correlation, WINDOWS[-1:])[0])
        return variance, USUAL_ROWS + (self._weight + level.rows) / max(overlap, 1.0)

    @property
    def drift_seen(self) -> float:
        """Number of rows whose D(n) was learned from; these include the drift up to now."""
        return float(self._seen_weight[-1])


def inflation(correlation: Array, windows: Rows) -> Array:
    """g(n) for each n."""
    share = np.maximum(1.0 - _LAG / windows[..., None], 0.0)
    result: Array = 1.0 + 2.0 * share @ correlation[1:]
    return result


@lru_cache(maxsize=4096)
def quantile(probability: float, freedom: int) -> float:
    """The value that Student's t exceeds with this probability."""
    return float(t.isf(probability, max(freedom, 3)))


def median(values: Array) -> float:
    """Median of a few values, much faster than numpy.median."""
    ordered = np.sort(values)
    half = ordered.size // 2
    return float(ordered[half]) if ordered.size % 2 else float(ordered[half - 1] + ordered[half]) / 2


def centred(rows: Array) -> tuple[float, Array]:
    """A robust mean, and the rows' clipped deviations from it."""
    middle = median(rows)
    reach = 3.0 * max(1.4826 * median(np.abs(rows - middle)), LEAST_NOISE)
    clipped = np.minimum(np.maximum(rows, middle - reach), middle + reach)
    mean = float(clipped.sum()) / rows.size
    return mean, clipped - mean


def _moments(deviations: Array) -> tuple[float, Array, float]:
    """Σ d², Σ d(i) d(i+k) for each lag, and the degrees of freedom."""
    products = np.zeros(LAGS + 1)
    size = deviations.size
    lags = min(LAGS + 1, max(size // 3, 2))
    products[:lags] = np.correlate(deviations, deviations, "full")[size - 1 : size - 1 + lags]
    return float(products[0]) * size / max(size - 1, 1), products, float(size - 1)


def _positive(correlation: Array) -> Array:
    """Cut the autocorrelation off at the first small value: the rest is chance (Geyer, 1992)."""
    result = np.clip(correlation, -0.2, 0.98)
    result[0] = 1.0
    stop = np.flatnonzero(result[1:] < 0.02)
    if stop.size:
        result[1 + int(stop[0]) :] = 0.0
    return result
