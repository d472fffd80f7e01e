# SPDX-License-Identifier: Apache-2.0
"""Follows the levels of many units (workers, or links) and finds which have become slow, changed, or recovered.

Each unit is judged in two families of residuals. NODE is relative to the median of its node's other units, which
removes noise that the node shares. JOB is relative to the job's level only, which shows a node that is slow as a whole.
Imports numpy and this package.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.judging.common_mode import job_level, peer_medians
from megatron_resihp.detector.judging.levels import column_medians
from megatron_resihp.detector.judging.noise import FAR, KnownNoise, Noise
from megatron_resihp.detector.judging.sequential import (
    FAMILIES,
    LONGEST,
    MEANS,
    RUNS,
    change_point,
    crossing,
    thresholds,
    window_probability,
)
from megatron_resihp.detector.series.alone import Alone
from megatron_resihp.detector.series.follower import Step
from megatron_resihp.detector.verdict import Change

NODE, JOB = range(FAMILIES)
TRACKING: Final = 60.0
"""Number of residuals over which a healthy unit's level follows its drift."""
FARTHEST_DRIFT: Final = 0.02
"""Largest drift from warm-up's level; a device that keeps slowing down is not drifting."""
CLIP_SHARE: Final = 2.0
"""Clipping is at least this times the smallest slowdown, so that two stalls in six iterations stay below it."""
RECOVERY_ODDS: Final = 1e6
"""How much likelier "healthy again" must be than "as slow as before"."""
RECOVERED: Final = 3.0
"""Standard errors by which the level of a unit that recovers gradually must lie below the smallest slowdown."""
SEVERITY_WINDOW: Final = 8
SMALLEST_SEVERITY: Final = 0.04
RAISED: Final = 2.5
"""Standard errors above 0 at which a short mean makes a unit suspect."""
FAR_FROM_MEDIAN: Final = 2.0
"""Standard deviations from the median at which residuals are clipped in a mean."""
REFRESH: Final = 8
"""Iterations after which noise, levels and thresholds are recomputed."""
KEPT: Final = LONGEST + REFRESH + FAR
_OF_UNITS = ("slow", "excess", "_first_excess", "_began", "_offset", "_recent", "_when", "_count", "_unlearned")
"""The tracker's arrays whose last axis is the unit."""


@dataclass(frozen=True)
class Finding:
    """A change of a unit's level.

    Attributes:
        unit: its index.
        change: what happened.
        excess: the new level, log of the ratio of times; 0 after a recovery.
        error: standard error of `excess`.
        since: iteration of the change, estimated.
        window: how many residuals decided.
        noise: standard deviation of one residual.
    """

    unit: int
    change: Change
    excess: float
    error: float
    since: int
    window: int
    noise: float


@dataclass(frozen=True)
class Known:
    """What stays known of a unit without work.

    Attributes:
        level: its healthy level.
        offset: [families] its drift from that level.
        slow: whether it was slow.
        excess: how slow it was, log of the ratio of times.
        began: the iteration from which it was slow.
    """

    level: float
    offset: NDArray[np.float64]
    slow: bool
    excess: float
    began: int


class Tracker:
    """State of all units. Memory: a few hundred numbers per unit."""

    def __init__(
        self,
        group: NDArray[np.int64],
        history: NDArray[np.float64],
        iterations: NDArray[np.int64],
        smallest: float,
        level: NDArray[np.float64],
        slow: NDArray[np.bool_],
        known: KnownNoise | None = None,
    ) -> None:
        """Learn from warm-up.

        Args:
            group: [units] number of the group that shares noise (the node), from 0.
            history: [warm-up iterations, units] residuals, NaN where unknown.
            iterations: [warm-up iterations] their numbers.
            smallest: smallest slowdown to report, as log of the ratio of times.
            level, slow: the result of `healthy_levels` for the history.
            known: the units' noise, if an earlier run learned it; then a few iterations suffice to tell the levels.
        """
        units = group.size
        self._group, self._smallest = group, smallest
        self.level, self.slow = level, slow.copy()
        self.excess = np.zeros(units)
        self._first_excess = np.zeros(units)
        self._began = np.zeros(units, dtype=np.int64)
        self._offset = np.zeros((FAMILIES, units))
        self._recent = np.zeros((KEPT, FAMILIES, units))
        self._when = np.zeros((KEPT, FAMILIES, units), dtype=np.int64)
        self._count = np.zeros((FAMILIES, units), dtype=np.int64)
        self._unlearned = np.zeros((FAMILIES, units), dtype=np.int64)
        centred = np.stack([self._centred(row - self.level) for row in history])
        self._offset = column_medians(centred)
        self.noise = Noise(centred - self._offset, CLIP_SHARE * smallest, known)
        self._offset = np.where(slow, 0.0, np.clip(self._offset, -FARTHEST_DRIFT, FARTHEST_DRIFT))
        for iteration, row in zip(iterations[-KEPT:], centred[-KEPT:], strict=True):
            self._push(row, int(iteration))
        self._began[slow] = iterations[0]
        self._shortest_run = max(RUNS[0], known.transient + 1) if known else RUNS[0]
        self._alpha = self._false_alarm = 0.0
        self._alone = Alone()
        self._refresh_in = 0

    def budget(self, false_alarms: float, iterations: int, units: int) -> None:
        """Set the accepted false alarms of a job; `units` counts the units of all trackers together."""
        self._alpha = window_probability(false_alarms, iterations, units)
        self._false_alarm = false_alarms / (max(iterations, 1) * max(units, 1))
        self._refresh_in = 0
        self._shortest_run = min(max(self._shortest_run, self._longest_transient() + 1), RUNS[-1])

    def follow_alone(
        self, alone: NDArray[np.bool_], history: NDArray[np.float64], iterations: NDArray[np.int64]
    ) -> None:
        """Judge these units, [units], as single series from now on, warm-up included.

        The other arguments are as in the constructor.
        """
        self._alone.begin(np.flatnonzero(alone), self._false_alarm, self._smallest)
        for place, row in enumerate(history):
            for unit, step in self._changes_alone(self._centred(row - self.level)[JOB]):
                self._set_alone(unit, step, int(iterations[max(place + 1 - step.rows, 0)]))

    def _changes_alone(self, residuals: NDArray[np.float64]) -> list[tuple[int, Step]]:
        """Pass the newest residuals to the units that are alone; returns those that changed."""
        found = self._alone.update(residuals)
        for unit in self._alone.units:
            self._offset[:, unit], self.excess[unit] = self._alone.level(unit), self._alone.excess(unit)
        return found

    def _set_alone(self, unit: int, step: Step, since: int) -> Finding:
        self.slow[unit], self._began[unit] = step.change is not Change.RECOVERY, since
        self._count[:, unit] = np.minimum(self._count[:, unit], step.rows)
        return Finding(unit, step.change, step.excess, step.error, since, step.window, step.noise)

    def update(self, residuals: NDArray[np.float64], iteration: int) -> list[Finding]:
        """Take in one iteration's residuals, [units], NaN where unknown."""
        centred = self._centred(residuals - self.level)
        self._push(centred, iteration)
        if self._refresh_in <= 0:
            self._learn_oldest()
            self._limits = thresholds(self.noise, self._alpha, self._smallest, self._shortest_run)
            self._refresh_in = REFRESH
        self._refresh_in -= 1
        newest = np.isfinite(centred[JOB])
        findings = [
            self._set_alone(unit, step, int(self._when[min(step.rows, KEPT) - 1, JOB, unit]))
            for unit, step in self._changes_alone(centred[JOB])
        ]
        newest[self._alone.units] = False
        findings += self._changes(newest & self.slow)
        return findings + self._onsets(newest & ~self.slow)

    def slow_from_the_start(self) -> list[Finding]:
        """Findings for the units that were slow in warm-up."""
        return self._from_the_start(self.slow)

    def _from_the_start(self, slow: NDArray[np.bool_]) -> list[Finding]:
        return [self._begin(int(unit), Change.ONSET, int(self._began[unit])) for unit in np.flatnonzero(slow)]

    def state(self, unit: int, since: int) -> Finding:
        """The present state of a slow unit, as a new finding."""
        noise = float(np.sqrt(self.noise.variance[JOB, unit]))
        return Finding(unit, Change.ONSET, float(self.excess[unit]), self.error(unit), since, 0, noise)

    def known(self) -> list[Known]:
        """What is known of each unit, for `move` when the unit comes back."""
        return [
            Known(float(self.level[unit]), self._offset[:, unit].copy(), bool(self.slow[unit]),
                  float(self.excess[unit]), int(self._began[unit]))
            for unit in range(self.level.size)
        ]  # fmt: skip

    def move(
        self,
        source: NDArray[np.int64],
        returning: Mapping[int, Known],
        group: NDArray[np.int64],
        history: NDArray[np.float64],
        iterations: NDArray[np.int64],
        level: NDArray[np.float64],
        slow: NDArray[np.bool_],
    ) -> list[Finding]:
        """Go on with other units in another order; returns which of the new ones are slow from the start.

        Args:
            source: [new units] the unit's number before, or -1 if it had no work.
            returning: what was known of units that had no work, by their number.
            group: [new units] as in the constructor.
            history: [iterations, new units] residuals, from which the levels of unknown units are learned.
            iterations: [iterations] their numbers.
            level, slow: the result of `healthy_levels` for the history.
        """
        present, empty = source >= 0, not self.level.size
        self._alone.move(source)
        self._group = group
        for name in ("level", *_OF_UNITS):
            setattr(self, name, _moved(getattr(self, name), source))
        self.level = np.where(present, self.level, level)
        for unit, known in returning.items():
            self.level[unit], self._offset[:, unit] = known.level, known.offset
            self.slow[unit], self._began[unit] = known.slow, known.began
            self.excess[unit] = self._first_excess[unit] = known.excess
        new = slow & ~present
        new[list(returning)] = False
        self.slow |= new
        self._began[new] = iterations[0]
        centred = np.stack([self._centred(row - self.level) for row in history])
        if empty:
            self.noise = Noise(centred - column_medians(centred), smallest_clip=CLIP_SHARE * self._smallest)
        else:
            self.noise.move(source)
        for iteration, row in zip(iterations, centred, strict=True):
            self._push(np.where(new, row, np.nan), int(iteration))
        return self._from_the_start(new)

    def known_noise(self) -> KnownNoise:
        """The learned noise, for another run."""
        return replace(self.noise.known(), transient=self._shortest_run - 1)

    def suspect(self) -> NDArray[np.bool_]:
        """[units] whether the unit is slow or may soon be; its residuals do not count as normal."""
        newest = (self._recent - self._offset)[: MEANS[0], JOB]
        mean = np.clip(newest, -self.noise.clip[JOB], self.noise.clip[JOB]).mean(axis=0)
        return self.slow | (mean > RAISED * np.sqrt(self.noise.variance[JOB] / MEANS[0] + self.noise.drift[JOB]))

    def healthy_level(self) -> NDArray[np.float64]:
        """[units] log of the device's own healthy level relative to the prediction."""
        return self.level + self._offset[JOB]

    # Residuals

    def _centred(self, residuals: NDArray[np.float64]) -> NDArray[np.float64]:
        """[families, units] residuals without the part that the node or the job shares."""
        known = np.isfinite(residuals)
        healthy = known & ~self.slow
        usable = healthy if healthy.any() else known
        job = residuals - job_level(residuals - self._offset[JOB], usable)
        return np.stack([residuals - peer_medians(residuals, usable, self._group), job])

    def _push(self, centred: NDArray[np.float64], iteration: int) -> None:
        """Put residuals in front of the older ones, for units that have one."""
        arriving = np.isfinite(centred)
        for store, newest in ((self._recent, centred), (self._when, iteration)):
            if arriving.all():
                store[1:] = store[:-1]
                store[0] = newest
            else:
                moved = np.concatenate([np.broadcast_to(newest, (1, *arriving.shape)), store[:-1]])
                np.copyto(store, moved, where=arriving, casting="unsafe")
        self._count = np.minimum(self._count + arriving, KEPT)
        self._unlearned = np.minimum(self._unlearned + arriving, REFRESH)

    def _learn_oldest(self) -> None:
        """Learn from residuals that are too old for any test: no alarm included them, so they count as healthy."""
        row = np.arange(REFRESH)[:, None, None]
        known = (row < self._unlearned) & (row + LONGEST < self._count) & ~self.slow
        far = known & (row + LONGEST + FAR < self._count)
        oldest, following, earlier = (
            self._recent[LONGEST + lag : LONGEST + lag + REFRESH] - self._offset for lag in (0, -1, FAR)
        )
        self.noise.learn(oldest, following, known, earlier, far)
        change = np.where(known, np.clip(oldest, -self.noise.clip, self.noise.clip), 0.0).sum(axis=0) / TRACKING
        self._offset = np.clip(self._offset + change, -FARTHEST_DRIFT, FARTHEST_DRIFT)
        self._unlearned[:] = 0

    def _longest_transient(self) -> int:
        """The longest run of a healthy unit's residuals that a run test would count; it ended by itself."""
        limit = thresholds(self.noise, self._alpha, self._smallest, RUNS[0]).runs[0]
        newest = self._recent - self._offset
        known = (np.arange(KEPT)[:, None, None] < self._count) & ~self.slow
        run = np.zeros(self._count.shape, dtype=np.int64)
        longest = 0
        for above in (newest > limit) & known:
            run = np.where(above, run + 1, 0)
            longest = max(longest, int(run.max(initial=0)))
        return longest

    # Decisions

    def _onsets(self, candidates: NDArray[np.bool_]) -> list[Finding]:
        newest = self._recent - self._offset
        windows = np.where(candidates, crossing(newest[:LONGEST], self._count, self.noise.clip, self._limits), 0)
        findings = []
        for unit in map(int, np.flatnonzero(windows.any(axis=0))):
            family = JOB if windows[JOB, unit] else NODE
            window = int(windows[family, unit])
            since = self._since(family, unit, newest[: self._count[family, unit], family, unit], window)
            findings.append(self._begin(unit, Change.ONSET, since, window))
        return findings

    def _changes(self, candidates: NDArray[np.bool_]) -> list[Finding]:
        findings = []
        for unit in map(int, np.flatnonzero(candidates)):
            series = self._series(unit)
            finding = self._recovery(unit, series) or self._severity(unit, series)
            if finding:
                findings.append(finding)
            else:
                self.excess[unit] = self._mean(unit, series)
        return findings

    def _recovery(self, unit: int, series: NDArray[np.float64]) -> Finding | None:
        """Likelihood ratio test of "level 0 by now" against "one level all the time", on the newest and earlier
        residuals.

        The earlier level is estimated. From few residuals it is uncertain, and too high where luck helped to find it.
        If the slowness faded, there is no earlier level; then all residuals kept must be small.
        """
        clip = self.noise.clip[JOB, unit]
        for window in (n for n in (*RUNS, *MEANS) if n < series.size):
            rest = series[window:]
            before = self._mean(unit, rest) if rest.size >= RUNS[0] else float(self._first_excess[unit])
            newest = np.clip(series[:window], -clip, before + clip)
            variance = self.noise.variance[JOB, unit] + window * self.noise.drift[JOB, unit]
            earlier = max(rest.size, RUNS[0])
            common = earlier / (window + earlier) * (newest.mean() - before) ** 2
            odds = window / (2 * variance) * (common - newest.mean() ** 2)
            if odds > np.log(RECOVERY_ODDS) and (newest < before / 2).sum() >= RUNS[0]:
                since = self._since(JOB, unit, series - before, window)
                if np.median(series[:window]) > max(self._smallest, before / 4):
                    return self._begin(unit, Change.SEVERITY, since, window)
                self._remember_transient(since - int(self._began[unit]))
                return self._begin(unit, Change.RECOVERY, since, window)
        error = np.sqrt(self.noise.variance[JOB, unit] / LONGEST + self.noise.drift[JOB, unit])
        if series.size == LONGEST and self._mean(unit, series) + RECOVERED * error < self._smallest:
            return self._begin(unit, Change.RECOVERY, int(self._when[LONGEST - 1, JOB, unit]), LONGEST)
        return None

    def _severity(self, unit: int, series: NDArray[np.float64]) -> Finding | None:
        """Whether the newest residuals have another mean than earlier ones, by much and significantly."""
        window = SEVERITY_WINDOW
        if series.size < 2 * window:
            return None
        before, now = self._mean(unit, series[window:]), self._mean(unit, series[:window])
        variance, drift = self.noise.variance[JOB, unit], self.noise.drift[JOB, unit]
        error = np.sqrt(variance / window + variance / (series.size - window) + drift)
        z = np.sqrt(2 * np.log(RECOVERY_ODDS))
        if abs(now - before) <= max(SMALLEST_SEVERITY, z * error) or now <= self._smallest:
            return None
        since = self._since(JOB, unit, series - before, window)
        return self._begin(unit, Change.SEVERITY, since, window)

    def _begin(self, unit: int, change: Change, since: int, window: int = 0) -> Finding:
        """Give the unit another level from `since` on, and forget earlier residuals."""
        for family in range(FAMILIES):
            when = self._when[: self._count[family, unit], family, unit]
            self._count[family, unit] = int((when >= since).sum())
        self.slow[unit] = change is not Change.RECOVERY
        self._began[unit] = since
        series = self._series(unit)
        excess = self._mean(unit, series) if self.slow[unit] and series.size else 0.0
        self.excess[unit] = self._first_excess[unit] = excess
        noise = float(np.sqrt(self.noise.variance[JOB, unit]))
        return Finding(unit, change, excess, self.error(unit), since, window, noise)

    def _remember_transient(self, length: int) -> None:
        """Remember that a slow run of this length ended by itself; shorter runs no longer count."""
        if self._shortest_run <= length < RUNS[-1]:
            self._shortest_run = length + 1
            self._refresh_in = 0

    # One unit

    def error(self, unit: int) -> float:
        """Standard error of the unit's excess."""
        count = max(int(self._count[JOB, unit]), 1)
        return float(np.sqrt(self.noise.variance[JOB, unit] / count + self.noise.drift[JOB, unit]))

    def _series(self, unit: int) -> NDArray[np.float64]:
        """The unit's residuals since its level last changed, newest first."""
        return self._recent[: min(self._count[JOB, unit], LONGEST), JOB, unit] - self._offset[JOB, unit]

    def _since(self, family: int, unit: int, series: NDArray[np.float64], window: int) -> int:
        """Iteration from which the newest residuals have another mean than 0, judged by the newest `window` of them."""
        # A large change is found before it fills the window. The clipping must exceed a stall's size for it, or earlier
        # healthy residuals would weigh as much.
        levels = [abs(float(np.median(series[:length]))) for length in (window, RUNS[0])]
        reach = max(float(self.noise.clip[family, unit]), 2 * max(levels))
        length = change_point(np.clip(series, -reach, reach))
        return int(self._when[length - 1, family, unit])

    def _mean(self, unit: int, series: NDArray[np.float64]) -> float:
        """Mean of residuals, clipped around their median."""
        reach = FAR_FROM_MEDIAN * np.sqrt(self.noise.variance[JOB, unit])
        centre = np.median(series)
        return float(np.clip(series, centre - reach, centre + reach).mean())


def _moved(values: NDArray[Any], source: NDArray[np.int64]) -> NDArray[Any]:
    """Columns of the last axis by number; zeros for -1."""
    return np.concatenate([values, np.zeros_like(values, shape=(*values.shape[:-1], 1))], axis=-1)[..., source]
