# SPDX-License-Identifier: Apache-2.0
"""Units that are alone in their stage: nobody does the same work, so each is judged as a series of its own.

Their first rows may be slow, and they may become faster, as those of a job without workers. Imports numpy, this
package.
"""

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.series.follower import Follower, Step


class Alone:
    """The followers of such units, by the unit's number."""

    def __init__(self) -> None:
        self._followers: dict[int, Follower] = {}

    def begin(self, units: NDArray[np.int64], probability: float, smallest: float) -> None:
        """Follow these; see `Follower` for the rest."""
        self._followers = {int(unit): Follower(probability, smallest) for unit in units}

    @property
    def units(self) -> list[int]:
        """Who is followed."""
        return list(self._followers)

    def update(self, residuals: NDArray[np.float64]) -> list[tuple[int, Step]]:
        """Take in one iteration's residuals, [units], NaN where unknown; who has changed."""
        found = []
        for unit, follower in self._followers.items():
            if np.isfinite(residuals[unit]):
                step = follower.update(float(residuals[unit]))
                if step:
                    found.append((unit, step))
        return found

    def level(self, unit: int) -> float:
        """Its healthy level."""
        level = self._followers[unit].healthy_level()
        return level if np.isfinite(level) else 0.0

    def excess(self, unit: int) -> float:
        """By how much it is slow; 0 if it is not."""
        return self._followers[unit].excess if self._followers[unit].slow else 0.0

    def move(self, source: NDArray[np.int64]) -> None:
        """Go on with other units: number `source` of the old ones each, -1 for one that was not known."""
        self._followers = {
            place: self._followers[number] for place, number in enumerate(source.tolist()) if number in self._followers
        }
