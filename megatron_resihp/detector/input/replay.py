# SPDX-License-Identifier: Apache-2.0
"""Runs the detector again on recorded input: verdicts, and observed against predicted time. Imports numpy.

The same `Monitor` sees the same observations in the same order as in the job, without the waits for late records.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from megatron_resihp.detector.input.assemble import Assembler
from megatron_resihp.detector.input.counters import Counters
from megatron_resihp.detector.input.observations import IterationObservations, Layout
from megatron_resihp.detector.input.recording import Recording
from megatron_resihp.detector.interface import iteration_seconds
from megatron_resihp.detector.judging.learned import Learned
from megatron_resihp.detector.judging.prediction import Prediction
from megatron_resihp.detector.monitor import Monitor
from megatron_resihp.detector.notices import Notice
from megatron_resihp.detector.settings import Settings
from megatron_resihp.detector.verdict import Verdict

Step = Layout | IterationObservations

BLOCK = 256
"""Iterations per prediction call."""


@dataclass
class Replay:
    """The result of a replay; lists have one element per iteration.

    Attributes:
        iterations, epochs: their numbers.
        observed, predicted: seconds, NaN where unknown.
        verdicts, notices: in order.
        workers: ids of all workers seen.
        judged: number of iterations that were judged, not only learned from.
        unknown: number of iterations whose workload was outside the learned range, so that they could not be judged.
        smallest_seen: the smallest slowdown that would be found at the end, as a share of speed lost; NaN if not
            computed.
        micro_batch_mape, iteration_mape: error of the predictions in the last epoch's warm-up; for a series, in all its
            healthy iterations.
            iterations.
    """

    iterations: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    observed: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    workers: set[int] = field(default_factory=set)
    judged: int = 0
    unknown: int = 0
    smallest_seen: float = math.nan
    micro_batch_mape: float = math.nan
    iteration_mape: float = math.nan


def steps_of(recording: Recording, counters: Counters) -> Iterator[Step]:
    """Layouts and complete iterations of a recorded run, in order; damaged messages are counted.

    Raises:
        RecordingError: a layout is damaged.
    """
    assembler = Assembler(patience_s=math.inf, counters=counters)
    for entry in recording:
        if isinstance(entry, Layout):
            yield from assembler.poll(math.inf)
            assembler.begin(entry)
            yield entry
        else:
            yield from assembler.add(entry, now=0.0)
    yield from assembler.poll(math.inf)


def replay(
    steps: Iterable[Step],
    false_alarms_per_job: float,
    expected_iterations: int,
    settings: Settings | None = None,
    known: Learned | None = None,
) -> Replay:
    """Judge recorded iterations.

    Args:
        steps: layouts, each followed by the iterations of its epoch.
        false_alarms_per_job: accepted false alarms in the whole job, on average.
        expected_iterations: planned number of iterations of the job.
        settings: of the detector.
        known: what an earlier run of the job learned, if this run began with it.
    """
    settings = settings or Settings()
    result = Replay()
    monitor: Monitor | None = None
    predictions: _EpochPredictions | None = None
    for step in steps:
        if isinstance(step, Layout):
            if predictions is not None:
                predictions.finish()
            predictions = _EpochPredictions(step, settings, result)
            result.workers |= set(map(int, step.workers))
            if monitor is None:
                monitor = Monitor(step, false_alarms_per_job, expected_iterations, settings, known)
            else:
                monitor.change_layout(step)
        elif monitor is not None and predictions is not None:
            result.judged += monitor.watching
            result.verdicts += monitor.observe(step)
            result.notices += monitor.take_notices()
            predictions.add(step)
    if predictions is not None:
        predictions.finish()
    return result


class _EpochPredictions:
    """Predicts an epoch's iterations, also the first ones once costs are known; holds few iterations at a time."""

    def __init__(self, layout: Layout, settings: Settings, result: Replay) -> None:
        self._layout = layout
        self._skipped, self._warm_up = settings.skipped, settings.warm_up
        self._result = result
        self._waiting: list[IterationObservations] = []
        self._prediction: Prediction | None = None

    def add(self, observations: IterationObservations) -> None:
        self._result.iterations.append(observations.iteration)
        self._result.epochs.append(observations.epoch)
        self._result.observed.append(iteration_seconds(observations))
        self._waiting.append(observations)
        if len(self._waiting) >= (BLOCK if self._prediction else self._skipped + self._warm_up):
            self._predict()

    def finish(self) -> None:
        if self._waiting:
            self._predict()

    def _predict(self) -> None:
        if not self._layout.native:
            self._result.predicted += [math.nan] * len(self._waiting)
            self._waiting = []
            return
        if self._prediction is None:
            self._prediction = Prediction(self._layout, self._waiting[self._skipped :] or self._waiting)
            self._result.micro_batch_mape = self._prediction.model.micro_batch_mape
            self._result.iteration_mape = self._prediction.model.iteration_mape
        self._result.predicted += self._prediction.iterations(self._waiting).tolist()
        self._waiting = []
