# SPDX-License-Identifier: Apache-2.0
"""Keeps what a run learns in its cost model file.

Imports numpy, `cost` and this package, and numba once there is something to fit.

The costs of ops come from the monitor, whose costs follow the devices. The first iterations of each epoch give the fits
of collectives, links, times outside the pipeline, and the prediction error. Collectives are fitted without the waits
for slow workers. A planner adds these by the workers' speeds, and would count them twice.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_resihp.cost.fitted.model import CostModel
from megatron_resihp.detector.input.observations import IterationObservations, Layout
from megatron_resihp.detector.judging.learned import Learned, save
from megatron_resihp.detector.settings import Settings


class Keeper:
    """Takes each iteration, and says when there is something to save."""

    def __init__(self, path: Path, settings: Settings | None = None) -> None:
        self._path = path
        self._settings = settings or Settings()
        self._layout: Layout | None = None
        self._to_skip = 0
        self._waiting: list[IterationObservations] = []
        self._complete = False
        self._model: CostModel | None = None

    def begin(self, layout: Layout) -> None:
        """Begin an epoch."""
        self._layout, self._model, self._complete = layout, None, False
        self._to_skip, self._waiting = self._settings.skipped, []

    def add(self, observations: IterationObservations, speed: Callable[[int], float]) -> bool:
        """Take in an iteration; returns whether it was the last one that the epoch's fit needed.

        Args:
            observations: of the iteration.
            speed: tells a worker's p as the detector knows it.
        """
        if self._complete or self._layout is None or observations.epoch != self._layout.epoch:
            return False
        if self._to_skip > 0:
            self._to_skip -= 1
            return False
        self._waiting.append(observations)
        if len(self._waiting) < self._settings.warm_up:
            return False
        self._complete = True
        observed, self._waiting = self._waiting, []
        if not self._layout.native:
            return True
        # Import only now: compiling the simulator takes a second, for which the start of a job need not wait.
        from megatron_resihp.detector.judging.prediction import Prediction

        slow = np.array([speed(int(worker)) < 1.0 for worker in self._layout.workers])
        self._model = Prediction(self._layout, observed, slow).model
        return True

    def save(self, learned: Learned) -> None:
        """Write what was learned, together with what was fitted here. Raises OSError.

        It writes nothing while an epoch has just begun, or if stages are not the job's own. Other runs and planners
        assume that the file describes the job's own stages.
        """
        if not self._complete or self._layout is None or not self._layout.native:
            return
        model = learned.model if self._model is None else replace(self._model, ops=learned.model.ops)
        save(replace(learned, model=model), self._path)
