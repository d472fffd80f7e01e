# SPDX-License-Identifier: Apache-2.0
"""Least squares for measurements of which those in one iteration share part of their noise. Imports numpy.

A node that runs 2 % slower for a moment makes all ops of an iteration longer. So many measurements say little more
about the level than one. About the dependence on documents, they say as much as their own noise allows. Modelled as y =
xᵀc (1 + u + e): u is the same within an iteration, and e is each measurement's own (the linear mixed model with a
random intercept). Generalised least squares with that covariance removes the shared part from each iteration's moments:
V⁻¹ = (I − κ/n · 11ᵀ) / var e, κ = n var u / (var e + n var u).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Iterations:
    """Relative moments of groups in iterations; a row is a group in an iteration.

    Attributes:
        count: [rows] measurements.
        matrix, vector: Σ x xᵀ [rows, 3, 3] and Σ x y [rows, 3], columns and times in units of the predicted time.
        mean_x, mean_y: their means, [rows, 3] and [rows].
        within: [rows] Σ (y − mean_y)².
    """

    count: NDArray[np.float64]
    matrix: NDArray[np.float64]
    vector: NDArray[np.float64]
    mean_x: NDArray[np.float64]
    mean_y: NDArray[np.float64]
    within: NDArray[np.float64]


def summed(x: NDArray[np.float64], y: NDArray[np.float64], valid: NDArray[np.bool_]) -> Iterations:
    """Moments of columns x [rows, measurements, 3] and times y [rows, measurements], in units of the predicted time."""
    count = valid.sum(axis=1).astype(np.float64)
    x, y = np.where(valid[..., None], x, 0.0), np.where(valid, y, 0.0)
    per = 1.0 / np.maximum(count, 1.0)
    mean_x, mean_y = x.sum(axis=1) * per[:, None], y.sum(axis=1) * per
    transposed = x.swapaxes(-1, -2)
    within = np.where(valid, y - mean_y[:, None], 0.0)
    return Iterations(
        count, transposed @ x, (transposed @ y[..., None])[..., 0], mean_x, mean_y, (within**2).sum(axis=1)
    )


class SharedNoise:
    """How much of the noise an iteration's measurements share; learned from all groups together."""

    def __init__(self, noise: float) -> None:
        """Until there are measurements, half of the variance `noise`² counts as shared."""
        self._within, self._freedom = noise**2 / 2, 1.0
        self._means, self._reciprocals, self._rows = noise**2, 1.0, 1.0

    def learn(self, seen: Iterations, fading: float) -> None:
        """Take in iterations; the weight of earlier ones is multiplied by `fading`."""
        several = seen.count > 1
        reciprocal = 1.0 / seen.count[several]
        self._within = fading * self._within + seen.within[several].sum()
        self._freedom = fading * self._freedom + (seen.count[several] - 1).sum()
        self._means = fading * self._means + ((seen.mean_y[several] - 1) ** 2).sum()
        self._reciprocals = fading * self._reciprocals + reciprocal.sum()
        self._rows = fading * self._rows + several.sum()

    def moments(self, seen: Iterations) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The matrix and vector of `seen`, with the weights of generalised least squares."""
        own = self._within / self._freedom
        shared = max(self._means - own * self._reciprocals, 0.0) / self._rows
        taken = seen.count * seen.count * shared / np.maximum(own + seen.count * shared, 1e-30)
        matrix = seen.matrix - taken[:, None, None] * seen.mean_x[:, :, None] * seen.mean_x[:, None, :]
        return matrix, seen.vector - (taken * seen.mean_y)[:, None] * seen.mean_x
