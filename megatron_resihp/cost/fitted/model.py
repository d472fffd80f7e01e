# SPDX-License-Identifier: Apache-2.0
"""CostModel: costs of an iteration's parts on healthy devices, from warm-up. Imports numpy and this package.

Axes are those of the detector's observations: stages or workers, kinds (F, B, W), chunks, micro-batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_resihp.cost.fitted.fit import Fits, fit, masked_median

Link = tuple[int, int]


@dataclass(frozen=True)
class LinkCost:
    """A transfer takes `latency` + bytes · `seconds_per_byte` (the reciprocal of the bandwidth).

    If all transfers had one size, `informative` is false and `latency` is their usual duration.
    """

    latency: float
    seconds_per_byte: float
    informative: bool
    noise: float

    def seconds(self, size: ArrayLike) -> NDArray[np.float64]:
        """Duration of transfers of `size` bytes."""
        return self.latency + self.seconds_per_byte * np.asarray(size, np.float64)


@dataclass(frozen=True)
class CostModel:
    """Costs of a job's parts.

    Attributes:
        ops: own compute of an op; groups are [stages, kinds, chunks].
        collectives: time of an op's tensor-parallel collectives, with the usual wait for the group's other members; the
            same groups; 0 if the op was never seen to wait.
        links: by the worker ids of both ends, smaller first.
        terms: time of an iteration outside its pipeline, in seconds by name: gradient sync, optimizer, agreement …
        micro_batch_mape, iteration_mape: relative error of predictions in warm-up; NaN if not measured.
    """

    ops: Fits
    collectives: Fits
    links: Mapping[Link, LinkCost] = field(default_factory=dict)
    terms: Mapping[str, float] = field(default_factory=dict)
    micro_batch_mape: float = float("nan")
    iteration_mape: float = float("nan")

    @property
    def informative(self) -> NDArray[np.bool_]:
        """[stages, kinds, chunks]: whether the op's duration for another workload can be predicted."""
        return self.ops.informative

    def own_compute(self, stage: ArrayLike, tokens: ArrayLike, squares: ArrayLike) -> NDArray[np.float64]:
        """Healthy seconds of own compute, [workers, kinds, chunks, micro-batches].

        Args:
            stage: each worker's stage, [workers].
            tokens, squares: N and Σ l² of each worker's micro-batches, [workers, micro-batches].
        """
        return _predict(self.ops, stage, tokens, squares)

    def durations(self, stage: ArrayLike, tokens: ArrayLike, squares: ArrayLike) -> NDArray[np.float64]:
        """Like `own_compute`, with the time of collectives: how long the op occupies its device."""
        return self.own_compute(stage, tokens, squares) + _predict(self.collectives, stage, tokens, squares)


def fit_ops(
    stage: ArrayLike, compute: NDArray[np.float64], waited: NDArray[np.float64], tokens: ArrayLike, squares: ArrayLike
) -> tuple[Fits, Fits]:
    """Fit own compute and collectives per stage, kind and chunk, from all workers of the stage together.

    Args:
        stage: [workers], from 0.
        compute, waited: seconds, [iterations, workers, kinds, chunks, micro-batches], NaN where not recorded.
        tokens, squares: [iterations, workers, micro-batches].

    Returns:
        Fits of own compute and of collectives; groups [stages, kinds, chunks].
    """
    ops = fit(*_grouped(stage, own_seconds(compute, waited), tokens, squares))
    return ops, fit_collectives(stage, waited, tokens, squares)


def fit_collectives(stage: ArrayLike, waited: NDArray[np.float64], tokens: ArrayLike, squares: ArrayLike) -> Fits:
    """The second result of `fit_ops`."""
    by_tokens, by_squares, seconds = _grouped(stage, waited, tokens, squares)
    return _without_nan(fit(by_tokens, np.zeros_like(by_squares), seconds))


def _grouped(
    stage: ArrayLike, seconds: NDArray[np.float64], tokens: ArrayLike, squares: ArrayLike
) -> list[NDArray[np.float64]]:
    """Tokens, squares and seconds of the ops, each [stages, kinds, chunks, measurements]."""
    stages = np.asarray(stage, dtype=np.int64)
    features = [np.broadcast_to(np.asarray(each)[:, :, None, None], seconds.shape) for each in (tokens, squares)]
    parts = (np.moveaxis(by_stage(each, stages, int(stages.max()) + 1), 0, 3) for each in (*features, seconds))
    return [part.reshape(*part.shape[:3], -1) for part in parts]


def own_seconds(compute: NDArray[np.float64], waited: NDArray[np.float64]) -> NDArray[np.float64]:
    """Own compute of ops, [iterations, workers, kinds, chunks, micro-batches]; NaN where it is unknown.

    If a worker's waits were timed for some ops of a kind, only those ops count. If they never were, there are no
    collectives, and the whole duration is own compute.
    """
    untimed = np.isnan(waited)
    never_timed = untimed.all(axis=(0, 4), keepdims=True)
    return np.where(untimed & ~never_timed, np.nan, compute - np.where(untimed, 0.0, waited))


def by_stage(values: NDArray[np.float64], stage: NDArray[np.int64], stages: int) -> NDArray[np.float64]:
    """[iterations, workers, kinds, chunks, micro-batches] → [iterations, stages, kinds, chunks, measurements].

    Shorter rows are padded with NaN.
    """
    count = np.bincount(stage, minlength=stages)
    place = np.arange(count.max()) < count[:, None]
    worker = np.full(place.shape, len(stage))
    worker[place] = np.argsort(stage, kind="stable")
    if not place.all():
        values = np.concatenate([values, np.full_like(values[:, :1], np.nan)], axis=1)
    return values[:, worker].transpose(0, 1, 3, 4, 2, 5).reshape(len(values), stages, *values.shape[2:4], -1)


def fit_links(
    links: NDArray[np.int64], transfer: NDArray[np.float64], size: NDArray[np.float64]
) -> dict[Link, LinkCost]:
    """Fit latency and bandwidth of each link; links without a measurement are left out.

    Args:
        links: worker ids, [links, 2].
        transfer, size: seconds and bytes of transfers without waits, [iterations, links, transfers].
    """
    if not transfer.size:
        return {}
    seconds, sizes = (np.moveaxis(each, 1, 0).reshape(len(links), -1) for each in (transfer, size))
    fits = fit(sizes, np.zeros_like(sizes), seconds)
    return {
        (int(min(pair)), int(max(pair))): LinkCost(
            float(fits.gamma[row]), float(fits.alpha[row]), bool(fits.informative[row]), float(fits.noise[row])
        )
        for row, pair in enumerate(links)
        if fits.samples[row]
    }


def term(seconds: NDArray[np.float64]) -> float:
    """The cost of a span for an iteration in which no worker is late, from its [iterations, workers]; 0 if there is
    none.

    The worker that comes last to a collective does not wait in it, so the least of the workers' times is its own cost.
    """
    least = np.where(np.isfinite(seconds), seconds, np.inf).min(axis=1)
    median = masked_median(least[None], np.isfinite(least)[None])[0]
    return float(median) if np.isfinite(median) else 0.0


def _predict(fits: Fits, stage: ArrayLike, tokens: ArrayLike, squares: ArrayLike) -> NDArray[np.float64]:
    stages = np.asarray(stage, np.int64)
    features = [np.asarray(each, np.float64)[:, None, None, :] for each in (tokens, squares)]
    alpha, beta, gamma = (each[stages][..., None] for each in (fits.alpha, fits.beta, fits.gamma))
    return alpha * features[0] + beta * features[1] + gamma


def _without_nan(fits: Fits) -> Fits:
    alpha, beta, gamma = (np.nan_to_num(each) for each in (fits.alpha, fits.beta, fits.gamma))
    return replace(fits, alpha=alpha, beta=beta, gamma=gamma)
