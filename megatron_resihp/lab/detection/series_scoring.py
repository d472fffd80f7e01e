# SPDX-License-Identifier: Apache-2.0
"""Scores detectors on series with known truth. Imports numpy, `detector` and this package.

A slowdown is found if a verdict reports it within 30 rows from its first one, and its recovery if one reports that
within 30 rows after its last. Every other onset is a false alarm, except the first one in a series with recurring
disturbances.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from megatron_resihp.config import FALSE_ALARMS_PER_JOB
from megatron_resihp.detector.input.table import Table
from megatron_resihp.detector.series.judge import judge_series
from megatron_resihp.detector.settings import Settings
from megatron_resihp.detector.verdict import Change, Kind
from megatron_resihp.lab.baselines.change_points import ChangePointSettings
from megatron_resihp.lab.baselines.greyhound import Greyhound, GreyhoundSettings
from megatron_resihp.lab.baselines.validation import Finding
from megatron_resihp.lab.detection.series import Series, SeriesKind, draw_series

WINDOW: Final = 30
"""Rows within which a slowdown, or its end, must be found."""

Onsets = list[int]
Recoveries = list[int]
Watch = Callable[[Series], tuple[Onsets, Recoveries]]
"""Gives the rows at which a detector reports a slowdown, and those at which it reports a recovery."""


@dataclass(frozen=True)
class SeriesScore:
    """A detector's score for some series.

    slow: number of series with a slowdown.
    found, recovered: number of these slowdowns, and of their ends, that were found.
    latencies: for each slowdown found, rows from the first slow one to the verdict, both included.
    false_alarms: number of false alarms.
    rows: number of healthy rows.
    """

    slow: int = 0
    found: int = 0
    recovered: int = 0
    latencies: tuple[int, ...] = ()
    false_alarms: int = 0
    rows: int = 0

    def __add__(self, other: "SeriesScore") -> "SeriesScore":
        return SeriesScore(
            self.slow + other.slow, self.found + other.found, self.recovered + other.recovered,
            self.latencies + other.latencies, self.false_alarms + other.false_alarms, self.rows + other.rows,
        )  # fmt: skip

    def figures(self) -> dict[str, float | int | None]:
        """The reported figures."""
        return {
            "found_share": self.found / self.slow if self.slow else None,
            "recovered_share": self.recovered / self.slow if self.slow else None,
            "false_alarms_per_1000": 1000 * self.false_alarms / self.rows if self.rows else None,
            "latency_iterations": float(np.median(self.latencies)) if self.latencies else None,
            "slow_downs": self.slow,
            "healthy_rows": self.rows,
        }


def score(kind: SeriesKind, series: Series, watch: Watch) -> SeriesScore:
    """The score for one series."""
    onsets, recoveries = watch(series)
    spell = series.spell
    inside = [row for row in onsets if spell and spell.first <= row <= spell.last + 1]
    false = len(onsets) - len(inside)
    if kind.recurs:
        false = max(false - 1, 0)
    if spell is None:
        return SeriesScore(false_alarms=false, rows=series.seconds.size)
    in_time = [row for row in inside if row < spell.first + WINDOW]
    ended = any(spell.last < row <= spell.last + WINDOW for row in recoveries)
    return SeriesScore(
        1, bool(in_time), bool(in_time) and ended, tuple(row - spell.first + 1 for row in in_time[:1]), false,
        series.seconds.size - (spell.last - spell.first + 1),
    )  # fmt: skip


def score_kind(kind: SeriesKind, seed: int, count: int, watch: Watch) -> SeriesScore:
    """The score for `count` healthy series of a kind, and as many with a slowdown."""
    drawn = (draw_series(kind, seed, index, slow) for index in range(count) for slow in (False, True))
    return sum((score(kind, series, watch) for series in drawn), SeriesScore())


def this_detector(series: Series) -> tuple[Onsets, Recoveries]:
    """This project's detector, as `resihp detect` uses it."""
    verdicts = judge_series(series.table(), FALSE_ALARMS_PER_JOB, Settings()).verdicts
    rows = [(verdict.change, int(verdict.evidence["row"])) for verdict in verdicts]
    return (
        [row for change, row in rows if change is Change.ONSET],
        [row for change, row in rows if change is Change.RECOVERY],
    )


def greyhound(series: Series) -> tuple[Onsets, Recoveries]:
    """Greyhound's detector, online, from row 10 on; it reports no recoveries.

    Each alarm is validated, which real detection without workers could not do.
    """
    table, spell = Table.of(series.seconds[:, None]), series.spell
    slow = Finding(Kind.COMPUTE, (0,), 1 / spell.factor if spell else 1.0)

    def validate(iteration: int) -> list[Finding]:
        return [slow] if spell and spell.first <= iteration <= spell.last else []

    settings = GreyhoundSettings(ChangePointSettings(warm_up=10))
    rows = series.seconds.size
    detector = Greyhound(table.layout(), FALSE_ALARMS_PER_JOB, rows, validate=validate, settings=settings)
    onsets = []
    for row, observations in enumerate(table.observations(), 1):
        onsets += [row for verdict in detector.observe(observations) if verdict.change is Change.ONSET]
    return onsets, []
