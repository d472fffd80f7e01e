# SPDX-License-Identifier: Apache-2.0
"""How healthy residuals vary: variance, drift and tail, learned from the residuals themselves. Imports numpy.

A healthy residual is modelled as e + d: e is independent from iteration to iteration, d drifts slowly. The variogram
V(k) = ½ E (r(t+k) − r(t))² separates the two without the mean: V(1) ≈ var e, and V(k) − V(1) ≈ the drift's addition in
k iterations (Cressie, Statistics for Spatial Data, section 2.4). Residuals that go up and down by turns look steady at
a lag of their period. So V(k) is taken at lags with no period in common, and the one that shows most counts. The tail
of e is the tail seen, not a formula: heavy tails and stalls raise the thresholds by themselves.

Arrays are [families, units]; see `tracker` for families.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

FAR: Final = (17, 24, 31)
"""Iterations over which drift is measured. No cycle's period divides two of them."""
HORIZON: Final = 60
"""Average iterations between the residuals that tell a level and those judged by it."""
MEMORY: Final = 300.0
"""Residuals of a unit after which its variance is forgotten."""
SHRINKAGE: Final = 30.0
"""Number of residuals that the pooled variance of all units counts as, beside a unit's own."""
CLIP: Final = 3.0
"""Standard deviations at which residuals are clipped."""
SIGNIFICANT: Final = 1.6
"""Standard errors that V(k) − V(1) must exceed for k in FAR to count as drift."""
_BIN, _BINS = 0.05, 400
EARLIER_RUN: Final = 50.0
"""Residuals that an earlier run's estimate of a unit counts as, like a warm-up; the devices may differ."""
MEDIAN_EFFICIENCY: Final = 2 / np.pi
"""Efficiency of a median: it tells a level as well as a mean of this share of the residuals."""

LATER_RESIDUAL: Final = 0.25
"""Worth of a later residual for a level learned from few: the level follows so slowly (`tracker`)."""


@dataclass(frozen=True)
class KnownNoise:
    """Learned noise of some units, for another run.

    Attributes:
        near: [families, units] the variogram at lag 1.
        far: [lags, families, units] the variogram at each lag of FAR.
        weight, far_weight: pairs of residuals behind them; the same axes.
        tail: [families, bins] histogram of standardised residuals by size.
        transient: iterations of the longest slowdown that ended by itself and must not alarm.
    """

    near: NDArray[np.float64]
    far: NDArray[np.float64]
    weight: NDArray[np.float64]
    far_weight: NDArray[np.float64]
    tail: NDArray[np.float64]
    transient: int = 0

    @property
    def shape_is_sound(self) -> bool:
        """Whether the arrays fit each other and hold possible values."""
        arrays = (self.near, self.far, self.weight, self.far_weight, self.tail)
        alike = self.near.ndim == 2 and self.weight.shape == self.near.shape
        alike = alike and self.far.shape == self.far_weight.shape == (len(FAR), *self.near.shape)
        sized = alike and self.tail.shape == (self.near.shape[0], _BINS + 1)
        return sized and all(bool((np.isfinite(each) & (each >= 0)).all()) for each in arrays)

    def of(self, source: NDArray[np.int64]) -> "KnownNoise | None":
        """Noise of other units: `source` gives each one's number here, or -1 for a new unit, which gets the average.

        A family without residuals is as noisy as the noisiest family; None if nothing is known at all.
        """
        if not self.weight.any():
            return None
        weight = self.weight[:, source]
        known = (source >= 0) & (weight > 0)
        near, far = (np.where(known, values[..., source], self._usual(values)) for values in (self.near, self.far))
        weight, far_weight = (
            np.where(known, np.minimum(each, EARLIER_RUN), EARLIER_RUN)
            for each in (weight, self.far_weight[..., source])
        )
        return KnownNoise(near, far, weight, far_weight, self.tail, self.transient)

    def _usual(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        usual = _pooled(values, self.weight)
        return np.where(self.weight.any(axis=1, keepdims=True), usual, usual.max(axis=-2, keepdims=True))


class Noise:
    """Noise learned from healthy residuals only; the caller decides which are healthy."""

    def __init__(self, warm_up: NDArray[np.float64], smallest_clip: float, known: KnownNoise | None = None) -> None:
        """Learn from warm-up's residuals, [iterations, families, units], NaN where unknown, each unit's median 0.

        Args:
            warm_up: the residuals.
            smallest_clip: lower limit of clipping, so that a fault far above the noise is not clipped down to it.
            known: an earlier run's noise of these units; then the residuals tell only their levels.
        """
        self._smallest_clip = smallest_clip
        spread = np.nan_to_num(1.4826 * _median(np.abs(warm_up)))
        self.clip = np.maximum(smallest_clip, CLIP * np.maximum(spread, _pooled(spread)))
        half_squares = [_half_squares(warm_up, lag, self.clip) for lag in (1, *FAR)]
        counts = np.array([(~np.isnan(each)).sum(axis=0) for each in half_squares], dtype=np.float64)
        means = np.array([np.nan_to_num(np.nanmean(_or_nan(each), axis=0)) for each in half_squares])
        self._weight, self._far_weight = np.minimum(counts[0], MEMORY), np.minimum(counts[1:], MEMORY)
        self._near, self._far = means[0], means[1:]
        self._tail = np.zeros((warm_up.shape[1], _BINS + 1))
        self._of_level, self._worth = self._weight.copy(), 1.0
        """Residuals that tell a unit's level, and the number that each further one counts as."""
        if known is not None:
            self._worth = LATER_RESIDUAL
            self._of_level = MEDIAN_EFFICIENCY * np.isfinite(warm_up).sum(axis=0)
            self._near, self._far, self._weight, self._far_weight, self._tail = (
                known.near, known.far, known.weight, known.far_weight, known.tail.copy()
            )  # fmt: skip
        self._refresh()
        if known is None:
            self._count(warm_up, np.isfinite(warm_up))

    def learn(
        self,
        residuals: NDArray[np.float64],
        following: NDArray[np.float64],
        healthy: NDArray[np.bool_],
        earlier: NDArray[np.float64],
        both_healthy: NDArray[np.bool_],
    ) -> None:
        """Take in residuals, [iterations, families, units], and those one iteration later.

        All are too old to be part of a fault that has not been found yet.

        Args:
            residuals, following, healthy: the residuals, the later ones, and which are healthy.
            earlier, both_healthy: [lags, iterations, families, units] those of each lag of FAR earlier, and which pairs
                are healthy.
        """
        count = healthy.sum(axis=0)
        step = 1.0 / (np.minimum(self._weight, MEMORY) + np.maximum(count, 1))
        first, second, third = (np.clip(each, -self.clip, self.clip) for each in (residuals, following, earlier))
        self._near = self._near + step * np.where(healthy, (second - first) ** 2 / 2 - self._near, 0.0).sum(axis=0)
        change = np.where(both_healthy, (first - third) ** 2 / 2 - self._far[:, None], 0.0)
        self._far = self._far + step * change.sum(axis=1)
        self._weight = self._weight + count
        self._far_weight = self._far_weight + both_healthy.sum(axis=1)
        self._of_level = self._of_level + self._worth * count
        self._count(residuals, healthy)
        self._refresh()

    def move(self, source: NDArray[np.int64]) -> None:
        """Switch to other units: `source` gives each one's old number, or -1 if it is new."""
        known = source >= 0
        pooled = [_pooled(values, self._weight) for values in (self._near, self._far)]
        self._near, self._far = (
            np.where(known, values[..., source], mean)
            for values, mean in zip((self._near, self._far), pooled, strict=True)
        )
        self._weight, self._far_weight, self._of_level = (
            np.where(known, values[..., source], 0.0) for values in (self._weight, self._far_weight, self._of_level)
        )
        self._refresh()

    def known(self) -> KnownNoise:
        """The learned noise."""
        return KnownNoise(self._near, self._far, self._weight, self._far_weight, self._tail)

    def _refresh(self) -> None:
        near, far = _pooled(self._near, self._weight), _pooled(self._far, self._weight)
        own = self._weight / (self._weight + SHRINKAGE)
        # A unit may be noisier than the others; if it seems quieter, that is more often luck.
        self.variance = np.maximum(own * self._near + (1 - own) * near, near) + 1e-12
        # A random walk through V(k) is an upper bound on the growth of an AR(1) drift. The possible sampling error of
        # V(k) − V(1) does not count as drift: each ½ D² has variance 2 V², and half as much again for pairs that share
        # a residual. There are fewer pairs at a far lag than at lag 1.
        pairs, far_pairs = (
            np.maximum(each.clip(max=MEMORY).sum(axis=-1, keepdims=True), 1.0)
            for each in (self._weight, self._far_weight)
        )
        chance = SIGNIFICANT * near * np.sqrt(3.0 / pairs + 3.0 / far_pairs)
        lags = np.array(FAR)[:, None, None]
        growth = (np.maximum(far - near - chance, 0.0) * HORIZON / lags).max(axis=0)
        self.drift = growth + self.variance / np.maximum(self._of_level.clip(max=MEMORY), 1.0)
        self.clip = np.maximum(self._smallest_clip, CLIP * np.sqrt(self.variance + self.drift))

    def _count(self, residuals: NDArray[np.float64], valid: NDArray[np.bool_]) -> None:
        units = np.where(valid, residuals, -1.0) / np.sqrt(self.variance)
        places = np.clip(units / _BIN, 0, _BINS).astype(np.int64)
        places += (np.arange(places.shape[1]) * (_BINS + 1))[:, None]
        self._tail += np.bincount(places[valid], minlength=self._tail.size).reshape(self._tail.shape)

    @property
    def freedom(self) -> float:
        """Average number of residuals per unit behind the variances."""
        return float(np.minimum(self._weight, MEMORY).mean()) if self._weight.size else 1.0

    def quantile(self, exceedance: float) -> NDArray[np.float64]:
        """[families] the standardised residual that healthy residuals exceed with at most this probability.

        It assumes one exceedance more than was seen, and is infinite if too few were seen.
        """
        seen = self._tail.sum(axis=1)
        above = np.cumsum(self._tail[:, ::-1], axis=1)[:, ::-1]
        enough = (above + 1.0) / (seen + 1.0)[:, None] <= exceedance
        return np.where(enough.any(axis=1), enough.argmax(axis=1) * _BIN, np.inf)


def _half_squares(residuals: NDArray[np.float64], lag: int, clip: NDArray[np.float64]) -> NDArray[np.float64]:
    clipped = np.clip(residuals, -clip, clip)
    return (clipped[lag:] - clipped[:-lag]) ** 2 / 2


def _median(values: NDArray[np.float64]) -> NDArray[np.float64]:
    known = ~np.isnan(values).all(axis=0)
    result = np.full(values.shape[1:], np.nan)
    result[known] = np.nanmedian(values[:, known], axis=0)
    return result


def _or_nan(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Replace columns that are NaN throughout by 0, so that their mean is 0."""
    empty = np.isnan(values).all(axis=0) if len(values) else np.ones(values.shape[1:], bool)
    return np.where(empty, 0.0, values if len(values) else np.zeros((1, *values.shape[1:])))


def _pooled(values: NDArray[np.float64], weight: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """[…, families, 1] weighted mean over units; a plain mean in families without any weight, [families, units]."""
    weight = np.ones(values.shape[-2:]) if weight is None else weight
    weight = np.where(weight.any(axis=1, keepdims=True), weight, 1.0)
    total = weight.sum(axis=1, keepdims=True)
    return (values * weight).sum(axis=-1, keepdims=True) / np.where(total > 0, total, 1.0)
