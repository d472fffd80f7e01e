# SPDX-License-Identifier: Apache-2.0
"""Change points of a job's iteration time, which both published detectors begin with. Imports numpy."""

from dataclasses import dataclass, field

import numpy as np

from megatron_resihp.lab.baselines.bocd import ChangePointFilter, Prior


@dataclass(frozen=True)
class ChangePointSettings:
    """When a change point counts.

    Attributes:
        prior: of the filter.
        recent: a change point is looked for in so many last iterations.
        probability: how sure the filter must be.
        fewest: iterations after a change point before it is judged, so that a mean can be taken.
        warm_up: iterations in which nothing is judged.
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
        before: mean from the change point before this one up to it.
        after: mean since then.
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
        """See one more value; the change point that the filter is now sure of, as long as it is recent."""
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
