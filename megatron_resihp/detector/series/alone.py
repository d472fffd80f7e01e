# SPDX-License-Identifier: Apache-2.0
"""Judges units that are alone in their stage: they have no peers, so each is judged as a series of its own.

Their first rows may be slow, and they may become faster, like those of a job without workers. Imports numpy and this
package.
"""

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.series.follower import Follower, Step


class Alone:
    """The followers of such units, by unit number."""

    def __init__(self) -> None:
        self._followers: dict[int, Follower] = {}

    def begin(self, units: NDArray[np.int64], probability: float, smallest: float) -> None:
        """Follow these units; see `Follower` for the other arguments."""
        self._followers = {int(unit): Follower(probability, smallest) for unit in units}

    @property
    def units(self) -> list[int]:
        """The units that are followed."""
        return list(self._followers)

    def update(self, residuals: NDArray[np.float64]) -> list[tuple[int, Step]]:
        """Take in one iteration's residuals, [units], NaN where unknown; returns the units that changed."""
        found = []
        for unit, follower in self._followers.items():
            if np.isfinite(residuals[unit]):
                step = follower.update(float(residuals[unit]))
                if step:
                    found.append((unit, step))
        return found

    def level(self, unit: int) -> float:
        """The unit's healthy level."""
        level = self._followers[unit].healthy_level()
        return level if np.isfinite(level) else 0.0

    def excess(self, unit: int) -> float:
        """The unit's excess; 0 if it is not slow."""
        return self._followers[unit].excess if self._followers[unit].slow else 0.0

    def move(self, source: NDArray[np.int64]) -> None:
        """Switch to other units: `source` gives each one's old number, or -1 if it is new."""
        self._followers = {
            place: self._followers[number] for place, number in enumerate(source.tolist()) if number in self._followers
        }
