# SPDX-License-Identifier: Apache-2.0
"""Log ratio of measured to predicted time: one number per worker and per link, for each iteration.

A residual of 0 is the usual speed, 0.2 means 22 % more time. Logarithms fit, because a slow device multiplies the time
of each op by 1/p, whatever the op. Imports numpy and the package `cost`.
"""

import math

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.cost.fitted.fit import masked_median

OUTLYING = 2.0
"""Standard deviations of op noise from their worker's median at which ops are clipped."""


def robust_average(seconds: NDArray[np.float64], predicted: NDArray[np.float64], noise: float) -> NDArray[np.float64]:
    """One residual for each row from the residuals of its measurements: [units, …] twice → [units].

    The mean is weighted by predicted duration, since a long op averages out more noise. Residuals are clipped at
    OUTLYING · `noise` around their median: an M-estimate with Huber's ψ, one step from the median. NaN for units
    without a valid measurement.
    """
    units = len(seconds)
    y, weight = (each.reshape(units, math.prod(each.shape[1:])) for each in (seconds, predicted))
    valid = np.isfinite(y) & (y > 0) & np.isfinite(weight) & (weight > 0)
    weight = np.where(valid, weight, 0.0)
    residual = np.log(np.where(valid, y, 1.0) / np.where(valid, weight, 1.0))
    centre = masked_median(residual, valid)[:, None]
    reach = OUTLYING * noise
    clipped = np.clip(residual, centre - reach, centre + reach)
    total = weight.sum(axis=1)
    with np.errstate(invalid="ignore"):
        return (np.where(valid, clipped, 0.0) * weight).sum(axis=1) / np.where(total > 0, total, np.nan)


def plain_average(seconds: NDArray[np.float64], predicted: NDArray[np.float64]) -> NDArray[np.float64]:
    """One residual for each row, from the sums of measured and predicted time, outliers included."""
    units = len(seconds)
    y, weight = (each.reshape(units, math.prod(each.shape[1:])) for each in (seconds, predicted))
    valid = np.isfinite(y) & (y > 0) & np.isfinite(weight) & (weight > 0)
    measured, total = (np.where(valid, each, 0.0).sum(axis=1) for each in (y, weight))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(total > 0, np.log(measured / total), np.nan)
