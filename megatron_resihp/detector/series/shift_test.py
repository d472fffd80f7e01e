# SPDX-License-Identifier: Apache-2.0
"""Tests whether the newest rows of a series have another level than earlier rows. Imports numpy, scipy and this
package.

While few rows are known, the test uses the best split into two levels. The rows under test are never among their
reference rows.
"""

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc

from megatron_resihp.detector.series.level_rows import FEWEST, KEPT, REFRESH, Array, LevelRows
from megatron_resihp.detector.series.limits import FARTHEST_DRIFT, REFERENCES, drift_and_noise
from megatron_resihp.detector.series.spread import (
    CLIP,
    LONGEST,
    REFERENCE,
    WINDOWS,
    Level,
    Noise,
    centred,
    median,
)
from megatron_resihp.detector.series.transients import Transients

Rows = NDArray[np.int64]

YOUNG: Final = LONGEST + 64
"""Most rows of a level for which each window has reference rows of its own."""
MAJORITY: Final = 0.6
"""Share of the rows under test, and at least three, that must lie beyond half the threshold; stalls do not reach it."""
TAIL: Final = 10.0
"""Largest ratio of the chance that healthy rows lie there, by their tail, to the false-alarm probability."""
TELLING: Final = 6
"""Fewest rows under test that also count for the noise estimate."""
ABOVE_LIMIT: Final = 1.5
CREEP: Final = 0.05
"""Slow rise of the level that only a slow device shows."""
LOOK: Final = 1.4
"""Standard errors from the level beyond which rows are tested."""


class ShiftTest:
    """Tests the newest rows of one series.

    Args:
        rows: of the level in force.
        noise: the series' noise estimate.
        probability: of a false alarm in one row, for each family of tests.
        smallest: smallest slowdown to look for, log of the ratio of times.

    Attributes:
        transients: short spells that ended by themselves.
        level: estimate of the level in force; None before the first one.
        limits: largest distance of each window's mean from it.
        fastest, anchor: the fastest mean that the level in force has had, and its rows.
    """

    anchor: Array

    def __init__(self, rows: LevelRows, noise: Noise, probability: float, smallest: float) -> None:
        self._rows, self._noise = rows, noise
        self.probability, self.smallest = probability, smallest
        self.transients = Transients()
        self.fastest = np.inf
        self.forget()

    def forget(self) -> None:
        """Drop all estimates, as another level is in force."""
        self.level: Level | None = None
        self.limits = np.empty(0)
        self._references: Rows = np.empty(0, dtype=np.int64)
        self._refresh_in = 0
        self.transients.forget_run()
        self._pending: list[Array] = []
        self._reference = np.empty(0)

    def follow(self, rows: Array) -> None:
        """Make these the rows of the level in force."""
        self._rows.set(rows)
        self.forget()

    def crept(self) -> bool:
        """Whether the level has risen from the `anchor` too slowly for any window; the LONGEST newest rows decide."""
        if self._rows.age < YOUNG or self.level is None or self.level.mean - self.fastest < CREEP:
            return False
        limit = FARTHEST_DRIFT + float(self.limits[-1])
        newest = self._rows.all()[-LONGEST:] - self.fastest
        return self.exceeds(newest, limit, self.level, self.anchor - self.fastest) > 0

    def shifted(self) -> tuple[int, Level] | None:
        """The shortest window whose rows have another level, negative if faster, and the level before; or None."""
        return self._young() if self._rows.age < YOUNG else self._mature()

    def _young(self) -> tuple[int, Level] | None:
        rows = self._rows.all()
        for window in WINDOWS.tolist():
            rest, tested = rows[: rows.size - window][-REFERENCE:], rows[-window:]
            if rest.size < FEWEST:
                break
            if not self._worth_a_look(rest, tested):
                continue
            level = self._noise.describe(rest, tested if window >= TELLING else None)
            limit, reference = self.limit(level, window, rest.size)
            level = replace(level, mean=centred(rest[-reference:])[0])
            if found := self.exceeds(tested - level.mean, limit, level, rest - level.mean):
                return found, level
        return None

    def _worth_a_look(self, rest: Array, tested: Array) -> bool:
        """Whether the rows under test are far enough from earlier rows for a test to find something."""
        middle = median(rest)
        spread = 1.4826 * median(np.abs(rest - middle))
        near = median(rest[-int(REFERENCES[0]) :])
        distance = max(abs(median(tested) - middle), abs(median(tested) - near))
        return distance > max(LOOK * spread / float(np.sqrt(tested.size)), self.smallest / 2)

    def limit(self, level: Level, window: int, known: int) -> tuple[float, int]:
        """The largest distance of a window's mean from a level, and the number of reference rows.

        Args:
            known: number of reference rows available.
        """
        windows = WINDOWS[: int(WINDOWS.searchsorted(window)) + 1]
        limits, references = self._all_limits(level, windows, known)
        return float(limits[-1]), int(references[-1])

    def _all_limits(self, level: Level, windows: Rows, known: int) -> tuple[Array, Rows]:
        limits, references = drift_and_noise(self._noise, level, windows, known, self.probability)
        return np.maximum(self.smallest, limits), references

    def _mature(self) -> tuple[int, Level] | None:
        if self._refresh_in <= 0:
            self._refresh()
        self._refresh_in -= 1
        assert self.level is not None
        level = self.level
        newest = self._rows.newest(LONGEST + REFERENCE) - level.mean
        reach = self.reach(level, float(self.limits[0]))
        sums = np.minimum(np.maximum(newest, -reach), reach).cumsum()
        ends = sums[WINDOWS - 1]
        before = (sums[WINDOWS + self._references - 1] - ends) / self._references
        difference = ends / WINDOWS - before
        self._pending.append(difference)
        self.transients.watch(float(newest[0]), float(self.limits[0]))
        beyond = np.abs(difference) > self.limits
        if not beyond.any():
            return None
        for place in np.flatnonzero(beyond).tolist():
            tested = newest[: int(WINDOWS[place])] - before[place]
            if found := self.exceeds(tested, float(self.limits[place]), level, self._reference):
                return found, replace(level, mean=level.mean + float(before[place]))
        return None

    def _refresh(self) -> None:
        self._refresh_in = REFRESH
        reference = self._rows.all()[-KEPT:-LONGEST][-REFERENCE:]
        if len(self._pending) >= LONGEST + REFRESH:
            old, self._pending = self._pending[:-LONGEST], self._pending[-LONGEST:]
            self._noise.learn_differences(np.stack(old))
        if self._rows.age % REFERENCE < REFRESH and self._rows.age >= LONGEST + REFERENCE:
            self._noise.learn(reference)
        self.level = self._noise.describe(reference)
        self._reference = self._rows.all()[-KEPT:-LONGEST] - self.level.mean
        self.limits, self._references = self._all_limits(self.level, WINDOWS, min(self._rows.size - LONGEST, REFERENCE))
        if self.level.mean < self.fastest and self._rows.age >= YOUNG:
            self.fastest = self.level.mean
            self.anchor = reference.copy()

    def reach(self, level: Level, limit: float) -> float:
        """The distance at which rows are clipped before averaging; the mean can still exceed the limit."""
        return max(2 * self.smallest, CLIP * float(np.sqrt(level.variance)), ABOVE_LIMIT * limit)

    def exceeds(self, newest: Array, limit: float, level: Level, reference: Array) -> int:
        """The number of rows if their mean exceeds the limit and most rows contribute, negative if below; 0 if not."""
        reach = self.reach(level, limit)
        mean = float(np.clip(newest, -reach, reach).mean())
        if abs(mean) <= limit:
            return 0
        sign = 1 if mean > 0 else -1
        half = max(limit, sign * median(newest)) / 2
        beyond = int((sign * newest > half).sum())
        fewest = self.transients.fewest(median(newest)) if sign > 0 else int(WINDOWS[0])
        if beyond < max(fewest, MAJORITY * newest.size):
            return 0
        # The tail as seen, plus one assumed row: how likely are so many of n rows by chance?
        share = ((sign * reference > half).sum() + 1.0) / (reference.size + 1.0)
        chance = float(bdtrc(beyond - 1, newest.size, share))
        return sign * newest.size if chance <= TAIL * self.probability else 0
