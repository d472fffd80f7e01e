# SPDX-License-Identifier: Apache-2.0
"""Judges iteration times of a job without worker columns: some worker is slow. Imports numpy and `detector`."""

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.input.replay import Replay
from megatron_resihp.detector.input.table import Table
from megatron_resihp.detector.series.follower import Follower, Step
from megatron_resihp.detector.series.level_rows import FEWEST
from megatron_resihp.detector.series.spread import WINDOWS
from megatron_resihp.detector.series.workload import Workload
from megatron_resihp.detector.settings import Settings
from megatron_resihp.detector.verdict import Change, Kind, Verdict

CONFIDENCE: Final = 1.96
"""Standard errors on both sides of an estimate that contain the truth with 95 % probability."""
FEWEST_ROWS: Final = FEWEST + int(WINDOWS[0])
"""Fewest rows before a row can be judged."""
SMALLEST: Final = 0.02
"""Smallest slowdown to look for, log of the ratio of times; iteration times drift by as much."""
LARGEST_ERROR: Final = 1.0
"""Largest error of one row in the mean error of predictions."""


def judge_series(
    table: Table, false_alarms_per_job: float, settings: Settings, advance: Callable[[int], None] | None = None
) -> Replay:
    """Judge a table without workers, or with one worker, row by row in their order.

    Args:
        table: with one column of times.
        false_alarms_per_job: accepted false alarms in the whole job, on average.
        settings: of the detector.
        advance: called now and then with the number of further rows judged.
    """
    series = _Series(table, false_alarms_per_job, settings)
    for place in range(len(table.iterations)):
        series.add(place)
        if advance and place % 1000 == 999:
            advance(1000)
    return series.finish()


class _Series:
    def __init__(self, table: Table, false_alarms_per_job: float, settings: Settings) -> None:
        rows = len(table.iterations)
        self._table = table
        self._seconds = table.seconds[:, 0]
        self._features = _features(table)
        self._workload = Workload(self._features.shape[1]) if self._features.shape[1] else None
        self._logs = np.log(self._seconds).tolist()
        self._follower = Follower(false_alarms_per_job / max(rows, 1), min(settings.smallest_slowdown, SMALLEST))
        self._who = (int(table.workers[0]),) if table.has_workers else ()
        """The only "worker" of a table without workers is the job, as nothing tells which worker is slow."""
        self._judged: list[int] = []
        """Places of the rows that the follower has seen."""
        self._predicted = np.full(rows, np.nan)
        self._healthy = np.ones(rows, dtype=bool)
        self._result = Replay(
            iterations=table.iterations.tolist(), epochs=table.segments.tolist(), observed=self._seconds.tolist(),
            workers=set(table.workers.tolist()),
        )  # fmt: skip

    def add(self, place: int) -> None:
        """Judge the row at this place."""
        if place and self._table.segments[place] != self._table.segments[place - 1]:
            self._follower.restart()
        residuals = self._residuals(place)
        self._result.judged += bool(residuals) and self._follower.judging
        for back, residual in zip(range(len(residuals) - 1, -1, -1), residuals, strict=True):
            self._judged.append(place - back)
            step = self._follower.update(residual)
            if step:
                self._verdict(step)
        if self._workload:
            self._workload.slow() if self._follower.slow else self._workload.healthy()
        self._healthy[place] = not self._follower.slow
        scale = self._workload.predicted(self._features[place]) if self._workload else 1.0
        self._predicted[place] = scale * math.exp(min(self._follower.healthy_level(), 700.0)) if residuals else math.nan

    def _residuals(self, place: int) -> list[float]:
        if self._workload is None:
            return [self._logs[place]]
        residuals = self._workload.see(float(self._seconds[place]), self._features[place], self._follower.excess)
        self._result.unknown += not residuals
        return residuals

    def _verdict(self, step: Step) -> None:
        since = self._judged[max(len(self._judged) - step.rows, 0)]
        place = self._judged[-1]
        recovered = step.change is Change.RECOVERY
        if recovered:
            self._healthy[since : place + 1] = True
        elif step.change is Change.ONSET:
            self._healthy[since : place + 1] = False
            if self._workload:
                self._workload.slow()
        low, speed, high = (
            min(math.exp(-max(step.excess + reach, 0.0)), 1.0)
            for reach in (CONFIDENCE * step.error, 0.0, -CONFIDENCE * step.error)
        )
        self._result.verdicts.append(Verdict(
            kind=Kind.COMPUTE, change=step.change, workers=self._who, speed=1.0 if recovered else speed,
            speed_low=low, speed_high=high, since=int(self._table.iterations[since]),
            iteration=int(self._table.iterations[place]), epoch=int(self._table.segments[place]),
            evidence={"log_ratio": step.excess, "standard_error": step.error, "noise": step.noise,
                      "window": float(step.window), "row": float(self._table.rows[place])},
        ))  # fmt: skip

    def finish(self) -> Replay:
        """The complete result."""
        result = self._result
        if self._workload:
            result.unknown = max(result.unknown - min(len(self._judged), 7), 0)
        result.predicted = self._predicted.tolist()
        known = self._healthy & np.isfinite(self._predicted) & (self._predicted > 0)
        if known.any():
            with np.errstate(over="ignore"):
                errors = np.abs(self._seconds[known] / self._predicted[known] - 1.0)
            result.iteration_mape = float(np.minimum(errors, LARGEST_ERROR).mean())
        result.smallest_seen = -math.expm1(-min(self._follower.smallest_seen(), 700.0))
        return result


def _features(table: Table) -> NDArray[np.float64]:
    """[rows, available columns of workload]."""
    columns = [values[:, 0] for values in (table.tokens, table.squares) if np.isfinite(values).any()]
    return np.column_stack(columns) if columns else np.empty((len(table.iterations), 0))
