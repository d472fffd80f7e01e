# SPDX-License-Identifier: Apache-2.0
"""Follows the level of one series, row by row: when it becomes slow, changes, and recovers.

Imports numpy and `detector`.

It keeps the rows of the level in force. For each new row it tests whether the last n rows have another level than
earlier rows (`shift_test`). The healthy level, the fastest that lasted, decides what a change means. A slower level is
a finding (`slow_spell`), a faster one becomes the healthy level at once, and a return to the healthy level is a
recovery.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from megatron_resihp.detector.series.level_rows import FEWEST, Array, LevelRows
from megatron_resihp.detector.series.shift_test import ShiftTest
from megatron_resihp.detector.series.slow_spell import SEVERITY_WINDOW, SlowSpell, many, slow_level
from megatron_resihp.detector.series.spread import LONGEST, REFERENCE, WINDOWS, Level, Noise, median, quantile
from megatron_resihp.detector.series.transients import LONGEST_TRANSIENT
from megatron_resihp.detector.verdict import Change

LASTING: Final = 12
"""Rows after which a faster level counts as lasting, if it is farther away than noise."""
LASTING_IN_NOISE: Final = 48
"""Likewise for a level within noise: correlated noise may stay there for a while."""
BEYOND_NOISE: Final = 3.5
"""Standard deviations of one row beyond which a change is more than noise."""
FAMILIES: Final = 4
"""Tests of one row that share the false-alarm probability. Neighbours of the nine windows nearly coincide."""
RESUMED: Final = 5
"""Rows after a restart that decide whether the level is a known one."""
NO_ROWS: Final = np.empty(0)


@dataclass(frozen=True)
class Step:
    """A change of the level.

    Attributes:
        change: what happened.
        excess: the new level relative to the healthy one, log of the ratio of times; 0 after a recovery.
        error: standard error of `excess`.
        rows: how many rows ago the level changed, this row included.
        window: how many rows decided.
        noise: standard deviation of one row.
    """

    change: Change
    excess: float
    error: float
    rows: int
    window: int
    noise: float


@dataclass(frozen=True)
class Before:
    """The state before a restart, kept until it is known whether the healthy level is still the same.

    Attributes:
        healthy: rows of the healthy level.
        spell: the slow spell at that time; None if there was none.
    """

    healthy: Array
    spell: SlowSpell | None


class Follower:
    """Follows one series, with a few hundred numbers of memory."""

    def __init__(self, probability: float, smallest: float) -> None:
        """Start a series without prior knowledge.

        Args:
            probability: accepted probability of a false alarm in one row.
            smallest: smallest slowdown to look for, log of the ratio of times.
        """
        self._noise, self._rows = Noise(), LevelRows()
        self._test = ShiftTest(self._rows, self._noise, probability / FAMILIES, smallest)
        self._spell: SlowSpell | None = None
        self._slower_before = NO_ROWS
        """Rows of the healthy level before a faster level that has not lasted yet."""
        self._lasting = LASTING
        self._restarted: Before | None = None

    # What others ask

    @property
    def slow(self) -> bool:
        """Whether the series is slow."""
        return self._spell is not None

    @property
    def excess(self) -> float:
        """How slow the series is, or was before a restart, log of the ratio of times; 0 if it is not slow."""
        spell = self._spell if self._restarted is None else self._restarted.spell
        return 0.0 if spell is None else spell.excess

    @property
    def judging(self) -> bool:
        """Whether enough rows are known to judge the next one."""
        return self.slow or self._rows.size >= FEWEST + int(WINDOWS[0]) - 1

    def healthy_level(self) -> float:
        """Log of the expected time of the next row; NaN before the first row."""
        if self._spell is not None:
            return self._spell.level.mean
        rows = self._rows.all()[-REFERENCE:]
        if self._test.level is not None:
            return self._test.level.mean
        return median(rows) if rows.size else float("nan")

    def smallest_seen(self, window: int = 16) -> float:
        """Smallest slowdown found within `window` rows, as log of the ratio of times; infinite if unknown."""
        rows = self._rows.all() if self._spell is None else self._spell.healthy
        if rows.size < FEWEST:
            return float("inf")
        rows = rows[-REFERENCE:]
        place = int(np.searchsorted(WINDOWS, window))
        variance, freedom = self._noise.of_differences(self._noise.describe(rows), WINDOWS[: place + 1], many(rows))
        reach = quantile(self._test.probability, int(freedom)) + 1.0
        return max(self._test.smallest, float(reach * np.sqrt(variance[-1])))

    # Input

    def update(self, value: float) -> Step | None:
        """Take in the log of one row's time."""
        self._rows.push(value)
        if self._restarted is not None:
            return self._resume(self._restarted) if self._rows.size == RESUMED else None
        if self._spell is not None:
            return self._while_slow(self._spell)
        shift = self._test.shifted()
        if shift:
            window, level = shift
            if window > 0:
                return self._slower(window, level)
            self._faster(-window, level)
        elif self._test.crept():
            slow, anchor = self._rows.all()[-LONGEST:].copy(), self._test.anchor
            return self._begin(anchor, slow, self._noise.describe(anchor), LONGEST)
        return None

    def restart(self) -> None:
        """The job restarted. Noise and levels stay known; the first rows tell whether the level is a known one.

        If it is not, the level is learned again.
        """
        healthy = self._rows.all()[-REFERENCE:].copy() if self._spell is None else self._spell.healthy
        self._noise.learn(healthy)
        self._restarted = Before(healthy, self._spell) if healthy.size else None
        self._spell, self._slower_before = None, NO_ROWS
        self._rows.clear()
        self._test.fastest = np.inf
        self._test.forget()

    def _resume(self, before: Before) -> Step | None:
        """Check whether the first rows after a restart have a known level."""
        healthy, spell, rows = before.healthy, before.spell, self._rows.all()
        self._restarted = None
        if healthy.size < FEWEST:
            return None
        level = self._noise.describe(healthy)
        shift = median(rows) - level.mean
        if abs(shift) < self._test.limit(level, rows.size, healthy.size)[0]:
            self._test.follow(np.concatenate([healthy, rows]))
            if spell is None:
                return None
            return _step(Change.RECOVERY, self.excess, rows.size, rows.size, level, NO_ROWS, self._noise)
        if spell is not None and shift > spell.excess / 2:
            self._spell = SlowSpell(healthy, level, shift, self._noise, self._test)
            self._test.forget()
        return None

    # What a change means

    def _slower(self, window: int, level: Level) -> Step | None:
        count = self._rows.change_point(level.mean, window, self._test.smallest)
        rows = self._rows.all()
        healthy, slow = rows[:-count].copy(), rows[-count:].copy()
        if self._slower_before.size and self._rows.age - count < self._lasting:
            return self._slower_than_before(healthy, slow, window)
        return self._begin(healthy[-REFERENCE:], slow, level, window)

    def _slower_than_before(self, faster: Array, slow: Array, window: int) -> Step | None:
        """A faster level did not last, so judge the slow rows by the level before it."""
        before, self._slower_before = self._slower_before[-REFERENCE:], NO_ROWS
        noise = faster if self._lasting == LASTING_IN_NOISE else NO_ROWS
        level = self._noise.describe(np.concatenate([before, noise])[-REFERENCE:])
        limit, _ = self._test.limit(level, window, before.size)
        if self._test.exceeds(slow[-window:] - level.mean, limit, level, before - level.mean) > 0:
            return self._begin(before, slow, level, window)
        self._test.follow(np.concatenate([before, noise, slow]))
        return None

    def _begin(self, healthy: Array, slow: Array, level: Level, window: int) -> Step:
        self._noise.learn(healthy)
        self._slower_before = NO_ROWS
        self._test.follow(slow)
        excess = slow_level(slow, level.mean) - level.mean
        self._spell = SlowSpell(healthy, level, excess, self._noise, self._test)
        return _step(Change.ONSET, self.excess, slow.size, window, level, healthy, self._noise)

    def _faster(self, window: int, level: Level) -> None:
        count = self._rows.change_point(level.mean, window, self._test.smallest)
        rows = self._rows.all().copy()
        self._slower_before = rows[:-count]
        distance = level.mean - median(rows[-count:])
        certain = distance > BEYOND_NOISE * float(np.sqrt(level.variance))
        self._lasting = LASTING if certain else LASTING_IN_NOISE
        self._noise.learn(rows[:-count][-REFERENCE:])
        self._test.follow(rows[-count:])
        self._test.fastest = np.inf

    # While it is slow

    def _while_slow(self, spell: SlowSpell) -> Step | None:
        rows = self._rows.all()
        if found := spell.recovered(rows):
            return self._recover(spell, *found)
        spell.measure(rows[-REFERENCE:])
        slow = spell.other_level(rows)
        if slow is None:
            return None
        count = self._rows.change_point(slow, SEVERITY_WINDOW, self._test.smallest)
        self._test.follow(rows[-count:])
        spell.measure(self._rows.all())
        return _step(Change.SEVERITY, self.excess, count, SEVERITY_WINDOW, spell.level, spell.healthy, self._noise)

    def _recover(self, spell: SlowSpell, window: int, slow: float) -> Step:
        rows, healthy = self._rows.all(), spell.level
        count = self._rows.change_point(slow, window, self._test.smallest)
        lasted = self._rows.age - count
        if lasted <= LONGEST_TRANSIENT:
            self._test.transients.note(lasted, slow - healthy.mean)
        elif lasted < LASTING_IN_NOISE and slow - healthy.mean < BEYOND_NOISE * float(np.sqrt(healthy.variance)):
            # It may have been noise; such a distance is no finding the next time.
            self._noise.learn(np.concatenate([spell.healthy[-lasted:], rows]))
        else:
            self._noise.learn(rows[:-count][-REFERENCE:])
        self._spell = None
        self._test.follow(np.concatenate([spell.healthy, rows[-count:].copy()]))
        return _step(Change.RECOVERY, self.excess, count, window, healthy, spell.healthy, self._noise)


def _step(change: Change, excess: float, rows: int, window: int, level: Level, healthy: Array, noise: Noise) -> Step:
    variance, _ = noise.of_differences(level, WINDOWS[:1], many(healthy))
    error = float(np.sqrt(variance[0] * WINDOWS[0] / max(rows, 1)))
    return Step(change, excess, error, rows, window, float(np.sqrt(level.variance)))
