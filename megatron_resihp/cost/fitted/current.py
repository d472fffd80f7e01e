# SPDX-License-Identifier: Apache-2.0
"""Keeps a fitted CostModel current: old measurements fade, suspects teach nothing. Imports numpy and this package.

Recursive least squares with exponential forgetting in the information form (Ljung, System Identification, section
11.2): each iteration with measurements multiplies the moments of earlier ones by a factor below 1. An iteration's
measurements share part of their noise (`shared_noise`). Otherwise the first iteration with other documents would teach
its noise as their cost.
"""

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_resihp.cost.fitted.fit import Finding, identifiable, nonnegative_least_squares
from megatron_resihp.cost.fitted.model import CostModel, by_stage, own_seconds
from megatron_resihp.cost.fitted.shared_noise import Iterations, SharedNoise, summed

MEMORY: Final = 200.0
"""Iterations after which a measurement's weight has fallen to 1/e."""
FARTHEST: Final = 3.0
"""Standard deviations from the prediction beyond which measurements teach nothing: stalls, or an unnamed fault."""
_LEAST_NOISE = 1e-3
"""Share of a duration that clocks alone may be wrong by."""


class CurrentCost:
    """A cost model whose ops follow slow changes of the devices, and that does not learn a fault as normal."""

    def __init__(self, model: CostModel, memory: float = MEMORY, shared: SharedNoise | None = None) -> None:
        """Start from a fitted model.

        Args:
            model: counts like the measurements that it was fitted from, but for no more than a memory's worth.
            memory: in iterations.
            shared: what is known of the noise; None if nothing is.
        """
        self.model = model
        self._memory = memory
        ops = model.ops
        self._samples = ops.samples.reshape(-1).astype(np.float64)
        self._matrix = ops.information.reshape(-1, 3, 3) * self._samples[:, None, None]
        coefficients = np.nan_to_num(np.stack([ops.alpha, ops.beta, ops.gamma], axis=-1)).reshape(-1, 3)
        self._vector = (self._matrix @ coefficients[..., None])[..., 0]
        noise = ops.noise[np.isfinite(ops.noise)]
        self.shared = shared or SharedNoise(max(float(np.median(noise)) if noise.size else 0.0, _LEAST_NOISE))

    def relearn(
        self,
        stage: ArrayLike,
        own: NDArray[np.float64],
        tokens: NDArray[np.float64],
        squares: NDArray[np.float64],
    ) -> CostModel:
        """Learn the iterations of the model's fit again, as iterations rather than as single measurements.

        Args:
            stage: [workers].
            own: seconds, [iterations, workers, kinds, chunks, micro-batches], without each worker's level.
            tokens, squares: [iterations, workers, micro-batches].
        """
        seen = self._seen(np.asarray(stage, np.int64), own, tokens, squares)
        self.shared.learn(seen, 1.0)
        matrix, vector = self.shared.moments(seen)
        count, matrix, vector = (
            part.reshape(len(own), -1, *part.shape[1:]).sum(axis=0) for part in (seen.count, matrix, vector)
        )
        known = count > 0
        self._samples[known], self._matrix[known], self._vector[known] = count[known], matrix[known], vector[known]
        self._refit()
        return self.model

    def update(
        self,
        stage: ArrayLike,
        compute: NDArray[np.float64],
        waited: NDArray[np.float64],
        tokens: NDArray[np.float64],
        squares: NDArray[np.float64],
        suspect: NDArray[np.bool_],
        iterations: int = 1,
    ) -> CostModel:
        """Learn from one iteration's measurements; returns the updated `model`.

        Args:
            stage: [workers].
            compute, waited: [workers, kinds, chunks, micro-batches], as in the detector's observations.
            tokens, squares: [workers, micro-batches].
            suspect: [workers], whether the worker's measurements must not be learned as normal.
            iterations: iterations since the last update.
        """
        own = np.where(suspect[:, None, None, None], np.nan, own_seconds(compute[None], waited[None])[0])
        seen = self._seen(np.asarray(stage, np.int64), own[None], tokens[None], squares[None])
        fading = float(np.exp(-iterations / self._memory))
        self.shared.learn(seen, fading)
        self._learn(*self.shared.moments(seen), seen.count, fading)
        return self.model

    def _seen(
        self,
        stages: NDArray[np.int64],
        own: NDArray[np.float64],
        tokens: NDArray[np.float64],
        squares: NDArray[np.float64],
    ) -> Iterations:
        """Moments of iterations without stalls and faults; arrays as in `relearn`.

        Rows are the groups of one iteration after another.
        """
        iterations, _, kinds, chunks, micro_batches = own.shape
        features = [np.moveaxis(each, 0, 1).reshape(len(stages), -1) for each in (tokens, squares)]
        predicted = self.model.own_compute(stages, *features).reshape(-1, kinds, chunks, iterations, micro_batches)
        predicted = np.moveaxis(predicted, 3, 0)
        limit = FARTHEST * np.maximum(np.nan_to_num(self.model.ops.noise), _LEAST_NOISE)[stages][..., None]
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = own / predicted
            learnable = (predicted > 0) & (np.abs(ratio - 1.0) <= limit)
            relative = [each / predicted for each in (tokens[:, :, None, None], squares[:, :, None, None], 1.0)]
        count = len(self.model.ops.alpha)
        columns = (by_stage(each, stages, count) for each in (*relative, np.where(learnable, ratio, np.nan)))
        *x, y = (each.reshape(iterations * count * kinds * chunks, -1) for each in columns)
        return summed(np.stack(x, axis=-1), y, np.isfinite(y))

    def _learn(
        self, matrix: NDArray[np.float64], vector: NDArray[np.float64], count: NDArray[np.float64], fading: float
    ) -> None:
        worth = count / (1.0 - fading)
        excess = np.where((count > 0) & (self._samples > worth), worth / np.maximum(self._samples, 1.0), 1.0)
        kept = np.where(count > 0, np.minimum(fading, excess), 1.0)
        self._samples = self._samples * kept + count
        self._matrix = self._matrix * kept[:, None, None] + matrix
        self._vector = self._vector * kept[:, None] + vector
        self._refit()

    def _refit(self) -> None:
        ops = self.model.ops
        finding = ops.finding.reshape(-1)
        allowed, alike, collinear = identifiable(self._matrix)
        # Warm-up tested whether times follow the workload at all; workloads that were alike there may vary by now.
        told = np.select([alike, collinear], [Finding.ALIKE, Finding.COLLINEAR], Finding.FITTED)
        finding = np.where(np.isin(finding, (Finding.UNRELATED, Finding.TOO_FEW)), finding, told)
        informative = finding <= Finding.COLLINEAR
        allowed = np.where(informative[:, None], allowed, np.array([False, False, True]))
        found = nonnegative_least_squares(self._matrix, self._vector, allowed)
        found = np.where(self._samples[:, None] > 0, found, np.nan)
        shape = ops.alpha.shape
        alpha, beta, gamma = (found[:, column].reshape(shape) for column in range(3))
        per_sample = self._matrix / np.maximum(self._samples, 1.0)[:, None, None]
        self.model = replace(self.model, ops=replace(
            ops, alpha=alpha, beta=beta, gamma=gamma,
            informative=informative.reshape(shape), finding=finding.reshape(shape),
            samples=self._samples.astype(np.int64).reshape(shape), information=per_sample.reshape(*shape, 3, 3),
        ))  # fmt: skip
