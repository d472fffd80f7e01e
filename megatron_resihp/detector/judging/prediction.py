# SPDX-License-Identifier: Apache-2.0
"""How long an iteration should take on healthy devices: the cost model through the pipeline's program.

Imports numpy, `plan`, `cost` and `pipeline`. It is fitted for one epoch's plan from its first iterations. The simulator
gives the makespan of each replica, and the iteration waits for the slowest replica. The times outside the pipeline are
added.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_resihp.cost.fitted.model import CostModel, fit_collectives, fit_links, fit_ops, own_seconds, term
from megatron_resihp.detector.input.observations import IterationObservations, Layout, stacked
from megatron_resihp.detector.input.records import OpKind, SpanKind
from megatron_resihp.detector.interface import iteration_seconds
from megatron_resihp.detector.judging.units import tensor_groups
from megatron_resihp.pipeline.planned import known_program
from megatron_resihp.pipeline.program import Program
from megatron_resihp.pipeline.simulate import makespans
from megatron_resihp.plan import Schedule
from megatron_resihp.plan.schedule import ZERO_BUBBLE

Array = NDArray[np.float64]

TERMS: Final = (SpanKind.GRADIENT_SYNC, SpanKind.AGREEMENT, SpanKind.OPTIMIZER)
"""Spans of every iteration, after its pipeline."""
REST: Final = "rest"
"""Term for time outside all spans: the usual difference between the iteration and the sum of its parts."""


class Prediction:
    """Predicts the iterations of one epoch.

    Attributes:
        model: the costs, with their errors in warm-up.
    """

    def __init__(
        self, layout: Layout, warm_up: Sequence[IterationObservations], slow: NDArray[np.bool_] | None = None
    ) -> None:
        """Fit the model.

        Args:
            layout: of the epoch.
            warm_up: iterations of the epoch, at least one.
            slow: [workers] which are known to be slow. The model's collectives have no wait for them, since whoever
                plans with these costs adds it. Its errors in warm-up count that wait.
        """
        self._layout = layout
        compute, waited, tokens, squares = (
            stacked(warm_up, name) for name in ("compute", "waited", "tokens", "squares")
        )
        self._usual = [_usual(each) for each in (tokens, squares)]
        ops, collectives = fit_ops(layout.stage, compute, waited, *self._features(tokens, squares))
        sizes = stacked(warm_up, "transfer_bytes")
        links = fit_links(layout.links, stacked(warm_up, "transfer"), sizes)
        terms = {kind.name.lower(): term(stacked(warm_up, "spans")[..., kind]) for kind in TERMS}
        self.model = CostModel(ops, collectives, links, terms)
        self._measured = np.isfinite(compute).any(axis=(0, 1, 3))  # [kinds, micro-batches]
        self._counts = np.isfinite(compute).any(axis=(0, 2, 3)).sum(axis=1)
        self._boundary = self._boundary_seconds(float(_usual(sizes)) if sizes.size else 0.0)
        self._calibrate(warm_up)
        if slow is not None and slow.any():
            waited = without_waits_for(slow, layout, waited)
            healthy = fit_collectives(layout.stage, waited, *self._features(tokens, squares))
            self.model = replace(self.model, collectives=healthy)

    def _calibrate(self, warm_up: Sequence[IterationObservations]) -> None:
        observed = np.array([iteration_seconds(each) for each in warm_up])
        short = observed - self.iterations(warm_up)
        rest = float(np.nanmedian(short)) if np.isfinite(short).any() else 0.0
        self.model = replace(self.model, terms={**self.model.terms, REST: rest})
        self.model = replace(
            self.model,
            micro_batch_mape=mape(*self.micro_batches(warm_up)),
            iteration_mape=mape(observed, self.iterations(warm_up)),
        )

    def micro_batches(self, observations: Sequence[IterationObservations]) -> tuple[Array, Array]:
        """Measured and predicted own compute of a worker for a micro-batch, all its ops.

        Each is [iterations, workers, micro-batches]; NaN where one of the ops was not measured.
        """
        own = own_seconds(stacked(observations, "compute"), stacked(observations, "waited"))
        known = np.isfinite(own).any(axis=(0, 1, 4))[None, None, ..., None]
        predicted = self._predicted(self.model.own_compute, observations)
        measured, predicted = (np.where(known, each, 0.0).sum(axis=(2, 3)) for each in (own, predicted))
        return measured, predicted

    def iterations(self, observations: Sequence[IterationObservations]) -> Array:
        """[iterations] predicted seconds; NaN where the workload is unknown."""
        durations = self._predicted(self.model.durations, observations)
        slowest = np.zeros(len(observations))
        for replica in np.unique(self._layout.replica):
            slowest = np.maximum(slowest, self._replica(int(replica), durations))
        return slowest + sum(self.model.terms.values())

    def _replica(self, replica: int, durations: Array) -> Array:
        """[iterations] makespan of one replica, from all workers' durations."""
        rows = np.flatnonzero(self._layout.replica == replica)
        first = [int(rows[self._layout.stage[rows] == stage][0]) for stage in np.unique(self._layout.stage[rows])]
        count, chunks = int(self._counts[first].max()), durations.shape[3]
        program = _program(len(first), chunks, count, bool(self._measured[OpKind.W].any()))
        # Chunk c of stage s is the pipeline's stage c · stages + s.
        ops = np.moveaxis(durations[:, first, :, :, :count], (2, 3), (1, 2))
        ops = ops.reshape(len(durations), len(OpKind), chunks * len(first), count)
        unknown = ~np.isfinite(ops).all(axis=(1, 2, 3))
        boundaries = [
            self._boundary.get(frozenset((first[stage % len(first)], first[(stage + 1) % len(first)])), 0.0)
            for stage in range(chunks * len(first) - 1)
        ]
        seconds = makespans(program, np.nan_to_num(ops), np.array(boundaries)[None, :, None])
        return np.where(unknown, np.nan, seconds)

    def _predicted(self, costs: Callable[..., Array], observations: Sequence[IterationObservations]) -> Array:
        """One of the model's costs, [iterations, workers, kinds, chunks, micro-batches]; 0 for absent kinds of ops."""
        features = [stacked(observations, name) for name in ("tokens", "squares")]
        predicted = np.stack([
            costs(self._layout.stage, *of_iteration)
            for of_iteration in zip(*self._features(*features), strict=True)
        ])  # fmt: skip
        return np.where(self._measured.any(axis=1)[None, None, :, None, None], predicted, 0.0)

    def _features(self, tokens: Array, squares: Array) -> tuple[Array, Array]:
        """N and Σ l²; 1 and 0 if a job records neither, so that levels can be fitted."""
        if np.isnan(self._usual).any():
            return np.ones_like(tokens), np.zeros_like(squares)
        return tokens, squares

    def _boundary_seconds(self, size: float) -> dict[frozenset[int], float]:
        """Usual transfer time between two workers, by their row numbers."""
        row_of = {int(worker): row for row, worker in enumerate(self._layout.workers)}
        return {
            frozenset(row_of[worker] for worker in pair): float(link.seconds(size))
            for pair, link in self.model.links.items()
        }


def without_waits_for(slow: NDArray[np.bool_], layout: Layout, waited: Array) -> Array:
    """Waits in collectives, [iterations, workers, kinds, chunks, micro-batches], as if nobody had been slow.

    Whoever comes last to a collective does not wait in it, so the least wait in a group is that of all if nobody is
    late. Where one of them was not timed, it is not known.
    """
    result = waited.copy()
    group = tensor_groups(layout)
    for each in np.unique(group[slow]):
        members = group == each
        result[:, members] = waited[:, members].min(axis=1, keepdims=True)
    return result


@cache
def _program(stages: int, chunks: int, micro_batches: int, splits_backward: bool) -> Program:
    """The program that Megatron runs for such a pipeline; ZB-H1 if the backward is split."""
    return known_program(Schedule(ZERO_BUBBLE) if splits_backward else None, stages, chunks * stages, micro_batches)


def mape(measured: Array, predicted: ArrayLike) -> float:
    """Mean of |measured − predicted| / measured where both are known; NaN without any. `predicted` is broadcast."""
    predicted = np.broadcast_to(predicted, measured.shape)
    known = np.isfinite(measured) & np.isfinite(predicted) & (measured > 0)
    if not known.any():
        return float("nan")
    return float(np.mean(np.abs(measured[known] - predicted[known]) / measured[known]))


def _usual(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else float("nan")
