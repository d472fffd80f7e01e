# SPDX-License-Identifier: Apache-2.0
"""ResiHP's published detector (arXiv 2605.06374): Greyhound's change points, checked against the workload.

A change point counts only if the job takes longer than its workload explains; then validation follows. The healthy time
comes from T = αN + βΣl² of whole ops, waits for TP peers included, through the pipeline's DAG. Imports numpy.
"""

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_resihp.detector.input.observations import IterationObservations, Layout
from megatron_resihp.detector.interface import iteration_seconds
from megatron_resihp.detector.judging.prediction import Prediction
from megatron_resihp.detector.verdict import Verdict
from megatron_resihp.lab.baselines.change_points import ChangePoint, ChangePoints, ChangePointSettings
from megatron_resihp.lab.baselines.validation import Validate, Validation


@dataclass(frozen=True)
class ResihpSettings:
    """The published settings, and the filter's.

    Attributes:
        change_points: settings of the filter.
        slow: observed time above which the job is slow, as a multiple of the predicted one.
    """

    change_points: ChangePointSettings = field(default_factory=ChangePointSettings)
    slow: float = 1.25


class Resihp:
    """Judges a job by its iteration time and workload. The published method has no false-alarm rate to set."""

    def __init__(
        self,
        layout: Layout,
        false_alarms_per_job: float,
        expected_iterations: int,
        *,
        validate: Validate,
        settings: ResihpSettings | None = None,
    ) -> None:
        self._settings = settings or ResihpSettings()
        self._changes = ChangePoints(self._settings.change_points)
        self._layout = layout
        self._warm_up: list[IterationObservations] = []
        self._recent: deque[IterationObservations] = deque(maxlen=self._settings.change_points.recent)
        self._prediction: Prediction | None = None
        self._seen = 0
        self._judged = 0
        self.validation = Validation(validate)

    def observe(self, observations: IterationObservations) -> list[Verdict]:
        """See `Detector.observe`."""
        seconds = iteration_seconds(observations)
        if not np.isfinite(seconds):
            return []
        self._seen += 1
        self._recent.append(observations)
        if self._seen <= self._settings.change_points.warm_up:
            self._warm_up.append(observations)
        change = self._changes.update(seconds)
        # A change point that began before the last alarm was raised has been judged by it.
        if change is None or change.start < self._judged or not self._is_slow(change):
            return []
        self._judged = self._seen
        since = self._recent[change.start - self._seen].iteration
        return self.validation.after_alarm(since, observations.iteration, observations.epoch)

    def speed(self, worker: int) -> float:
        """See `Detector.speed`."""
        return self.validation.speed((worker,))

    def link_speed(self, ends: tuple[int, int]) -> float:
        """See `Detector.link_speed`."""
        return self.validation.speed(ends)

    def _is_slow(self, change: ChangePoint) -> bool:
        """Whether the iterations since a change point take too long. The model is fitted at the first call."""
        layout, rows, links = _representatives(self._layout)
        if self._prediction is None:
            self._prediction = Prediction(layout, [_only(each, rows, links) for each in self._warm_up])
            self._warm_up.clear()
        since = list(self._recent)[change.start - self._seen :]
        predicted = self._prediction.iterations([_only(each, rows, links) for each in since])
        return change.after > self._settings.slow * float(predicted.mean())


def _representatives(layout: Layout) -> tuple[Layout, np.ndarray, np.ndarray]:
    """One worker for each TP group, since ops last equally long on all members: layout, rows, and rows of links."""
    rows = np.flatnonzero(layout.tp_rank == 0)
    links = np.flatnonzero(np.isin(layout.links, layout.workers[rows]).all(axis=1))
    names = ("workers", "replica", "stage", "tp_rank", "node")
    kept = {name: getattr(layout, name)[rows] for name in names}
    return replace(layout, links=layout.links[links], **kept), rows, links


def _only(observations: IterationObservations, rows: np.ndarray, links: np.ndarray) -> IterationObservations:
    """Observations of some workers and links, without wait times, so that whole ops are fitted."""
    of_workers = ("compute", "tokens", "squares", "spans", "seconds", "reported")
    of_links = ("transfer", "transfer_bytes")
    return replace(
        observations,
        **{name: getattr(observations, name)[rows] for name in of_workers},
        **{name: getattr(observations, name)[links] for name in of_links},
        waited=np.full_like(observations.compute[rows], np.nan),
    )
