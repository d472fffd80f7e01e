"""Keeping a fitted CostModel current: old measurements fade, suspects teach nothing. Imports numpy and this room.

Recursive least squares with exponential forgetting in the information form (Ljung, System Identification, section
11.2): in each iteration that brings measurements, the moments of the earlier ones are multiplied by a factor below 1.
"""

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_resihp.cost.fit import Finding, identifiable, moments, nonnegative_least_squares
from megatron_resihp.cost.model import CostModel, by_stage, own_seconds

MEMORY: Final = 200.0
"""Iterations after which a measurement's weight has fallen to 1/e."""
FARTHEST: Final = 3.0
"""Measurements farther than this many standard deviations from the prediction teach nothing: they are stalls, or a
fault that nobody has named yet."""
_LEAST_NOISE = 1e-3
"""Share of a duration that clocks alone may be wrong by."""


class CurrentCost:
    """A cost model whose ops follow slow changes of the devices, and that does not learn a fault as normal."""

    def __init__(self, model: CostModel, memory: float = MEMORY) -> None:
        """`model` counts like the measurements that it was fitted from, but for no more than a memory's worth; `memory`
        is in iterations."""
        self.model = model
        self._memory = memory
        ops = model.ops
        self._samples = ops.samples.reshape(-1).astype(np.float64)
        self._matrix = ops.information.reshape(-1, 3, 3) * self._samples[:, None, None]
        coefficients = np.nan_to_num(np.stack([ops.alpha, ops.beta, ops.gamma], axis=-1)).reshape(-1, 3)
        self._vector = (self._matrix @ coefficients[..., None])[..., 0]

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
        """Learn from one iteration's measurements; returns the model, which is `model` from now on.

        Args:
            stage: [workers].
            compute, waited: [workers, kinds, chunks, micro-batches], as in the detector's observations.
            tokens, squares: [workers, micro-batches].
            suspect: [workers], whose measurements may not be learned as normal.
            iterations: how many have passed since the last update.
        """
        stages = np.asarray(stage, np.int64)
        own = np.where(suspect[:, None, None, None], np.nan, own_seconds(compute[None], waited[None])[0])
        predicted = self.model.own_compute(stages, tokens, squares)
        limit = FARTHEST * np.maximum(np.nan_to_num(self.model.ops.noise), _LEAST_NOISE)[stages][..., None]
        with np.errstate(invalid="ignore", divide="ignore"):
            learnable = (own > 0) & (np.abs(own / predicted - 1.0) <= limit) & (predicted > 0)
        weights = np.where(learnable, predicted, np.inf) ** -2.0
        features = [np.broadcast_to(np.nan_to_num(each)[:, None, None], own.shape) for each in (tokens, squares)]
        values = (*features, np.ones_like(own), np.nan_to_num(own), weights)
        columns = [np.nan_to_num(by_stage(each[None], stages, len(self.model.ops.alpha))) for each in values]
        flat = [each.reshape(-1, each.shape[-1]) for each in columns]
        matrix, vector = moments(np.stack(flat[:3], axis=-1), flat[3], flat[4])
        self._learn(matrix, vector, (flat[4] > 0).sum(axis=1), float(np.exp(-iterations / self._memory)))
        return self.model

    def _learn(
        self, matrix: NDArray[np.float64], vector: NDArray[np.float64], count: NDArray[np.int64], fading: float
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
        # Whether times follow the workload at all was tested in warm-up; what was alike there may have become varied.
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
