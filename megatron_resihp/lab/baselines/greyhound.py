# SPDX-License-Identifier: Apache-2.0
"""Greyhound's detector (USENIX ATC 2025): change points of the iteration time, small ones discarded, then validation.

Only rises lead to validation; a rise that comes from a change of workload is a false alarm. The released code may
validate more often. Imports numpy.
"""

from dataclasses import dataclass, field

import numpy as np

from megatron_resihp.detector.input.observations import IterationObservations, Layout
from megatron_resihp.detector.interface import iteration_seconds
from megatron_resihp.detector.verdict import Verdict
from megatron_resihp.lab.baselines.change_points import ChangePoints, ChangePointSettings
from megatron_resihp.lab.baselines.validation import Validate, Validation


@dataclass(frozen=True)
class GreyhoundSettings:
    """The published settings, and the filter's.

    Attributes:
        change_points: settings of the filter.
        smallest_rise: a change is discarded unless the mean after it exceeds the mean before by this share.
    """

    change_points: ChangePointSettings = field(default_factory=ChangePointSettings)
    smallest_rise: float = 0.10


class Greyhound:
    """Judges the iteration time of a job. The published method has no false-alarm rate to set."""

    def __init__(
        self,
        layout: Layout,
        false_alarms_per_job: float,
        expected_iterations: int,
        *,
        validate: Validate,
        settings: GreyhoundSettings | None = None,
    ) -> None:
        self._settings = settings or GreyhoundSettings()
        self._changes = ChangePoints(self._settings.change_points)
        self._iterations: list[int] = []
        self._judged = 0
        self.validation = Validation(validate)

    def observe(self, observations: IterationObservations) -> list[Verdict]:
        """See `Detector.observe`."""
        seconds = iteration_seconds(observations)
        if not np.isfinite(seconds):
            return []
        self._iterations.append(observations.iteration)
        change = self._changes.update(seconds)
        # A change point that began before the last alarm was raised has been judged by it.
        if change is None or change.start < self._judged:
            return []
        if change.after < (1 + self._settings.smallest_rise) * change.before:
            return []
        self._judged = len(self._iterations)
        return self.validation.after_alarm(self._iterations[change.start], observations.iteration, observations.epoch)

    def speed(self, worker: int) -> float:
        """See `Detector.speed`."""
        return self.validation.speed((worker,))

    def link_speed(self, ends: tuple[int, int]) -> float:
        """See `Detector.link_speed`."""
        return self.validation.speed(ends)
