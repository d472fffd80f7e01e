# SPDX-License-Identifier: Apache-2.0
"""The rows of the level in force, and where in them the level may have changed. Imports numpy and this package."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.series.spread import LONGEST, REFERENCE, median

Array = NDArray[np.float64]

FEWEST: Final = 7
"""Fewest reference rows for a judgement."""
KEPT: Final = REFERENCE + 2 * LONGEST
REFRESH: Final = 8
"""Rows between updates of the estimates for the level in force."""


class LevelRows:
    """The newest rows of one level, a bounded number of them.

    Attributes:
        size: how many are kept.
        age: rows since the level began.
    """

    def __init__(self) -> None:
        self._rows = np.empty(4 * KEPT)
        self.size = 0
        self.age = 0

    def push(self, value: float) -> None:
        """Add a row."""
        if self.size == self._rows.size:
            self._rows[:KEPT] = self._rows[self.size - KEPT :]
            self.size = KEPT
        self._rows[self.size] = value
        self.size += 1
        self.age += 1

    def all(self) -> Array:
        """A view of the rows, oldest first."""
        return self._rows[: self.size]

    def newest(self, most: int) -> Array:
        """A view of the newest rows, newest first."""
        return self._rows[max(self.size - most, 0) : self.size][::-1]

    def set(self, rows: Array) -> None:
        """Make these the rows of the level in force."""
        rows = rows[-KEPT:].copy()
        self._rows[: rows.size] = rows
        self.size = self.age = rows.size

    def clear(self) -> None:
        """Forget the level in force."""
        self.size = self.age = 0

    def change_point(self, level: float, window: int, smallest: float) -> int:
        """How many of the newest rows have another level, by maximum likelihood.

        Args:
            level: of the earlier rows.
            window: how many rows certainly have another level.
            smallest: smallest change of level to look for.
        """
        rows = self.all()
        size = min(rows.size - min(FEWEST, rows.size - window), LONGEST + REFRESH)
        newest = rows[::-1][: max(size, window)] - level
        reach = max(2 * smallest, 2 * abs(median(newest[:window])))
        sums = np.cumsum(np.clip(newest, -reach, reach))
        return int((sums**2 / np.arange(1, sums.size + 1)).argmax()) + 1
