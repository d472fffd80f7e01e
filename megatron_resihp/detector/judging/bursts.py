# SPDX-License-Identifier: Apache-2.0
"""Units that are slow in bursts shorter than an iteration, in which their residual hides it. Imports numpy and scipy.

A residual leaves out ops that took much longer than the others, because a hiccup is no slowness. But a device that is
slow in some ops of each iteration loses that time. Where nearly all of the newest iterations show such a loss, and
neither the unit nor others usually have it, the residual is that of the sums of measured and predicted time, with
nothing left out. Units without bursts keep their residuals, and so their thresholds.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc

from megatron_resihp.detector.judging.common_mode import job_level
from megatron_resihp.detector.judging.recent import moved
from megatron_resihp.detector.judging.sequential import window_probability

ITERATIONS: Final = 8
"""Newest iterations that tell."""
WINDOWS: Final = (ITERATIONS, 16, 24, 32)
"""The same for bursts that few iterations can't tell from hiccups, as these are frequent, too."""
FEWEST: Final = 3 / 4
"""Share of these that must show bursts. Few have none of them by chance; hiccups are in few."""
UNUSUAL: Final = 1e-3
"""Losses that residuals leave out count for a speed if so many of them are at most this likely, by what is usual."""
FEWEST_LATER: Final = 2
"""The same once they have been seen: where few ops are timed, those may be between bursts."""
LOST: Final = 0.1
"""Time lost in bursts, log of the ratio of times, beyond what three quarters of all units lose. Ops on busy hosts lose
some percent at times."""
OF_ALL: Final = 30.0
"""Iterations as which the share of all units counts in what is usual for one of them."""
KEPT: Final = 32
"""Newest iterations that don't tell what is usual, or bursts would soon be usual themselves; fewer while few are
known."""


class Bursts:
    """Which units have bursts at present.

    Args:
        units: their number.
    """

    def __init__(self, units: int) -> None:
        self._untold = np.zeros((ITERATIONS, units))
        self._unusual = np.zeros(units, dtype=bool)
        self._lost = np.zeros((KEPT, units))
        self._held = np.zeros(units, dtype=np.int64)  # how many of these are known
        self._rows = np.zeros(units)  # older ones without bursts, and how many of them have lost much
        self._hits = np.zeros(units)
        self._seen = np.zeros(units, dtype=bool)
        self._chance = 0.0

    def move(self, source: NDArray[np.int64]) -> None:
        """Go on with other units; `source` gives each one's number before, or -1 if it is new."""
        for name in ("_untold", "_unusual", "_lost", "_held", "_rows", "_hits", "_seen"):
            setattr(self, name, moved(getattr(self, name), source))

    @property
    def untold(self) -> NDArray[np.float64]:
        """[ITERATIONS, units] losses that the newest residuals leave out, newest first; 0 where they don't, and where
        the unit usually has as many."""
        return np.where(self._unusual, self._untold, 0.0)

    @property
    def told(self) -> NDArray[np.float64]:
        """[units] how much of their newest residuals units have lost in bursts; 0 where residuals leave that out."""
        return np.where(self._seen, self._lost[:ITERATIONS].mean(axis=0), 0.0)

    def forget_untold(self) -> None:
        """Nobody has been judged by the newest residuals, such as those of an epoch's first iterations."""
        self._untold[:] = 0.0

    def budget(self, false_alarms: float, iterations: int, units: int) -> None:
        """Set the accepted false alarms of a job; `units` counts the units of all kinds together.

        Taking hiccups for bursts raises a level, and so an alarm. It is as rare as an alarm by a window.
        """
        self._chance = window_probability(false_alarms, iterations, units)

    def residuals(
        self, robust: NDArray[np.float64], plain: NDArray[np.float64], *, stopped: NDArray[np.bool_] | None = None
    ) -> NDArray[np.float64]:
        """[units] the residuals of one iteration, NaN where unknown.

        Args:
            robust, plain: [units] residuals with and without outliers clipped.
            stopped: [units] whose process is known to have been stopped. The ops of that time are no outliers: what
                they took longer is slowness. It is a burst, too, as the next stop may not be known.
        """
        lost = plain - robust
        known = np.isfinite(lost)
        self._take_in(lost - job_level(lost, known), known)
        usual = self._usual_share()
        begin = np.any([self._has_bursts(window, usual) for window in WINDOWS], axis=0) & ~self._seen
        times = (np.abs(self._lost[:ITERATIONS]) >= LOST).sum(axis=0)
        self._unusual = bdtrc(times - 1, ITERATIONS, usual) <= UNUSUAL
        ended = self._seen & (times < FEWEST_LATER)
        self._held[ended] = ITERATIONS
        self._seen = (self._seen | begin) & ~ended
        told = self._seen if stopped is None else self._seen | stopped
        self._untold[1:] = np.where(known, self._untold[:-1], self._untold[1:])
        self._untold[0] = np.where(known, np.where(told, 0.0, self._lost[0]), self._untold[0])
        return np.where(told, plain, robust)

    def _has_bursts(self, window: int, usual: NDArray[np.float64]) -> NDArray[np.bool_]:
        """[units] whether so many of the newest iterations show bursts, more than is usual."""
        newest = self._lost[:window]
        times = (np.abs(newest) >= LOST).sum(axis=0)
        many = (times >= FEWEST * window) & (newest.mean(axis=0) >= LOST)
        return many & (bdtrc(times - 1, window, usual) <= self._chance / len(WINDOWS))

    def begin(self, units: NDArray[np.bool_]) -> None:
        """Take it as seen that these units, [units], have bursts."""
        self._seen |= units

    def _take_in(self, lost: NDArray[np.float64], known: NDArray[np.bool_]) -> None:
        """Put the newest losses, [units], in front, and count the oldest ones of units that have no bursts."""
        usual = known & ~self._seen & (self._held == KEPT)
        self._rows += usual
        self._hits += usual & (np.abs(self._lost[-1]) >= LOST)
        self._lost[1:] = np.where(known, self._lost[:-1], self._lost[1:])
        self._lost[0] = np.where(known, lost, self._lost[0])
        self._held = np.minimum(self._held + known, KEPT)

    def _usual_share(self) -> NDArray[np.float64]:
        """[units] share of iterations in which a unit without bursts loses much: its own, shrunk to that of all.

        Its own newest iterations are left out.
        """
        age = np.arange(KEPT)[:, None]
        much, held = np.abs(self._lost) >= LOST, (age < self._held) & ~self._seen
        rows, hits = self._rows + held.sum(axis=0), self._hits + (much & held).sum(axis=0)
        late = held & (age < np.clip(rows // 2, ITERATIONS, KEPT))
        own_rows, own_hits = rows - late.sum(axis=0), hits - (much & late).sum(axis=0)
        of_all = (1 + hits.sum() - hits + own_hits) / (1 + rows.sum() - rows + own_rows)
        return (own_hits + OF_ALL * of_all) / (own_rows + OF_ALL)
