# SPDX-License-Identifier: Apache-2.0
"""Change points of a job's iteration time, with which both published detectors begin. Imports numpy."""

from dataclasses import dataclass, field

import numpy as np

from megatron_resihp.lab.baselines.bocd import ChangePointFilter, Prior


@dataclass(frozen=True)
class ChangePointSettings:
    """When a change point counts.

    Attributes:
        prior: of the filter.
        recent: number of last iterations in which a change point is looked for.
        probability: how sure the filter must be.
        fewest: iterations after a change point before it is judged, so that a mean can be taken.
        warm_up: iterations without judgement.
    """

    prior: Prior = field(default_factory=Prior)
    recent: int = 10
    probability: float = 0.9
    fewest: int = 2
    warm_up: int = 50


@dataclass(frozen=True)
class ChangePoint:
    """Where the series changed; positions count from 0.

    Attributes:
        start: first position after the change.
        before: mean from the previous change point up to this one.
        after: mean since this one.
    """

    start: int
    before: float
    after: float


class ChangePoints:
    """Finds change points in a series, online."""

    def __init__(self, settings: ChangePointSettings) -> None:
        self._settings = settings
        self._filter = ChangePointFilter(settings.prior)
        self._values: list[float] = []
        self._segment = 0
        self._latest = 0

    def update(self, value: float) -> ChangePoint | None:
        """Take in one more value; returns the change point that the filter is now sure of, while it is recent."""
        self._values.append(value)
        self._filter.update(value / self._values[0])
        chance = self._filter.run_length[: self._settings.recent + 1]
        sure = chance.sum() > self._settings.probability and len(self._values) > self._settings.warm_up
        if not sure:
            self._segment = self._latest
            return None
        run = int(chance.argmax())
        self._latest = len(self._values) - run
        if run < self._settings.fewest:
            return None
        before = self._values[min(self._segment, self._latest - 1) : self._latest]
        return ChangePoint(self._latest, float(np.mean(before)), float(np.mean(self._values[self._latest :])))
