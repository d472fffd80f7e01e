# SPDX-License-Identifier: Apache-2.0
"""What is slow for a few rows and ends by itself, and comes again: stalls, saves, evaluations. Imports this package."""

from typing import Final

import numpy as np

from megatron_resihp.detector.series.spread import WINDOWS, median

LONGEST_TRANSIENT: Final = 8
"""What ends by itself within so many rows was no slow-down of a device; the next like it does not alarm."""
LONGER: Final = 2
"""So many rows more than in a transient have to be slow."""
ALIKE: Final = 3.0
"""Transients whose excesses differ by at most this factor are alike."""


class Transients:
    """Those of one series."""

    def __init__(self) -> None:
        self._excesses: dict[int, tuple[float, float]] = {}
        """The least and the largest, by how many rows they lasted."""
        self._run: list[float] = []

    def watch(self, newest: float, limit: float) -> None:
        """Rows far above the level may end by themselves."""
        if newest > limit:
            self._run.append(newest)
        elif self._run:
            if len(self._run) > 1:
                self.note(len(self._run), median(np.array(self._run)))
            self._run = []

    def forget_run(self) -> None:
        """The level is another one: what was above the old one is no transient."""
        self._run = []

    def note(self, rows: int, excess: float) -> None:
        """So many rows were slow by so much and no device was: the next of that kind does not alarm."""
        least, most = self._excesses.get(rows, (excess, excess))
        self._excesses[rows] = min(least, excess), max(most, excess)

    def fewest(self, excess: float) -> int:
        """Rows that have to be slow by so much: more than in the transients like it that were seen."""
        like = [rows for rows, (least, most) in self._excesses.items() if least / ALIKE < excess < most * ALIKE]
        return max(like, default=int(WINDOWS[0]) - LONGER) + LONGER
