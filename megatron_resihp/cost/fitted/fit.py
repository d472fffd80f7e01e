# SPDX-License-Identifier: Apache-2.0
"""Robust fits of T = αN + βΣl² + γ with α, β, γ ≥ 0, for many groups of measurements at once.

Times are fitted in relative error, because a device's noise is a share of the op's duration. The method is iteratively
reweighted least squares: first with Huber weights (convex, so the start does not matter), finally with Tukey's
bisquare, so that stalls count nothing (Huber and Ronchetti, Robust Statistics, chapter 7). With three coefficients, the
constrained optimum is exact: it is the least-squares solution of one of the seven subsets of columns.

Imports numpy, scipy and `cost.arrays`.
"""

import math
from dataclasses import dataclass
from enum import IntEnum
from itertools import combinations
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from megatron_resihp.cost.arrays import Flags, Floats, Ints

FEWEST_SAMPLES: Final = 8
"""Fewest measurements for a fit; a group with fewer gets only its median."""
SMALLEST_SPREAD: Final = 0.01
"""Least relative variation of a feature; below it, the feature looks constant at realistic noise."""
SIGNIFICANCE: Final = 1e-3
"""The workload must explain more of the times than chance would at this level (F test)."""

AT_ONCE: Final = 1 << 18
"""Measurements that are fitted at once, unless a group has more; all of a large job's would take gigabytes."""
LONG: Final = 1 << 12
"""Number of measurements from which partitioning finds a median faster than sorting."""

_HUBER, _BISQUARE = 1.345, 4.685  # 95 % efficiency for Gaussian noise
_HUBER_ROUNDS, _BISQUARE_ROUNDS = 8, 4
_SMALLEST_NOISE = 1e-9
_SMALLEST = 1e-3
"""Least predicted time as a share of the usual one, since relative errors need a positive base."""
_SUBSETS = [subset for size in (1, 2, 3) for subset in combinations(range(3), size)]
"""Subsets of α, β, γ. The first of equally good ones wins: if N is constant, α stands for γ too."""


class Finding(IntEnum):
    """The result of a fit. Only FITTED and COLLINEAR predict more than a level."""

    FITTED = 0
    COLLINEAR = 1
    TOO_FEW = 2
    ALIKE = 3
    UNRELATED = 4

    def __str__(self) -> str:
        return _WORDS[self]


_WORDS = {
    Finding.FITTED: "fitted",
    Finding.COLLINEAR: "Σl² follows from N in these documents, so that α stands for β too",
    Finding.TOO_FEW: f"fewer than {FEWEST_SAMPLES} measurements",
    Finding.ALIKE: "all micro-batches are alike, so the fit says nothing about others",
    Finding.UNRELATED: "the times do not follow the workload",
}


@dataclass(frozen=True)
class Fits:
    """Fits of groups; all arrays have the groups' shape.

    Attributes:
        alpha, beta, gamma: seconds per token, seconds per token², seconds. If `informative` is false, only gamma is not
            0: the usual duration. NaN without any measurement.
        informative: whether the duration of another workload can be predicted.
        finding: a Finding for each group; it says why a fit is not informative.
        noise: robust standard deviation of the relative residuals.
        mape: mean of |measured − predicted| / measured over all measurements, stalls included.
        samples: number of measurements used.
        information: mean of x xᵀ / T² over the measurements, where x = (N, Σl², 1) and T is their predicted duration,
            [..., 3, 3]. The coefficients' covariance is noise² / samples times its inverse.
    """

    alpha: Floats
    beta: Floats
    gamma: Floats
    informative: Flags
    finding: Ints
    noise: Floats
    mape: Floats
    samples: Ints
    information: Floats

    def predict(self, tokens: ArrayLike, squares: ArrayLike) -> NDArray[np.float64]:
        """Seconds, for features of the groups' shape plus one axis of micro-batches (or what broadcasts to it)."""
        alpha, beta, gamma = (each[..., None] for each in (self.alpha, self.beta, self.gamma))
        return alpha * np.asarray(tokens) + beta * np.asarray(squares) + gamma


def fit(tokens: ArrayLike, squares: ArrayLike, seconds: ArrayLike) -> Fits:
    """Fit each group's measurements.

    Args:
        tokens, squares: N and Σ l², broadcastable to `seconds`.
        seconds: durations, shape [..., measurements]. Measurements that are not finite or not positive are left out.
    """
    seconds = np.asarray(seconds, dtype=np.float64)
    groups, count = seconds.shape[:-1], seconds.shape[-1]
    y, n, s = (
        np.broadcast_to(np.asarray(each, np.float64), seconds.shape).reshape(math.prod(groups), count)
        for each in (seconds, tokens, squares)
    )
    size = max(AT_ONCE // max(count, 1), 1)
    blocks = [slice(at, at + size) for at in range(0, max(len(y), 1), size)]
    parts = [_fit_groups(n[block], s[block], y[block]) for block in blocks]
    found = parts[0] if len(parts) == 1 else {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return Fits(**{name: each.reshape(groups + each.shape[1:]) for name, each in found.items()})


def _fit_groups(
    tokens: NDArray[np.float64], squares: NDArray[np.float64], seconds: NDArray[np.float64]
) -> dict[str, NDArray[Any]]:
    """The arrays of Fits, with one axis of groups, for features and durations of [groups, measurements]."""
    valid = np.isfinite(seconds) & (seconds > 0) & np.isfinite(tokens) & np.isfinite(squares)
    scales = [_scale(each, valid) for each in (tokens, squares, seconds)]
    features = zip((tokens, squares), scales[:2], strict=True)
    columns = [np.where(valid, each / scale[:, None], 0.0) for each, scale in features]
    x = np.stack([*columns, valid.astype(np.float64)], axis=-1)
    y = np.where(valid, seconds / scales[2][:, None], 0.0)
    coefficients, finding = _fit_scaled(x, y, valid)
    predicted = np.maximum(np.einsum("gmi,gi->gm", x, coefficients), _SMALLEST)
    residuals = np.where(valid, y / predicted - 1.0, 0.0)
    samples = valid.sum(axis=1)
    information = moments(x, y, np.where(valid, predicted**-2, 0.0) / np.maximum(samples, 1)[:, None])[0]
    unit = np.stack([*scales[:2], np.ones_like(scales[0])], axis=-1) / scales[2][:, None]
    alpha, beta, gamma = (coefficients / unit).T
    with np.errstate(invalid="ignore"):
        mape = np.abs(np.where(valid, 1 - predicted / np.where(valid, y, 1.0), 0.0)).sum(axis=1) / samples
    return {
        "alpha": alpha,
        "beta": beta,
        "gamma": gamma,
        "informative": finding <= Finding.COLLINEAR,
        "finding": finding,
        "noise": 1.4826 * masked_median(np.abs(residuals), valid),
        "mape": mape,
        "samples": samples,
        "information": information * unit[:, :, None] * unit[:, None, :],
    }


def _fit_scaled(
    x: NDArray[np.float64], y: NDArray[np.float64], valid: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Coefficients [groups, 3] and findings [groups], for columns and times scaled to about 1."""
    allowed, alike, collinear = identifiable(moments(x, y, valid.astype(np.float64))[0])
    too_few = valid.sum(axis=1) < FEWEST_SAMPLES
    coefficients, related = np.zeros((len(y), 3)), np.zeros(len(y), dtype=bool)
    coefficients[:, 2] = masked_median(y, valid)
    if (rest := ~too_few & ~alike).any():
        found, weights = _reweighted(x[rest], y[rest], valid[rest], allowed[rest])
        related[rest] = _explains(x[rest], y[rest], weights, found, coefficients[rest])
        coefficients[related] = found[related[rest]]
    finding = np.select(
        [too_few, alike, ~related, collinear],
        [Finding.TOO_FEW, Finding.ALIKE, Finding.UNRELATED, Finding.COLLINEAR],
        Finding.FITTED,
    )
    return coefficients, finding


def _reweighted(
    x: NDArray[np.float64], y: NDArray[np.float64], valid: NDArray[np.bool_], allowed: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Coefficients [groups, 3] and the final weights [groups, measurements]."""
    weights = valid.astype(np.float64)
    coefficients = nonnegative_least_squares(*moments(x, y, weights), allowed)
    for number in range(_HUBER_ROUNDS + _BISQUARE_ROUNDS):
        predicted = np.maximum(np.einsum("gmi,gi->gm", x, coefficients), _SMALLEST)
        residuals = np.where(valid, y / predicted - 1.0, 0.0)
        noise = np.maximum(1.4826 * masked_median(np.abs(residuals), valid), _SMALLEST_NOISE)
        units = np.abs(residuals) / noise[:, None]
        if number < _HUBER_ROUNDS:
            robust = np.minimum(1.0, _HUBER / np.maximum(units, _HUBER))
        else:
            robust = np.maximum(0.0, 1.0 - (units / _BISQUARE) ** 2) ** 2
        weights = np.where(valid, robust / predicted**2, 0.0)
        coefficients = nonnegative_least_squares(*moments(x, y, weights), allowed)
    return coefficients, weights


def moments(
    x: NDArray[np.float64], y: NDArray[np.float64], weights: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Σ w x xᵀ [groups, 3, 3] and Σ w x y [groups, 3] of columns x [groups, measurements, 3]."""
    weighted = (x * weights[..., None]).swapaxes(-1, -2)
    return weighted @ x, (weighted @ y[..., None])[..., 0]


def nonnegative_least_squares(
    matrix: NDArray[np.float64], vector: NDArray[np.float64], allowed: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """argmin of cᵀ matrix c − 2 vectorᵀ c over c ≥ 0, c = 0 where not `allowed`; all with leading axis of groups.

    The optimum is the unconstrained solution on its own support, hence the best of the feasible subsets' solutions.
    """
    best, gain = np.zeros_like(vector), np.zeros(len(vector))
    size = np.sqrt(np.diagonal(matrix, axis1=1, axis2=2))
    unit = np.where(size > 0, size, 1.0)
    matrix, vector = matrix / (unit[:, :, None] * unit[:, None, :]), vector / unit
    for subset in map(list, _SUBSETS):
        one, usable = np.eye(len(subset)), allowed[:, subset].all(axis=1)
        # If columns are collinear, any solution will do; the ridge is far below the noise of the times. Rounding may
        # undo it where columns are alike, so what is not allowed is not solved either.
        part = np.where(usable[:, None, None], matrix[:, subset][:, :, subset] + 1e-13 * one, one)
        found = np.linalg.solve(part, vector[:, subset, None])[..., 0]
        explained = (found * vector[:, subset]).sum(axis=1)
        better = usable & (found >= 0).all(axis=1) & (explained > gain * (1 + 1e-11))
        candidate = np.zeros_like(vector)
        candidate[:, subset] = found
        best = np.where(better[:, None], candidate, best)
        gain = np.where(better, explained, gain)
    return best / unit


def identifiable(matrix: NDArray[np.float64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """What the moments Σ w x xᵀ of x = (N, Σl², 1) can tell apart, [groups, 3, 3] of any scale.

    Returns:
        Which of α, β, γ can be fitted separately, [groups, 3]; whether micro-batches are alike; whether Σl² follows
        from N.
    """
    size = np.sqrt(np.diagonal(matrix, axis1=1, axis2=2))
    unit = np.where(size > 0, size, 1.0)
    scaled = matrix / (unit[:, :, None] * unit[:, None, :])
    # Variances and covariance around the mean, as shares of the mean square.
    variance = 1.0 - scaled[:, :2, 2] ** 2
    covariance = scaled[:, 0, 1] - scaled[:, 0, 2] * scaled[:, 1, 2]
    n_varies = variance[:, 0] > SMALLEST_SPREAD**2
    of_its_own = variance[:, 1] - np.where(n_varies, covariance**2 / np.where(n_varies, variance[:, 0], 1.0), 0.0)
    s_varies = (size[:, 1] > 0) & (of_its_own > SMALLEST_SPREAD**2)
    allowed = np.stack([np.ones_like(n_varies), s_varies, n_varies], axis=-1)
    return allowed, ~n_varies & ~s_varies, n_varies & ~s_varies


def _explains(
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    weights: NDArray[np.float64],
    coefficients: NDArray[np.float64],
    level: NDArray[np.float64],
) -> NDArray[np.bool_]:
    """F test of the fit against a level, with the fit's weights."""
    left, before = ((weights * (y - np.einsum("gmi,gi->gm", x, each)) ** 2).sum(axis=1)
                    for each in (coefficients, level))  # fmt: skip
    freedom = np.maximum((weights > 0).sum(axis=1) - 3, 1)
    threshold = stats.f.isf(SIGNIFICANCE, 2, freedom)
    return (before - left) / 2 > threshold * left / freedom


def _scale(values: NDArray[np.float64], valid: NDArray[np.bool_]) -> NDArray[np.float64]:
    typical = masked_median(np.abs(values), valid)
    return np.where(typical > 0, typical, 1.0)


def masked_median(values: NDArray[np.float64], valid: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Median of the valid values in each row of [groups, measurements]; NaN if there are none."""
    count = valid.sum(axis=1)
    if values.shape[1] == 0:
        return np.full(len(values), np.nan)
    rows, values = np.arange(len(values)), np.where(valid, values, np.inf)
    first, second = np.maximum(count - 1, 0) // 2, np.minimum(count // 2, values.shape[1] - 1)
    if values.shape[1] < LONG:
        ordered = np.sort(values, axis=1)
    else:
        ordered = values
        for row, places in zip(ordered, zip(first, second, strict=True), strict=True):
            row.partition(places)
    low, high = ordered[rows, first], ordered[rows, second]
    with np.errstate(invalid="ignore"):
        return np.where(count > 0, (low + high) / 2, np.nan)
