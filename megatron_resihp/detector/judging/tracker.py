# SPDX-License-Identifier: Apache-2.0
"""Follows the levels of many units (workers, or links) and finds which have become slow, changed, or recovered.

A healthy unit is tested for an onset (`sequential`), a slow one for recovery and severity (`level_tests`), and a unit
without peers as a series of its own (`series.alone`). Imports numpy and this package.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.judging.bursts import LOST
from megatron_resihp.detector.judging.common_mode import Places
from megatron_resihp.detector.judging.faster import SETTLED
from megatron_resihp.detector.judging.level_tests import (
    LevelChange,
    UnitNoise,
    mean_of,
    noise_of,
    recovery,
    rows_since,
    severity,
)
from megatron_resihp.detector.judging.levels import column_medians
from megatron_resihp.detector.judging.noise import FAR, KnownNoise, Noise
from megatron_resihp.detector.judging.recent import RecentResiduals
from megatron_resihp.detector.judging.sequential import LONGEST, MEANS, REFRESH, OnsetLimits, crossing
from megatron_resihp.detector.judging.spells import Spells
from megatron_resihp.detector.judging.unit_levels import JOB, NODE, Known, UnitLevels
from megatron_resihp.detector.series.alone import Alone
from megatron_resihp.detector.series.follower import Step
from megatron_resihp.detector.verdict import Change

TRACKING: Final = 60.0
"""Number of residuals over which a healthy unit's level follows its drift."""
CLIP_SHARE: Final = 2.0
"""Clipping is at least this times the smallest slowdown, so that two stalls in six iterations stay below it."""
RAISED: Final = 2.5
"""Standard errors above 0 at which a short mean makes a unit suspect."""


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
        in_bursts: whether residuals had left out much of the slowness.
    """

    unit: int
    change: Change
    excess: float
    error: float
    since: int
    window: int
    noise: float
    in_bursts: bool = False


class Tracker:
    """State of all units. Memory: a few hundred numbers per unit.

    Attributes:
        levels: what is known of each unit.
        noise: of their residuals.
    """

    def __init__(
        self,
        places: Places,
        history: NDArray[np.float64],
        iterations: NDArray[np.int64],
        smallest: float,
        level: NDArray[np.float64],
        slow: NDArray[np.bool_],
        known: KnownNoise | None = None,
    ) -> None:
        """Learn from warm-up.

        Args:
            places: of the units.
            history: [warm-up iterations, units] residuals, NaN where unknown.
            iterations: [warm-up iterations] their numbers.
            smallest: smallest slowdown to report, as log of the ratio of times.
            level, slow: the result of `healthy_levels` for the history.
            known: the units' noise, if an earlier run learned it; then a few iterations suffice to tell the levels.
        """
        self._places, self._smallest = places, smallest
        self.levels = UnitLevels(level, slow, int(iterations[0]), smallest)
        self._recent = RecentResiduals(level.size)
        self._spells = Spells(level.size)
        centred = np.stack([self._without_common(row) for row in history])
        offset = column_medians(centred)
        self.noise = Noise(centred - offset, CLIP_SHARE * smallest, known)
        self.levels.drift(np.where(slow, 0.0, offset))
        for iteration, row in zip(iterations, self._again(history), strict=True):
            self._recent.push(row, int(iteration))
        self._onset = OnsetLimits(smallest, known)
        self._alone = Alone()

    def budget(self, false_alarms: float, iterations: int, units: int) -> None:
        """Set the accepted false alarms of a job; `units` counts the units of all trackers together."""
        self._onset.budget(false_alarms, iterations, units)
        self._onset.outlast(self._drifted(), self._recent.valid() & ~self.levels.slow, self.noise)

    def follow_alone(
        self, alone: NDArray[np.bool_], history: NDArray[np.float64], iterations: NDArray[np.int64]
    ) -> None:
        """Judge these units, [units], as single series from now on, warm-up included.

        The other arguments are as in the constructor.
        """
        self._alone.begin(np.flatnonzero(alone), self._onset.false_alarm, self._smallest)
        for place, row in enumerate(self._again(history)):
            for unit, step in _changes_alone(self._alone, row[JOB], self.levels):
                self._set_alone(unit, step, int(iterations[max(place + 1 - step.rows, 0)]))

    def _again(self, history: NDArray[np.float64]) -> Iterator[NDArray[np.float64]]:
        """Centred residuals of all units' first iterations, once their noise is known."""
        self.levels.faster.forget()
        return map(self._centred, history)

    def _centred(self, residuals: NDArray[np.float64]) -> NDArray[np.float64]:
        noise, residuals = self.noise, self.levels.without_stage(residuals, self._places)
        own = residuals - self.levels.healthy()
        self.levels.faster.see(own, noise.variance[JOB], noise.drift[JOB], noise.clip[JOB])
        return self.levels.centred(residuals, self._places.node)

    def _without_common(self, residuals: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.levels.centred(self.levels.without_stage(residuals, self._places), self._places.node)

    def _set_alone(self, unit: int, step: Step, since: int) -> Finding:
        self.levels.slow[unit], self.levels.began[unit] = step.change is not Change.RECOVERY, since
        self._recent.keep(unit, step.rows)
        return Finding(unit, step.change, step.excess, step.error, since, step.window, step.noise)

    def update(
        self, residuals: NDArray[np.float64], iteration: int, untold: NDArray[np.float64] | None = None
    ) -> list[Finding]:
        """Take in one iteration's residuals, [units], NaN where unknown.

        Args:
            residuals, iteration: these.
            untold: [rows, units] of `Bursts`, for the newest residuals; None if there can be none.
        """
        centred = self._centred(residuals)
        self._recent.push(centred, iteration)
        if self._onset.due():
            self._learn_oldest()
            self._onset.refresh(self.noise)
        newest = np.isfinite(centred[JOB])
        findings = [
            self._set_alone(unit, step, self._recent.iteration(JOB, unit, step.rows))
            for unit, step in _changes_alone(self._alone, centred[JOB], self.levels)
        ]
        newest[self._alone.units] = False
        findings += self._changes(newest & self.levels.slow)
        nothing = np.zeros((1, newest.size))
        return findings + self._onsets(newest & ~self.levels.slow, nothing if untold is None else untold)

    def found_slow(self, units: NDArray[np.bool_]) -> list[Finding]:
        """Findings for units, [units], that were slow when they began."""
        return [self._begin(int(unit), Change.ONSET, int(self.levels.began[unit])) for unit in np.flatnonzero(units)]

    def state(self, unit: int, since: int) -> Finding:
        """The present state of a slow unit, as a new finding."""
        noise, count = self._slow_noise(unit), int(self._recent.count[JOB, unit])
        excess = float(self.levels.excess[unit])
        return Finding(unit, Change.ONSET, excess, noise.error(count), since, 0, noise.deviation)

    def move(
        self,
        source: NDArray[np.int64],
        returning: Mapping[int, Known],
        places: Places,
        history: NDArray[np.float64],
        iterations: NDArray[np.int64],
        level: NDArray[np.float64],
        slow: NDArray[np.bool_],
    ) -> list[Finding]:
        """Go on with other units in another order; returns which of the new ones are slow from the start.

        Args:
            source: [new units] the unit's number before, or -1 if it had no work.
            returning: what was known of units that had no work, by their number.
            places: of the new units.
            history: [iterations, new units] residuals, from which the levels of unknown units are learned.
            iterations: [iterations] their numbers.
            level, slow: the result of `healthy_levels` for the history.
        """
        empty = not self.levels.level.size
        self._alone.move(source)
        self._places = places
        self._recent.move(source)
        self._spells.move(source)
        new = self.levels.move(source, returning, level, slow, int(iterations[0]))
        if empty:
            centred = np.stack([self._without_common(row) for row in history])
            self.noise = Noise(centred - column_medians(centred), smallest_clip=CLIP_SHARE * self._smallest)
        else:
            self.noise.move(source)
        for iteration, row in zip(iterations, self._again(history), strict=True):
            self._recent.push(np.where(new, row, np.nan), int(iteration))
        return self.found_slow(new)

    def known_noise(self) -> KnownNoise:
        """The learned noise, for another run."""
        return replace(self.noise.known(), transient=self._onset.shortest_run - 1)

    def suspect(self) -> NDArray[np.bool_]:
        """[units] whether the unit is slow or may soon be; its residuals do not count as normal."""
        newest = self._drifted()[: MEANS[0], JOB]
        mean = np.clip(newest, -self.noise.clip[JOB], self.noise.clip[JOB]).mean(axis=0)
        limit = RAISED * np.sqrt(self.noise.variance[JOB] / MEANS[0] + self.noise.drift[JOB])
        return self.levels.slow | (mean > limit)

    def _drifted(self) -> NDArray[np.float64]:
        """[KEPT, families, units] residuals relative to the healthy levels as they are now, newest first."""
        return self._recent.values - self.levels.offset

    def _learn_oldest(self) -> None:
        """Learn from residuals that are too old for any test: no alarm included them, so they count as healthy."""
        old, with_far = self._recent.take_old()
        levels = self.levels
        known = old & ~levels.slow & (levels.faster.steady == SETTLED)
        usual = levels.offset + levels.faster_than_job()
        oldest, following, *earlier = (
            self._recent.values[LONGEST + lag : LONGEST + lag + REFRESH] - usual for lag in (0, -1, *FAR)
        )
        self.noise.learn(oldest, following, known, np.stack(earlier), known & with_far)
        clipped = np.clip(oldest, -self.noise.clip, self.noise.clip)
        levels.drift(np.where(known, clipped, 0.0).sum(axis=0) / TRACKING)

    def _onsets(self, candidates: NDArray[np.bool_], untold: NDArray[np.float64]) -> list[Finding]:
        newest, count = self._drifted(), self._recent.count
        alarms = crossing(newest[:LONGEST], count, self.noise.clip, self._onset.thresholds)
        windows = np.where(candidates, alarms, 0)
        findings = []
        for unit in map(int, np.flatnonzero(windows.any(axis=0))):
            family = JOB if windows[JOB, unit] else NODE
            window = int(windows[family, unit])
            series = newest[: count[family, unit], family, unit]
            if not self._exceeds_job(unit, newest[:window, JOB, unit]):
                continue
            rows = rows_since(series, window, self.noise.clip[family, unit])
            since = self._recent.iteration(family, unit, rows)
            in_bursts = self._take_back(unit, since, untold[:, unit])
            findings.append(replace(self._begin(unit, Change.ONSET, since, window), in_bursts=in_bursts))
        return findings

    def _take_back(self, unit: int, since: int, untold: NDArray[np.float64]) -> bool:
        """Add to the residuals since an onset what they have left out, if that is much: it is a part of the slowness.

        An alarm may come before bursts are known, or with the first iteration in which they are.
        """
        self._recent.forget_before(unit, since)
        late = untold[: self._recent.count[JOB, unit]]
        if not late.size or late.mean() < LOST:
            return False
        self._recent.values[: late.size, :, unit] += late[:, None]
        return True

    def _exceeds_job(self, unit: int, series: NDArray[np.float64]) -> bool:
        """Whether the unit is slower than the job, too; otherwise it would recover at once, as JOB tells that."""
        clip = self.noise.clip[JOB, unit]
        return bool(np.clip(series, -clip, clip).mean() >= self._smallest / 2)

    def _changes(self, candidates: NDArray[np.bool_]) -> list[Finding]:
        findings = []
        for unit in map(int, np.flatnonzero(candidates)):
            series = self._recent.series(JOB, unit) - self.levels.offset[JOB, unit]
            self._spells.see(unit, series, noise_of(self.noise, JOB, unit))
            found = self._change(unit, series)
            if found is None:
                self.levels.excess[unit] = mean_of(series, self._slow_noise(unit))
                continue
            since = self._recent.iteration(JOB, unit, found.rows)
            if found.change is Change.RECOVERY and not found.faded:
                self._onset.remember_transient(since - int(self.levels.began[unit]))
            findings.append(self._begin(unit, found.change, since, found.window))
            if found.faded:
                self._recent.keep(unit, 0)  # an onset among them would contradict this
        return findings

    def _change(self, unit: int, series: NDArray[np.float64]) -> LevelChange | None:
        told, noise = float(self.levels.first_excess[unit]), self._slow_noise(unit)
        healthy, shortest = noise_of(self.noise, JOB, unit), self._spells.shortest_window(unit)
        found = recovery(series, told, noise, self._smallest, healthy, shortest)
        found = found or severity(series, told, noise, self._smallest)
        return found if found and self._spells.may_tell(unit, found) else None

    def _slow_noise(self, unit: int) -> UnitNoise:
        return self._spells.noise(unit, noise_of(self.noise, JOB, unit))

    def _begin(self, unit: int, change: Change, since: int, window: int = 0) -> Finding:
        """Give the unit another level from `since` on, and forget earlier residuals."""
        self._recent.forget_before(unit, since)
        self._spells.told(unit, change, self._recent.iteration(JOB, unit, 1))
        levels = self.levels
        levels.slow[unit], levels.began[unit] = change is not Change.RECOVERY, since
        series = self._recent.series(JOB, unit) - levels.offset[JOB, unit]
        excess = mean_of(series, self._slow_noise(unit)) if levels.slow[unit] and series.size else 0.0
        levels.excess[unit] = levels.first_excess[unit] = excess
        return replace(self.state(unit, since), change=change, window=window)


def _changes_alone(alone: Alone, residuals: NDArray[np.float64], levels: UnitLevels) -> list[tuple[int, Step]]:
    """Pass the newest residuals, [units], to the units that are alone; returns those that changed."""
    found = alone.update(residuals)
    for unit in alone.units:
        levels.offset[:, unit], levels.excess[unit] = alone.level(unit), alone.excess(unit)
    return found
