# SPDX-License-Identifier: Apache-2.0
"""The rows of the level in force, and where in them a level may have changed. Imports numpy and this package."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.series.spread import LONGEST, REFERENCE, median

Array = NDArray[np.float64]

FEWEST: Final = 7
"""Reference rows without which nothing is judged."""
KEPT: Final = REFERENCE + 2 * LONGEST
REFRESH: Final = 8
"""Rows after which what is known of the level in force is found out anew."""


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
        """One more row."""
        if self.size == self._rows.size:
            self._rows[:KEPT] = self._rows[self.size - KEPT :]
            self.size = KEPT
        self._rows[self.size] = value
        self.size += 1
        self.age += 1

    def all(self) -> Array:
        """A view of them, the oldest first."""
        return self._rows[: self.size]

    def newest(self, most: int) -> Array:
        """A view of the newest ones, the newest first."""
        return self._rows[max(self.size - most, 0) : self.size][::-1]

    def set(self, rows: Array) -> None:
        """These are the rows of the level that is in force now."""
        rows = rows[-KEPT:].copy()
        self._rows[: rows.size] = rows
        self.size = self.age = rows.size

    def clear(self) -> None:
        """Nothing is known of the level in force."""
        self.size = self.age = 0

    def change_point(self, level: float, window: int, smallest: float) -> int:
        """How many of the newest rows have another level, by maximum likelihood.

        Args:
            level: of those before.
            window: rows that certainly do.
            smallest: change of level that is looked for.
        """
        rows = self.all()
        size = min(rows.size - min(FEWEST, rows.size - window), LONGEST + REFRESH)
        newest = rows[::-1][: max(size, window)] - level
        reach = max(2 * smallest, 2 * abs(median(newest[:window])))
        sums = np.cumsum(np.clip(newest, -reach, reach))
        return int((sums**2 / np.arange(1, sums.size + 1)).argmax()) + 1
