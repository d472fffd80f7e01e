# SPDX-License-Identifier: Apache-2.0
"""Bayesian online change-point detection (Adams and MacKay, arXiv 0710.3742). Imports numpy and scipy.

The values between two change points are Gaussian with unknown mean and variance, under a Normal-inverse-gamma prior.
The run length r is the number of values after the latest change point. In the paper's recursion, a change point does
not depend on the value just seen. So P(r = 0) is the hazard rate at every time and cannot reach a threshold of 0.9. P(r
≤ 10) can: "a change point lies in the last 10 values".
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln


@dataclass(frozen=True)
class Prior:
    """Beliefs about a run before its first value; values are relative to the usual one.

    Attributes:
        hazard: probability of a change point at each value.
        mean, mean_weight: expected mean, and how many values that belief is worth (μ₀, κ₀).
        deviation, deviation_weight: expected standard deviation, and half the number of values that this belief is
            worth (α₀; β₀ follows).
    """

    hazard: float = 1 / 250
    mean: float = 1.0
    mean_weight: float = 0.05
    deviation: float = 0.03
    deviation_weight: float = 5.0


class ChangePointFilter:
    """The posterior of the run length, value by value."""

    def __init__(self, prior: Prior) -> None:
        self._prior = prior
        self._log_probability = np.zeros(1)
        self._mean = np.array([prior.mean])
        self._mean_weight = np.array([prior.mean_weight])
        self._shape = np.array([prior.deviation_weight])
        self._scale = np.array([prior.deviation_weight * prior.deviation**2])

    @property
    def run_length(self) -> NDArray[np.float64]:
        """P(r) for r from 0 to the number of values seen."""
        return np.exp(self._log_probability)

    def update(self, value: float) -> None:
        """Take in one more value."""
        prior = self._prior
        weighted = self._log_probability + self._log_predictive(value)
        change = np.logaddexp.reduce(weighted) + np.log(prior.hazard)
        joint = np.concatenate([[change], weighted + np.log1p(-prior.hazard)])
        self._log_probability = joint - np.logaddexp.reduce(joint)
        self._learn(value)

    def _log_predictive(self, value: float) -> NDArray[np.float64]:
        """Student's t: each run's log density of its next value."""
        freedom = 2 * self._shape
        spread = self._scale * (self._mean_weight + 1) / (self._shape * self._mean_weight)
        distance = (value - self._mean) ** 2 / (freedom * spread)
        normalizer = gammaln(self._shape + 0.5) - gammaln(self._shape) - 0.5 * np.log(np.pi * freedom * spread)
        return normalizer - (self._shape + 0.5) * np.log1p(distance)

    def _learn(self, value: float) -> None:
        prior, weight = self._prior, self._mean_weight
        scale = self._scale + weight * (value - self._mean) ** 2 / (2 * (weight + 1))
        mean = (weight * self._mean + value) / (weight + 1)
        self._mean = np.concatenate([[prior.mean], mean])
        self._mean_weight = np.concatenate([[prior.mean_weight], weight + 1])
        self._shape = np.concatenate([[prior.deviation_weight], self._shape + 0.5])
        self._scale = np.concatenate([[prior.deviation_weight * prior.deviation**2], scale])
