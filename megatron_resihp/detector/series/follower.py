# SPDX-License-Identifier: Apache-2.0
"""Follows the level of one series, row by row: when it becomes slow, changes, and recovers.

Imports numpy, scipy and `detector`.

The rows of the level in force are kept, and each new row asks whether the last n of them have another level than those
before. While few rows are known this is the best split in two levels; the rows under test are never among those that
they are compared with. What a change means is decided by the healthy level, the fastest that has lasted: slower is a
finding, faster becomes the healthy level at once, and as fast again is a recovery.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc

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
    quantile,
)
from megatron_resihp.detector.series.transients import LONGEST_TRANSIENT, Transients
from megatron_resihp.detector.verdict import Change

Array = NDArray[np.float64]
Rows = NDArray[np.int64]

FEWEST: Final = 7
"""Reference rows without which nothing is judged."""
LASTING: Final = 12
"""Rows after which a faster level has lasted, where it is farther away than noise goes."""
LASTING_IN_NOISE: Final = 48
"""And where it is not: correlated noise may stay there for a while."""
BEYOND_NOISE: Final = 3.5
"""So many standard deviations of one row."""
YOUNG: Final = LONGEST + 64
"""Rows of a level up to which each window has reference rows of its own."""
KEPT: Final = REFERENCE + 2 * LONGEST
REFRESH: Final = 8
MAJORITY: Final = 0.6
"""So many of the rows under test have to lie beyond half of the threshold, three at least: stalls do not."""
FAMILIES: Final = 4
"""Tests of one row that the probability of a false alarm is shared by. There are two sides of nine windows, but those
of neighbouring windows nearly coincide."""
CREEP: Final = 0.05
"""So far it goes only in a device that is slow."""
TAIL: Final = 10.0
"""How much likelier than a false alarm it may be that healthy rows lie where those under test do, by their tail."""
TELLING: Final = 6
"""So many rows under test tell of the noise, too."""
SMALLEST_SEVERITY: Final = 0.04
RECOVERY_PROBABILITY: Final = 1e-4
"""Of one window to say that a level has ended which has not."""
ABOVE_LIMIT: Final = 1.5
RESUMED: Final = 5
"""Rows after a restart that tell whether the level is a known one."""
LOOK: Final = 1.4
"""Standard errors from the level at which rows are worth a test."""


@dataclass(frozen=True)
class Step:
    """The level changed.

    Attributes:
        change: what happened.
        excess: the new level against the healthy one, log of the ratio of times; 0 when recovered.
        error: its standard error.
        rows: how many rows ago it changed, this one included.
        window: how many rows decided.
        noise: standard deviation of one row.
    """

    change: Change
    excess: float
    error: float
    rows: int
    window: int
    noise: float


class Follower:
    """One series. Memory: some hundred numbers.

    Attributes:
        slow: whether it is slow.
        excess: by how much, log of the ratio of times.
    """

    def __init__(self, probability: float, smallest: float) -> None:
        """A series that nothing is known of.

        Args:
            probability: of a false alarm in one row that is accepted.
            smallest: slow-downs below it are not looked for, log of the ratio of times.
        """
        self._probability, self._smallest = probability / FAMILIES, smallest
        self._noise = Noise()
        self._transients = Transients()
        self.slow = False
        self.excess = 0.0
        self._rows = np.empty(4 * KEPT)
        self._size = 0
        self._age = 0
        """Rows since the level in force began."""
        self._healthy = np.empty(0)
        """Rows of the healthy level while it is not in force."""
        self._before = np.empty(0)
        """Rows of the healthy level before a faster one that has not lasted yet."""
        self._lasting = LASTING
        self._first_excess = 0.0
        self._fastest = np.inf
        self._earlier = np.empty(0)
        """Rows of the healthy level before a restart, until it is known whether it is the present one."""
        self._was_slow = False
        self._forget()

    # What others ask

    @property
    def judging(self) -> bool:
        """Whether there are enough rows for the next one to be judged."""
        return self.slow or self._size >= FEWEST + int(WINDOWS[0]) - 1

    def healthy_level(self) -> float:
        """Log of the time that the next row should take; NaN before the first row."""
        if self.slow:
            return self._healthy_level.mean
        rows = self._current()[-REFERENCE:]
        if self._level is not None:
            return self._level.mean
        return (median(rows)) if rows.size else float("nan")

    def smallest_seen(self, window: int = 16) -> float:
        """The slow-down that would be found within so many rows, as log of the ratio of times; infinite if none."""
        rows = self._healthy if self.slow else self._current()
        if rows.size < FEWEST:
            return float("inf")
        rows = rows[-REFERENCE:]
        place = int(np.searchsorted(WINDOWS, window))
        variance, freedom = self._noise.of_differences(self._noise.describe(rows), WINDOWS[: place + 1], _many(rows))
        reach = quantile(self._probability, int(freedom)) + 1.0
        return max(self._smallest, float(reach * np.sqrt(variance[-1])))

    # Input

    def update(self, value: float) -> Step | None:
        """Take in the log of one row's time."""
        self._push(value)
        if self._earlier.size:
            return self._resume() if self._size == RESUMED else None
        if self.slow:
            return self._while_slow()
        shift = self._shifted()
        if shift:
            window, level = shift
            if window > 0:
                return self._slower(window, level)
            self._faster(-window, level)
        elif self._age >= YOUNG:
            return self._crept()
        return None

    def restart(self) -> None:
        """The job has been started anew. Noise and levels stay known; whether this level is one of them, the first
        rows tell. If it is another one, it is learned anew."""
        self._earlier = self._healthy if self.slow else self._current()[-REFERENCE:].copy()
        self._noise.learn(self._earlier)
        self._was_slow, self.slow = self.slow, False
        self._size = self._age = 0
        self._healthy = self._before = np.empty(0)
        self._fastest = np.inf
        self._forget()

    def _resume(self) -> Step | None:
        """The first rows after a restart: are they of a level that is known?"""
        earlier, rows = self._earlier, self._current()
        self._earlier = np.empty(0)
        excess, self.excess = self.excess, 0.0
        if earlier.size < FEWEST:
            return None
        level = self._noise.describe(earlier)
        shift = median(rows) - level.mean
        if abs(shift) < self._limit(level, rows.size, earlier.size)[0]:
            self._set(np.concatenate([earlier, rows]))
            return self._step(Change.RECOVERY, rows.size, rows.size, level) if self._was_slow else None
        if self._was_slow and shift > excess / 2:
            self.slow, self.excess, self._first_excess, self._healthy = True, shift, shift, earlier
            self._healthy_level = level
            self._forget()
        return None

    # Rows

    def _push(self, value: float) -> None:
        if self._size == self._rows.size:
            self._rows[:KEPT] = self._rows[self._size - KEPT :]
            self._size = KEPT
        self._rows[self._size] = value
        self._size += 1
        self._age += 1

    def _current(self) -> Array:
        return self._rows[: self._size]

    def _set(self, rows: Array) -> None:
        """These are the rows of the level in force."""
        rows = rows[-KEPT:].copy()
        self._rows[: rows.size] = rows
        self._size = self._age = rows.size
        self._forget()

    def _forget(self) -> None:
        self._level: Level | None = None
        self._limits = np.empty(0)
        self._refresh_in = 0
        self._transients.forget_run()
        self._pending: list[Array] = []
        self._reference = np.empty(0)

    # The test

    def _shifted(self) -> tuple[int, Level] | None:
        """The shortest window whose rows have another level than those before, negative if faster, and that level."""
        return self._young() if self._age < YOUNG else self._mature()

    def _young(self) -> tuple[int, Level] | None:
        rows = self._current()
        for window in WINDOWS.tolist():
            rest, tested = rows[: rows.size - window][-REFERENCE:], rows[-window:]
            if rest.size < FEWEST:
                break
            if not self._worth_a_look(rest, tested):
                continue
            level = self._noise.describe(rest, tested if window >= TELLING else None)
            limit, reference = self._limit(level, window, rest.size)
            level = replace(level, mean=centred(rest[-reference:])[0])
            if found := self._exceeds(tested - level.mean, limit, level, rest - level.mean):
                return found, level
        return None

    def _worth_a_look(self, rest: Array, tested: Array) -> bool:
        """Whether the rows under test are far enough from those before that a test may find something."""
        middle = median(rest)
        spread = 1.4826 * median(np.abs(rest - middle))
        near = median(rest[-int(REFERENCES[0]) :])
        distance = max(abs(median(tested) - middle), abs(median(tested) - near))
        return distance > max(LOOK * spread / float(np.sqrt(tested.size)), self._smallest / 2)

    def _limit(self, level: Level, window: int, known: int) -> tuple[float, int]:
        windows = WINDOWS[: int(WINDOWS.searchsorted(window)) + 1]
        limits, references = self._all_limits(level, windows, known)
        return float(limits[-1]), int(references[-1])

    def _all_limits(self, level: Level, windows: Rows, known: int) -> tuple[Array, Rows]:
        limits, references = drift_and_noise(self._noise, level, windows, known, self._probability)
        return np.maximum(self._smallest, limits), references

    def _mature(self) -> tuple[int, Level] | None:
        if self._refresh_in <= 0:
            self._refresh()
        self._refresh_in -= 1
        assert self._level is not None
        level = self._level
        newest = self._rows[max(self._size - LONGEST - REFERENCE, 0) : self._size][::-1] - level.mean
        reach = self._reach(level, float(self._limits[0]))
        sums = np.minimum(np.maximum(newest, -reach), reach).cumsum()
        ends = sums[WINDOWS - 1]
        before = (sums[WINDOWS + self._references - 1] - ends) / self._references
        difference = ends / WINDOWS - before
        self._pending.append(difference)
        self._transients.watch(float(newest[0]), float(self._limits[0]))
        beyond = np.abs(difference) > self._limits
        if not beyond.any():
            return None
        for place in np.flatnonzero(beyond).tolist():
            tested = newest[: int(WINDOWS[place])] - before[place]
            if found := self._exceeds(tested, float(self._limits[place]), level, self._reference):
                return found, replace(level, mean=level.mean + float(before[place]))
        return None

    def _refresh(self) -> None:
        self._refresh_in = REFRESH
        reference = self._current()[-KEPT:-LONGEST][-REFERENCE:]
        if len(self._pending) >= LONGEST + REFRESH:
            old, self._pending = self._pending[:-LONGEST], self._pending[-LONGEST:]
            self._noise.learn_differences(np.stack(old))
        if self._age % REFERENCE < REFRESH and self._age >= LONGEST + REFERENCE:
            self._noise.learn(reference)
        self._level = self._noise.describe(reference)
        self._reference = self._current()[-KEPT:-LONGEST] - self._level.mean
        self._limits, self._references = self._all_limits(self._level, WINDOWS, min(self._size - LONGEST, REFERENCE))
        if self._level.mean < self._fastest and self._age >= YOUNG:
            self._fastest = self._level.mean
            self._anchor = reference.copy()

    def _reach(self, level: Level, limit: float) -> float:
        """Where rows are clipped before their mean is taken, so that it can still exceed the limit."""
        return max(2 * self._smallest, CLIP * float(np.sqrt(level.variance)), ABOVE_LIMIT * limit)

    def _exceeds(self, newest: Array, limit: float, level: Level, reference: Array) -> int:
        """The number of rows if their mean exceeds the limit and most of them do their part, negative if below."""
        reach = self._reach(level, limit)
        mean = float(np.clip(newest, -reach, reach).mean())
        if abs(mean) <= limit:
            return 0
        sign = 1 if mean > 0 else -1
        half = max(limit, sign * median(newest)) / 2
        beyond = int((sign * newest > half).sum())
        fewest = self._transients.fewest(median(newest)) if sign > 0 else int(WINDOWS[0])
        if beyond < max(fewest, MAJORITY * newest.size):
            return 0
        # The tail as it was seen, one more row of it assumed: so many of n rows by chance?
        share = ((sign * reference > half).sum() + 1.0) / (reference.size + 1.0)
        chance = float(bdtrc(beyond - 1, newest.size, share))
        return sign * newest.size if chance <= TAIL * self._probability else 0

    def _change_point(self, level: float, window: int) -> int:
        """How many of the newest rows have another level, by maximum likelihood."""
        rows = self._current()
        size = min(rows.size - min(FEWEST, rows.size - window), LONGEST + REFRESH)
        newest = rows[::-1][: max(size, window)] - level
        reach = max(2 * self._smallest, 2 * abs(median(newest[:window])))
        sums = np.cumsum(np.clip(newest, -reach, reach))
        return int((sums**2 / np.arange(1, sums.size + 1)).argmax()) + 1

    # What a change means

    def _slower(self, window: int, level: Level) -> Step | None:
        count = self._change_point(level.mean, window)
        rows = self._current()
        healthy, slow = rows[:-count].copy(), rows[-count:].copy()
        if self._before.size and self._age - count < self._lasting:
            return self._slower_than_before(healthy, slow, window)
        return self._begin(healthy[-REFERENCE:], slow, level, window)

    def _slower_than_before(self, faster: Array, slow: Array, window: int) -> Step | None:
        """What was faster has not lasted: what came before it tells what is slow."""
        before, self._before = self._before[-REFERENCE:], np.empty(0)
        noise = faster if self._lasting == LASTING_IN_NOISE else np.empty(0)
        level = self._noise.describe(np.concatenate([before, noise])[-REFERENCE:])
        limit, _ = self._limit(level, window, before.size)
        if self._exceeds(slow[-window:] - level.mean, limit, level, before - level.mean) > 0:
            return self._begin(before, slow, level, window)
        self._set(np.concatenate([before, noise, slow]))
        return None

    def _begin(self, healthy: Array, slow: Array, level: Level, window: int) -> Step:
        self._noise.learn(healthy)
        self._healthy, self._before = healthy, np.empty(0)
        self._healthy_level = level
        self._set(slow)
        self.slow = True
        self.excess = self._first_excess = self._slow_level(slow, level.mean) - level.mean
        return self._step(Change.ONSET, slow.size, window, level)

    def _step(self, change: Change, rows: int, window: int, level: Level) -> Step:
        variance, _ = self._noise.of_differences(level, WINDOWS[:1], _many(self._healthy))
        error = float(np.sqrt(variance[0] * WINDOWS[0] / max(rows, 1)))
        return Step(change, self.excess, error, rows, window, float(np.sqrt(level.variance)))

    @staticmethod
    def _slow_level(slow: Array, healthy: float) -> float:
        """The mean of slow rows; single stalls among them do not count in full."""
        middle = median(slow)
        reach = max(abs(middle - healthy), 0.05)
        return float(np.clip(slow, middle - reach, middle + reach).mean())

    def _faster(self, window: int, level: Level) -> None:
        count = self._change_point(level.mean, window)
        rows = self._current().copy()
        self._before = rows[:-count]
        distance = level.mean - median(rows[-count:])
        certain = distance > BEYOND_NOISE * float(np.sqrt(level.variance))
        self._lasting = LASTING if certain else LASTING_IN_NOISE
        self._noise.learn(rows[:-count][-REFERENCE:])
        self._set(rows[-count:])
        self._fastest = np.inf

    def _crept(self) -> Step | None:
        """The level has gone up too slowly for any window."""
        assert self._level is not None
        if self._level.mean - self._fastest < CREEP:
            return None
        limit = FARTHEST_DRIFT + float(self._limits[-1])
        newest = self._current()[-LONGEST:] - self._fastest
        if self._exceeds(newest, limit, self._level, self._anchor - self._fastest) <= 0:
            return None
        slow = self._current()[-LONGEST:].copy()
        return self._begin(self._anchor, slow, self._noise.describe(self._anchor), LONGEST)

    def _while_slow(self) -> Step | None:
        rows = self._current()
        healthy = self._healthy_level
        if median(rows[-3:]) - healthy.mean < 0.8 * self.excess and (found := self._recovered(rows, healthy)):
            return found
        self.excess = self._slow_level(rows[-REFERENCE:], healthy.mean) - healthy.mean
        return self._severity(rows, healthy)

    def _recovered(self, rows: Array, healthy: Level) -> Step | None:
        variance, freedom = self._noise.of_differences(healthy, WINDOWS, _many(self._healthy))
        z = quantile(RECOVERY_PROBABILITY, int(freedom))
        for place, window in enumerate(WINDOWS.tolist()):
            rest = rows[: rows.size - window][-REFERENCE:]
            if rest.size < 1:
                break
            slow = self._slow_level(rest, healthy.mean)
            excess = max(slow - healthy.mean, self._smallest)
            newest = rows[-window:] - healthy.mean
            reach = max(excess, self._reach(healthy, 0.0))
            mean = float(np.clip(newest, -reach, excess + reach).mean())
            error = float(np.sqrt(variance[place] + healthy.variance / min(rest.size, 16)))
            below = int((newest < excess / 2).sum())
            near = mean < max(0.25 * excess, min(2 * error, 0.45 * excess))
            if near and excess - mean > z * error and below >= max(3, MAJORITY * window):
                return self._recover(rows, window, slow, healthy)
        if rows.size >= 24:
            newest = rows[-16:] - healthy.mean
            if (median(newest)) < max(0.5 * self._smallest, 0.2 * self._first_excess):
                return self._recover(rows, 16, self._first_excess + healthy.mean, healthy)
        return None

    def _recover(self, rows: Array, window: int, slow: float, healthy: Level) -> Step:
        count = self._change_point(slow, window)
        lasted = self._age - count
        if lasted <= LONGEST_TRANSIENT:
            self._transients.note(lasted, slow - healthy.mean)
        elif lasted < LASTING_IN_NOISE and slow - healthy.mean < BEYOND_NOISE * float(np.sqrt(healthy.variance)):
            # It may have been the noise: the next time such a distance is no finding.
            self._noise.learn(np.concatenate([self._healthy[-lasted:], rows]))
        else:
            self._noise.learn(rows[:-count][-REFERENCE:])
        self.slow, self.excess = False, 0.0
        newest = rows[-count:].copy()
        self._set(np.concatenate([self._healthy, newest]))
        return self._step(Change.RECOVERY, count, window, healthy)

    def _severity(self, rows: Array, healthy: Level) -> Step | None:
        """Another level than this slow one, and not the healthy one."""
        window = 8
        rest = rows[:-window][-REFERENCE:]
        if rest.size < 4:
            return None
        slow = self._slow_level(rest, healthy.mean)
        newest = rows[-window:] - slow
        variance, freedom = self._noise.of_differences(healthy, WINDOWS[:5], _many(self._healthy))
        error = np.sqrt(float(variance[-1]) + healthy.variance / min(rest.size, 16))
        limit = max(SMALLEST_SEVERITY, quantile(self._probability, int(freedom)) * float(error))
        mean = median(newest)
        if abs(mean) < limit or (np.sign(mean) * newest > limit / 2).sum() < 6:
            return None
        count = self._change_point(slow, window)
        self._set(rows[-count:])
        self.excess = self._slow_level(self._current(), healthy.mean) - healthy.mean
        return self._step(Change.SEVERITY, count, window, healthy)


def _many(rows: Array) -> Rows:
    return np.array([min(max(rows.size, 1), REFERENCE)])
