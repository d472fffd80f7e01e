# SPDX-License-Identifier: Apache-2.0
"""Events, as they come -> a progress line that shows that a run is alive, and lines for other events.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from functools import singledispatchmethod
from typing import TextIO

from megatron_resihp.control.worker.saved_state import command_for
from megatron_resihp.events.epochs import EpochStarted, FirstStep, Recovery
from megatron_resihp.events.event import Event
from megatron_resihp.events.job import Job
from megatron_resihp.events.training import EmergencyCheckpoint, Iteration
from megatron_resihp.events.workers import WorkerDead, WorkerStarted
from megatron_resihp.report.live.lines import lines_of
from megatron_resihp.report.run import shape
from megatron_resihp.report.words import count, duration, size, where, worker_at

INTERVAL_S = 10.0
"""Seconds between two progress lines where lines can't be rewritten, as in a file."""

CLEAR_TO_END = "\x1b[K"


class Progress:
    """Feed it every event of a run, in order and from any thread; close it at the end.

    On a terminal the progress line rewrites itself; elsewhere one is written at most every `interval_s`
    seconds.
    """

    def __init__(
        self,
        stream: TextIO,
        isatty: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = INTERVAL_S,
        columns: Callable[[], int] = lambda: shutil.get_terminal_size().columns,
    ) -> None:
        self._stream = stream
        self._isatty = stream.isatty() if isatty is None else isatty
        self._clock = clock
        self._interval_s = interval_s
        self._columns = columns
        self._lock = threading.Lock()
        self._run = _Run()
        self._drawn = ""
        """The progress line last written."""
        self._drawn_at = -float("inf")

    def feed(self, event: Event) -> None:
        """Take note of one event and show what is new."""
        with self._lock:
            for line in self._run.feed(event):
                self._say(line)
            # Where lines can't be rewritten, a progress line older than the news above it would mislead.
            if self._isatty or isinstance(event, EpochStarted | Iteration):
                self._draw()

    def close(self) -> None:
        """Leave the last state of the run as a line of its own."""
        with self._lock:
            self._draw(last=True)
            if self._isatty and self._drawn:
                self._write("\n")
            self._drawn = ""

    def _say(self, line: str) -> None:
        """Print a line that stays, above the progress line."""
        self._write(f"\r{line}{CLEAR_TO_END}\n" if self._isatty else f"{line}\n")
        if self._isatty:
            self._drawn = ""

    def _draw(self, last: bool = False) -> None:
        line = self._run.line()
        if not line or line == self._drawn:
            return
        if self._isatty:
            # A line that wraps could not be rewritten.
            self._write(f"\r{line[: self._columns() - 1]}{CLEAR_TO_END}")
        elif last or self._clock() - self._drawn_at >= self._interval_s:
            self._write(f"{line}\n")
        else:
            return
        self._drawn, self._drawn_at = line, self._clock()

    def _write(self, text: str) -> None:
        # A closed pipe or terminal ends the output, not the run.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


class _Run:
    """The contents of the progress line, updated with each event."""

    def __init__(self) -> None:
        self._iteration = 0
        self._train_iters: int | None = None
        self._loss: float | None = None
        self._rate: float | None = None
        self._plan: shape.Plan | None = None
        self._places: dict[int, str] = {}
        """Each worker's machine and GPU, in words."""
        self._dead: set[int] = set()
        """Workers of the plan in force that have died."""
        self._died_at: float | None = None
        """Time of the first death since an iteration was last completed after a death."""
        self._saving = False
        self._epoch = 0
        self._recovered = 0

    @singledispatchmethod
    def feed(self, event: Event) -> list[str]:
        """Update the contents; returns the permanent lines to print."""
        return lines_of(event, self._places)

    def line(self) -> str:
        """The progress line; empty before there is anything to show."""
        if self._plan is None and not self._iteration:
            return ""
        parts = [
            f"iteration {self._iteration}" + (f"/{self._train_iters}" if self._train_iters is not None else ""),
            *([f"loss {self._loss:.4f}"] if self._loss is not None else []),
            *([f"{self._rate:.1f} samples/s"] if self._rate is not None else []),
            *([self._workers(self._plan)] if self._plan is not None else []),
            f"epoch {self._epoch}",
            *([f"recovered {self._recovered}"] if self._recovered else []),
        ]
        return "  ".join(parts)

    def _workers(self, plan: shape.Plan) -> str:
        standbys = shape.standbys(plan) - self._dead
        lost = shape.working(plan) & self._dead
        working = f"{count(len(shape.working(plan) - self._dead), 'worker')} ({shape.describe(plan)}"
        # Until the next plan is in force, the old shape is shown, less the dead workers.
        hole = f" less {len(lost)}" if lost else ""
        return f"{working}{hole}{f', {count(len(standbys), "standby")}' if standbys else ''})"

    @feed.register
    def _job(self, event: Job) -> list[str]:
        self._train_iters = event.train_iters
        return []

    @feed.register
    def _epoch_started(self, event: EpochStarted) -> list[str]:
        self._plan = event.plan
        self._epoch = event.epoch or 0
        self._dead = set()
        return []

    @feed.register
    def _iteration_done(self, event: Iteration) -> list[str]:
        self._iteration = event.iteration
        self._loss = next(iter((event.loss or {}).values()), self._loss)
        if event.samples and event.duration_s:
            self._rate = event.samples / event.duration_s
        return []

    @feed.register
    def _worker_started(self, event: WorkerStarted) -> list[str]:
        if event.worker is not None:
            self._places[event.worker] = where(event)
        return []

    @feed.register
    def _worker_dead(self, event: WorkerDead) -> list[str]:
        if event.dead in self._dead:
            return []
        self._dead.add(event.dead)
        line = f"{worker_at(event.dead, self._places)} died ({event.cause})"
        if event.died_at is None:
            return [line]
        self._died_at = event.died_at if self._died_at is None else min(event.died_at, self._died_at)
        noticed_at = event.time if event.noticed_at is None else event.noticed_at
        return [f"{line}, noticed after {duration(noticed_at - event.died_at)}"]

    @feed.register
    def _recovery(self, event: Recovery) -> list[str]:
        self._recovered += 1
        began = event.broken_at if self._died_at is None else self._died_at
        ended = event.time if event.resumed_at is None else event.resumed_at
        took = f" in {duration(ended - began)}" if began is not None else ""
        plan = self._plan if self._epoch == event.to_epoch else None
        return [f"recovered{took}: {_outcome(plan, event)}"]

    @feed.register
    def _first_step(self, event: FirstStep) -> list[str]:
        # Each worker may write this event; only the first is shown.
        if self._died_at is None:
            return []
        took = event.time - self._died_at
        self._died_at = None
        return [f"iteration {event.iteration} done {duration(took)} after the death"]

    @feed.register
    def _emergency_checkpoint(self, event: EmergencyCheckpoint) -> list[str]:
        # Each survivor writes its part; one line is enough.
        if self._saving:
            return []
        self._saving = True
        state = "all state" if event.complete else "INCOMPLETE state"
        command = command_for(event.path) if event.complete else ""
        how = f"; go on from it with {command}" if command else ""
        return [f"no plan is left; survivors wrote {state} of iteration {event.iteration}: {event.path}{how}"]


def _outcome(plan: shape.Plan | None, recovery: Recovery) -> str:
    """The result of a recovery, for example "1 replica, 3 standbys, 0 bytes moved, resumed after iteration 10"."""
    parts = []
    if plan is not None:
        parts += [count(len(plan["replicas"]), "replica")]
        parts += [count(len(shape.standbys(plan)), "standby")]
    if recovery.bytes_moved is not None:
        parts += [f"{size(recovery.bytes_moved)} moved"]
    return ", ".join([*parts, f"resumed after iteration {recovery.resumed_iteration}"])
