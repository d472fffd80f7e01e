# SPDX-License-Identifier: Apache-2.0
"""Short slow spells that end by themselves and come again: stalls, saves, evaluations. Imports this package."""

from typing import Final

import numpy as np

from megatron_resihp.detector.series.spread import WINDOWS, median

LONGEST_TRANSIENT: Final = 8
"""Most rows of a spell that ends by itself and is no slow device; the next similar spell does not alarm."""
LONGER: Final = 2
"""How many more rows than in a transient must be slow for an alarm."""
ALIKE: Final = 3.0
"""Largest ratio between the excesses of similar transients."""


class Transients:
    """The transients of one series."""

    def __init__(self) -> None:
        self._excesses: dict[int, tuple[float, float]] = {}
        """The least and the largest excess, by number of rows."""
        self._run: list[float] = []

    def watch(self, newest: float, limit: float) -> None:
        """Track rows far above the level, which may return by themselves."""
        if newest > limit:
            self._run.append(newest)
        elif self._run:
            if len(self._run) > 1:
                self.note(len(self._run), median(np.array(self._run)))
            self._run = []

    def forget_run(self) -> None:
        """Drop the current run, since the level has changed: rows above the old level are no transient."""
        self._run = []

    def note(self, rows: int, excess: float) -> None:
        """Record a transient of this length and excess; the next one of its kind does not alarm."""
        least, most = self._excesses.get(rows, (excess, excess))
        self._excesses[rows] = min(least, excess), max(most, excess)

    def fewest(self, excess: float) -> int:
        """Fewest rows with this excess for an alarm: more than in similar transients seen so far."""
        like = [rows for rows, (least, most) in self._excesses.items() if least / ALIKE < excess < most * ALIKE]
        return max(like, default=int(WINDOWS[0]) - LONGER) + LONGER
