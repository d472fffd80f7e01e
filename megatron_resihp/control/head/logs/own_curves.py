# SPDX-License-Identifier: Apache-2.0
"""The plugin's own curves beside Megatron's: how many workers are left, how fast they are, what recoveries took. Pure.

May import `protocol` and `events`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import singledispatchmethod
from statistics import median
from typing import Final

from megatron_resihp.events.detection import Verdict
from megatron_resihp.events.epochs import EpochStarted, Reconfiguration, Recovery
from megatron_resihp.events.event import Event
from megatron_resihp.events.job import BatchGrown
from megatron_resihp.events.training import Iteration
from megatron_resihp.events.workers import WorkerDead
from megatron_resihp.protocol.logs import LogPage, Scalar, WandbRow

FOLLOWED: Final = (EpochStarted, BatchGrown, WorkerDead, Iteration, Recovery, Reconfiguration, Verdict)
HEALTHY: Final = 100
"""The healthy speed is the median of so many iterations, the last ones of the first epoch. Where batches grow, it is
that of the first epoch of the larger ones, and not known if some worker is slow or missing then."""


class OwnPage(LogPage):
    """A point of each curve. It is none of the pages that a worker sends, whose places tell how far these are there."""


class OwnCurves:
    """Follows a run's events; each iteration gives one point of each curve that is known.

    Args:
        before: the last iterations of the first epoch that a coordinator before this one has heard of.
    """

    def __init__(self, before: Iterable[Iteration] = ()) -> None:
        self._members: frozenset[int] = frozenset()
        self._all = 0
        """How many members the first epoch had."""
        self._healthy_epoch = True
        """Whether iterations of this epoch show the healthy speed."""
        self._grown = False
        """Whether the next epoch is the first one of larger batches."""
        self._iteration = 0
        self._healthy = deque((rate for each in before if (rate := _rate(each)) is not None), maxlen=HEALTHY)
        self._slow: set[int] = set()
        self._paused_s = 0.0

    @singledispatchmethod
    def note(self, event: Event) -> OwnPage | None:
        """What an event adds to the curves."""
        return None

    @note.register
    def _epoch_started(self, event: EpochStarted) -> None:
        working = {worker for replica in event.plan["replicas"] for stage in replica["stages"] for worker in stage}
        standbys = {int(worker) for worker in event.plan.get("standbys", {})}
        self._members = frozenset(working | standbys)
        self._all = len(self._members) if not event.epoch else self._all
        all_well = len(self._members) == self._all and not self._slow
        self._healthy_epoch = not event.epoch or (self._grown and all_well)
        self._grown = False

    @note.register
    def _batch_grown(self, event: BatchGrown) -> None:
        # A worker does more in the same time where it has more micro-batches.
        self._healthy.clear()
        self._grown = True

    @note.register
    def _dead(self, event: WorkerDead) -> None:
        self._members -= {event.dead}
        self._slow.discard(event.dead)

    @note.register
    def _recovery(self, event: Recovery) -> None:
        if event.broken_at is not None:
            self._paused_s += (event.resumed_at or event.time) - event.broken_at

    @note.register
    def _reconfiguration(self, event: Reconfiguration) -> None:
        self._paused_s += event.stood_still_s

    @note.register
    def _verdict(self, event: Verdict) -> None:
        if event.kind == "compute":
            change = self._slow.difference_update if event.change == "recovery" else self._slow.update
            change(event.workers)

    @note.register
    def _iteration_done(self, event: Iteration) -> OwnPage | None:
        if event.iteration <= self._iteration:
            return None
        self._iteration = event.iteration
        values = {"workers_alive": float(len(self._members)), "slow_workers": float(len(self._slow))}
        if (rate := _rate(event)) is not None:
            values["samples_per_s"] = rate
            if self._healthy_epoch:
                self._healthy.append(rate)
            if self._healthy:
                values["share_of_healthy_speed"] = rate / median(self._healthy)
        if self._paused_s:
            values["pause_s"], self._paused_s = self._paused_s, 0.0
        named = {f"resihp/{name}": value for name, value in values.items()}
        scalars = tuple(Scalar(name, value, event.iteration) for name, value in named.items())
        rows = (WandbRow(named, event.iteration),)
        return OwnPage(event.worker or 0, 0, event.iteration, event.time, scalars, rows=rows)


def _rate(event: Iteration) -> float | None:
    """Samples per second; None: not known."""
    return event.samples / event.duration_s if event.samples and event.duration_s else None
