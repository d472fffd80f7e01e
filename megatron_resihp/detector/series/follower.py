"""Follows the level of one series, row by row: when it becomes slow, changes, and recovers.

Imports numpy, scipy and `detector`.

The rows of the level in force are kept, and each new row asks whether the last n of them have another level than those
before. While few rows are known this is the best split in two levels; the rows under test are never among those that
they are compared with. What a change means is decided by the healthy level, the fastest that has lasted: slower is a
finding, faster becomes the healthy level at once, and as fast again is a recovery.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc

from megatron_resihp.detector.series.spread import CLIP, LONGEST, REFERENCE, WINDOWS, Level, Noise, median, quantile
from megatron_resihp.detector.verdict import Change

Array = NDArray[np.float64]

FEWEST: Final = 7
"""Reference rows without which nothing is judged."""
LASTING: Final = 12
"""Rows after which a faster level has lasted."""
YOUNG: Final = LONGEST + 24
"""Rows of a level up to which each window has reference rows of its own."""
KEPT: Final = REFERENCE + 2 * LONGEST
REFRESH: Final = 8
MAJORITY: Final = 0.6
"""So many of the rows under test have to lie beyond half of the threshold, three at least: stalls do not."""
FARTHEST_DRIFT: Final = 0.02
"""How far the healthy level may drift from the fastest that lasted."""
FAMILIES: Final = 3
"""Tests of one row that the probability of a false alarm is shared by. There are two sides of nine windows, but those
of neighbouring windows nearly coincide."""
DRIFT_ROWS: Final = 60
"""In so many rows it may go that far."""
TAIL: Final = 10.0
"""How much likelier than a false alarm it may be that healthy rows lie where those under test do, by their tail."""
SMALLEST_SEVERITY: Final = 0.04
RECOVERY_PROBABILITY: Final = 1e-4
"""Of one window to say that a level has ended which has not."""
ABOVE_LIMIT: Final = 1.5
RESUMED: Final = 5
"""Rows after a restart that tell whether the level is a known one."""
LOOK: Final = 0.8
"""Standard deviations from the level at which a few rows are worth a test."""
LONGEST_TRANSIENT: Final = 8
"""What ends by itself within so many rows was no slow-down of a device; the next like it does not alarm."""
LONGER: Final = 2
"""So many rows more than in a transient have to be slow."""
ALIKE: Final = 3.0
"""Transients whose excesses differ by at most this factor are alike."""


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
        self._transients: dict[int, tuple[float, float]] = {}
        """The least and the largest excess of transients, by how many rows they lasted."""
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
        rows = self._healthy if self.slow else self._current()[-REFERENCE:]
        if not self.slow and self._level is not None:
            return self._level.mean
        return (median(rows)) if rows.size else float("nan")

    def smallest_seen(self, window: int = 16) -> float:
        """The slow-down that would be found within so many rows, as log of the ratio of times; infinite if none."""
        rows = self._healthy if self.slow else self._current()
        if rows.size < FEWEST:
            return float("inf")
        level = self._noise.describe(rows[-REFERENCE:])
        place = int(np.searchsorted(WINDOWS, window))
        variance, freedom = self._noise.of_differences(level, WINDOWS[: place + 1])
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
        window = self._shifted()
        if window > 0:
            return self._slower(window)
        if window < 0:
            self._faster(-window)
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
        if abs(shift) < self._limit(level, rows.size):
            self._set(np.concatenate([earlier, rows]))
            return self._step(Change.RECOVERY, rows.size, rows.size, level) if self._was_slow else None
        if self._was_slow and shift > excess / 2:
            self.slow, self.excess, self._first_excess, self._healthy = True, shift, shift, earlier
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
        self._run: list[float] = []
        self._pending: list[Array] = []
        self._reference = np.empty(0)

    # The test

    def _shifted(self) -> int:
        """The shortest window whose rows have another level than those before, negative if faster; 0 if none has."""
        return self._young() if self._age < YOUNG else self._mature()

    def _young(self) -> int:
        rows = self._current()
        if not self._worth_a_look(rows):
            return 0
        for window in WINDOWS.tolist():
            rest = rows[: rows.size - window]
            if rest.size < FEWEST:
                break
            level = self._noise.describe(rest[-REFERENCE:])
            limit = self._limit(level, window)
            if found := self._exceeds(rows[-window:] - level.mean, limit, level, rest - level.mean):
                return found
        return 0

    def _worth_a_look(self, rows: Array) -> bool:
        """Whether the newest rows are far enough from those before that a test may find something."""
        few = int(WINDOWS[0])
        rest = rows[:-few][-REFERENCE:]
        if rest.size < FEWEST:
            return False
        middle = median(rest)
        spread = 1.4826 * median(np.abs(rest - middle))
        return abs(median(rows[-few:]) - middle) > max(LOOK * spread, self._smallest / 2)

    def _limit(self, level: Level, window: int) -> float:
        place = int(np.searchsorted(WINDOWS, window))
        return float(self._all_limits(level, WINDOWS[: place + 1], 0)[-1])

    def _all_limits(self, level: Level, windows: Array, gap: int) -> Array:
        """What D(n) has to exceed, with so many rows between the reference and the longest window's last row."""
        variance, freedom = self._noise.of_differences(level, windows)
        apart = level.rows / 2 + np.maximum(windows / 2, gap - windows / 2)
        drift = FARTHEST_DRIFT * np.minimum(apart / DRIFT_ROWS, 1.0)
        return np.maximum(self._smallest, drift + quantile(self._probability, int(freedom)) * np.sqrt(variance))

    def _watch_transient(self, newest: float, limit: float) -> None:
        """Rows far above the level may end by themselves."""
        if newest > limit:
            self._run.append(newest)
        elif self._run:
            if len(self._run) > 1:
                self._note_transient(len(self._run), median(np.array(self._run)))
            self._run = []

    def _note_transient(self, rows: int, excess: float) -> None:
        """So many rows were slow by so much and no device was: the next of that kind does not alarm."""
        least, most = self._transients.get(rows, (excess, excess))
        self._transients[rows] = min(least, excess), max(most, excess)

    def _fewest(self, excess: float) -> int:
        """Rows that have to be slow by so much: more than in the transients like it that were seen."""
        like = [rows for rows, (least, most) in self._transients.items() if least / ALIKE < excess < most * ALIKE]
        return max(like, default=int(WINDOWS[0]) - LONGER) + LONGER

    def _mature(self) -> int:
        if self._refresh_in <= 0:
            self._refresh()
        self._refresh_in -= 1
        assert self._level is not None
        newest = self._rows[self._size - LONGEST : self._size][::-1] - self._level.mean
        reach = self._reach(self._level, float(self._limits[0]))
        difference = np.minimum(np.maximum(newest, -reach), reach).cumsum()[WINDOWS - 1] / WINDOWS
        self._pending.append(difference)
        self._watch_transient(float(newest[0]), float(self._limits[0]))
        beyond = np.abs(difference) > self._limits
        if not beyond.any():
            return 0
        for place in np.flatnonzero(beyond).tolist():
            window = int(WINDOWS[place])
            if found := self._exceeds(newest[:window], float(self._limits[place]), self._level, self._reference):
                return found
        return 0

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
        self._limits = self._all_limits(self._level, WINDOWS, LONGEST)
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
        fewest = self._fewest(median(newest)) if sign > 0 else int(WINDOWS[0])
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

    def _reference_for(self, window: int) -> Level:
        rows = self._current()
        return self._noise.describe(rows[: rows.size - window][-REFERENCE:])

    def _slower(self, window: int) -> Step | None:
        level = self._level or self._reference_for(window)
        count = self._change_point(level.mean, window)
        rows = self._current()
        healthy, slow = rows[:-count].copy(), rows[-count:].copy()
        if self._before.size and self._age - count < LASTING:
            # What was faster has not lasted.
            self._set(np.concatenate([self._before, slow]))
            self._before = np.empty(0)
            return None
        return self._begin(healthy[-REFERENCE:], slow, level, window)

    def _begin(self, healthy: Array, slow: Array, level: Level, window: int) -> Step:
        self._noise.learn(healthy)
        self._healthy, self._before = healthy, np.empty(0)
        self._set(slow)
        self.slow = True
        self.excess = self._first_excess = self._slow_level(slow, level.mean) - level.mean
        return self._step(Change.ONSET, slow.size, window, level)

    def _step(self, change: Change, rows: int, window: int, level: Level) -> Step:
        variance, _ = self._noise.of_differences(level, WINDOWS[:1])
        error = float(np.sqrt(variance[0] * WINDOWS[0] / max(rows, 1)))
        return Step(change, self.excess, error, rows, window, float(np.sqrt(level.variance)))

    @staticmethod
    def _slow_level(slow: Array, healthy: float) -> float:
        """The mean of slow rows; single stalls among them do not count in full."""
        middle = median(slow)
        reach = max(abs(middle - healthy), 0.05)
        return float(np.clip(slow, middle - reach, middle + reach).mean())

    def _faster(self, window: int) -> None:
        level = self._level or self._reference_for(window)
        count = self._change_point(level.mean, window)
        rows = self._current().copy()
        self._before = rows[:-count]
        self._noise.learn(rows[:-count][-REFERENCE:])
        self._set(rows[-count:])
        self._fastest = np.inf

    def _crept(self) -> Step | None:
        """The level has gone up too slowly for any window."""
        assert self._level is not None
        if self._level.mean - self._fastest < FARTHEST_DRIFT + self._smallest:
            return None
        limit = FARTHEST_DRIFT + float(self._limits[-1])
        newest = self._current()[-LONGEST:] - self._fastest
        if self._exceeds(newest, limit, self._level, self._anchor - self._fastest) <= 0:
            return None
        slow = self._current()[-LONGEST:].copy()
        return self._begin(self._anchor, slow, self._noise.describe(self._anchor), LONGEST)

    def _while_slow(self) -> Step | None:
        rows = self._current()
        if self._level is None:
            self._level = self._noise.describe(self._healthy)
        healthy = self._level
        if median(rows[-3:]) - healthy.mean < 0.8 * self.excess and (found := self._recovered(rows, healthy)):
            return found
        self.excess = self._slow_level(rows[-REFERENCE:], healthy.mean) - healthy.mean
        return self._severity(rows, healthy)

    def _recovered(self, rows: Array, healthy: Level) -> Step | None:
        variance, freedom = self._noise.of_differences(healthy, WINDOWS)
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
            self._note_transient(lasted, slow - healthy.mean)
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
        variance, freedom = self._noise.of_differences(healthy, WINDOWS[:5])
        error = np.sqrt(float(variance[-1]) + healthy.variance / min(rest.size, 16))
        limit = max(SMALLEST_SEVERITY, quantile(self._probability, int(freedom)) * float(error))
        mean = median(newest)
        if abs(mean) < limit or (np.sign(mean) * newest > limit / 2).sum() < 6:
            return None
        count = self._change_point(slow, window)
        self._set(rows[-count:])
        self.excess = self._slow_level(self._current(), healthy.mean) - healthy.mean
        return self._step(Change.SEVERITY, count, window, healthy)
