# SPDX-License-Identifier: Apache-2.0
"""Predicts the seconds of a row of a series from its workload, and learns online. Imports numpy.

Seconds are modelled as linear in the workload: α N + β Σ l² + γ. Least squares of relative errors give the
coefficients, with a prior that fixes only their size. A workload is unknown if its prediction is too uncertain to show
a slowdown, as for workloads outside the learned range. Rows with unknown workload are learned from, but not judged.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.series.spread import median

Array = NDArray[np.float64]

FIRST: Final = 8
"""Rows for the first fit of coefficients."""
BATCH: Final = 5
"""Rows of unknown workload that are learned together, so that one stall among them does not count in full."""
DELAY: Final = 12
"""Rows after which a healthy row of known workload is learned from; a slowdown would be found by then."""
MEMORY: Final = 4000.0
"""Rows after which a row is forgotten."""
CERTAIN: Final = 0.015
"""Standard error below which a prediction is certain."""
CERTAIN_SHARE: Final = 0.4
"""A prediction is also certain if its standard error is below this share of the noise."""
LEAST_NOISE: Final = 0.005


class Workload:
    """Coefficients of one series."""

    def __init__(self, features: int) -> None:
        """Start with this number of workload columns."""
        self._scale = np.ones(features + 1)
        self._information = np.zeros((features + 1, features + 1))
        self._moment = np.zeros(features + 1)
        self._coefficients = np.zeros(features + 1)
        self._covariance = np.zeros((features + 1, features + 1))
        self._noise = 0.03
        self._first: list[tuple[float, Array]] = []
        self._unknown: list[tuple[float, Array]] = []
        self._waiting: list[tuple[float, Array]] = []

    def see(self, seconds: float, features: Array, excess: float) -> list[float]:
        """Take in a row; returns log(seconds / predicted) of the rows that can now be judged, in order.

        That is this row if its workload is known, and none if not; once the first rows are complete, it is all of them.
        `excess` is the job's known slowness; it is removed from rows of unknown workload before they are learned.
        """
        if not np.isfinite(features).all():
            return []
        if not self._information.any():
            self._first.append((seconds, features))
            return self._begin() if len(self._first) == FIRST else []
        row = self._row(features)
        predicted = self._predict(row)
        if predicted <= 0 or self._error(row / max(predicted, 1e-300)) > max(CERTAIN, CERTAIN_SHARE * self._noise):
            self._unknown.append((seconds * math.exp(-excess), row))
            if len(self._unknown) == BATCH:
                self._learn(self._unknown)
                self._unknown = []
            return []
        self._waiting.append((seconds, row))
        return [float(np.log(seconds / predicted))]

    def healthy(self) -> None:
        """The waiting rows were healthy, except the last ones."""
        if len(self._waiting) >= 2 * DELAY:
            self._learn(self._waiting[:-DELAY])
            self._waiting = self._waiting[-DELAY:]

    def slow(self) -> None:
        """The waiting rows belong, or may belong, to a slow spell."""
        self._waiting = []

    def predicted(self, features: Array) -> float:
        """Predicted seconds for a workload; NaN before the first fit."""
        return self._predict(self._row(features)) if self._information.any() else float("nan")

    def _row(self, features: Array) -> Array:
        return np.append(features, 1.0) / self._scale

    def _predict(self, row: Array) -> float:
        return float(row @ self._coefficients)

    def _error(self, relative: Array) -> float:
        return math.sqrt(max(float(relative @ self._covariance @ relative), 0.0))

    def _begin(self) -> list[float]:
        rows = self._first
        usual = median(np.array([seconds for seconds, _ in rows]))
        features = np.stack([each for _, each in rows])
        self._scale = np.append(np.maximum(np.median(features, axis=0), 1e-30), 1.0)
        self._prior = np.full(self._scale.size, usual / self._scale.size)
        self._usual = usual
        self._coefficients = self._prior
        scaled = [(seconds, self._row(each)) for seconds, each in rows]
        for _ in range(3):
            self._information[:] = self._moment[:] = 0.0
            self._learn(scaled)
        self._first = []
        return [math.log(seconds / max(self._predict(row), 1e-300)) for seconds, row in scaled]

    def _learn(self, rows: list[tuple[float, Array]]) -> None:
        """Add rows; residuals far from the others are clipped."""
        predicted = np.array([max(self._predict(row), 0.05 * self._usual) for _, row in rows])
        seconds = np.array([each for each, _ in rows])
        residual = np.log(seconds / predicted)
        middle = median(residual)
        spread = 1.4826 * median(np.abs(residual - middle))
        reach = 3.0 * max(spread, self._noise)
        residual = np.clip(residual, middle - reach, middle + reach)
        keep = max(0.0, 1.0 - len(rows) / MEMORY)
        self._information *= keep
        self._moment *= keep
        for (_, row), clipped in zip(rows, (predicted * np.exp(residual)).tolist(), strict=True):
            relative = row / clipped
            self._information += np.outer(relative, relative)
            self._moment += relative
        if len(rows) > BATCH:
            self._noise = max(0.9 * self._noise + 0.1 * min(spread, 0.2), LEAST_NOISE)
        self._solve()

    def _solve(self) -> None:
        # The prior: each term may be anything up to about the usual time.
        precision = self._noise**2 / self._usual**2 * np.eye(self._scale.size)
        total = self._information + precision
        self._coefficients = np.linalg.solve(total, self._moment + precision @ self._prior)
        self._covariance = np.linalg.inv(total) * self._noise**2
