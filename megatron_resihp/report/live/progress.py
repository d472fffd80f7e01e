# SPDX-License-Identifier: Apache-2.0
"""Events, as they come -> a progress line that shows a run is alive, and one line for each thing that befell it.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from typing import TextIO

from megatron_resihp.events import log as names
from megatron_resihp.events.log import Event
from megatron_resihp.events.nonfinite import number
from megatron_resihp.events.schema import problems
from megatron_resihp.report.run import shape
from megatron_resihp.report.words import count, duration, listing, size, verdict, where, worker_at

INTERVAL_S = 10.0
"""Seconds between two progress lines where lines can't be rewritten, as in a file."""

CLEAR_TO_END = "\x1b[K"


class Progress:
    """Feed it every event of a run, in order and from any thread; close it at the end.

    On a terminal the progress line rewrites itself; elsewhere one is written at most every `interval_s`
    seconds. An event that it can't read is passed over: showing progress must not end a run.
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
        if problems(event):
            return
        with self._lock:
            for line in self._run.feed(event):
                self._say(line)
            # Where lines stay, one that is older than the news above it would mislead.
            if self._isatty or event["event"] in (names.EPOCH_STARTED, names.ITERATION):
                self._draw()

    def close(self) -> None:
        """Leave the last state of the run as a line of its own."""
        with self._lock:
            self._draw(last=True)
            if self._isatty and self._drawn:
                self._write("\n")
            self._drawn = ""

    def _say(self, line: str) -> None:
        """A line that stays; the progress line goes on below it."""
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
        # A closed pipe or a terminal that is gone ends the showing, not the run.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


class _Run:
    """What the progress line says, kept up to date event by event."""

    def __init__(self) -> None:
        self._iteration = 0
        self._train_iters: int | None = None
        self._loss: float | None = None
        self._rate: float | None = None
        self._plan: shape.Plan | None = None
        self._places: dict[int, str] = {}
        """Where workers run."""
        self._dead: set[int] = set()
        """Workers of the plan in force that have died."""
        self._died_at: float | None = None
        """The first death since the last iteration that was completed after one."""
        self._salvaging = False
        self._epoch = 0
        self._recovered = 0
        self._handlers: dict[str, Callable[[Event], list[str]]] = {
            names.JOB: self._job,
            names.EPOCH_STARTED: self._epoch_started,
            names.ITERATION: self._iteration_done,
            names.WORKER_STARTED: self._worker_started,
            names.WORKER_DEAD: self._worker_dead,
            names.WORKER_RESTARTED: _worker_restarted,
            names.WORKER_WAITING: _worker_waiting,
            names.EXPOSED: lambda e: [e["said"]],
            names.LINK_FAILED: lambda e: [f"{e['reason']}; {count(len(e['left_out']), 'worker')} left out"],
            names.NODE_LEFT: lambda e: [f"node {e['node']} has left with {count(len(e['left']), 'worker')}"],
            names.WORKER_FAILED: lambda e: [f"{self._who(e['failed'])} raised: {e['error']}"],
            names.PLAN_FAILED: self._plan_failed,
            names.RECOVERY: self._recovery,
            names.PLAN_CHANGE: lambda e: [
                f"change {e['number']} of the plan, {e['why']}:",
                *(f"  {line}" for line in e["changes"]),
            ],
            names.CHANGE_REFUSED: lambda e: [f"no change of the plan, {e['why']}: {e['reason']}"],
            names.RECONFIGURATION: _reconfiguration,
            names.CHANGE_MEASURED: _change_measured,
            names.PLANNED: _planned,
            names.WOULD_CHANGE: lambda e: [f"another plan would pay: {e['why']}; --resihp-act act would take it"],
            names.PROPOSAL: lambda e: [f"another plan would pay: {e['why']}; see `resihp apply`: {e['path']}"],
            names.NO_PLAN: lambda e: [f"the planner has no other plan: {e['reason']}"],
            names.POLICY_FAILED: lambda e: [f"the policy gave up, training goes on: {e['error']}"],
            names.FIRST_STEP: self._first_step,
            names.DRILL: self._injection,
            names.DRILL_SET: self._injection_set,
            names.DRILL_REFUSED: self._injection_refused,
            names.EVALUATION: self._evaluation,
            names.CHECKPOINT: self._checkpoint,
            names.SALVAGE: self._salvage,
            names.STALL: _stall,
            names.VERDICT: lambda e: [f"iteration {e['iteration']}: {verdict(e, self._places)}"],
            names.SUSPICION: self._suspicion,
            names.VALIDATION: lambda e: [
                f"iteration {e['iteration']}: worker {e['worker']} was tested for {duration(number(e['seconds']))}"
            ],
            names.NOTICE: _notice,
            names.DETECTION_RESUMED: _detection_resumed,
            names.DETECTION_FAILED: lambda e: [f"the detector's {e['part']} gave up, training goes on: {e['error']}"],
            names.RUN_FINISHED: self._run_finished,
        }

    def feed(self, event: Event) -> list[str]:
        """Update; the lines to print for good."""
        handler = self._handlers.get(event["event"])
        return handler(event) if handler else []

    def line(self) -> str:
        """The progress line; empty as long as there is nothing to say."""
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
        # Until the next plan is in force the old shape stands, with a hole in it.
        hole = f" less {len(lost)}" if lost else ""
        return f"{working}{hole}{f', {count(len(standbys), "standby")}' if standbys else ''})"

    def _job(self, event: Event) -> list[str]:
        self._train_iters = event["train_iters"]
        self._iteration = max(self._iteration, event.get("first_iteration") or 0)
        return []

    def _epoch_started(self, event: Event) -> list[str]:
        self._plan = event["plan"]
        self._epoch = event.get("epoch") or 0
        self._dead = set()
        return []

    def _iteration_done(self, event: Event) -> list[str]:
        self._iteration = event["iteration"]
        self._loss = next(map(number, (event.get("loss") or {}).values()), self._loss)
        if event.get("samples") and event.get("duration_s"):
            self._rate = event["samples"] / number(event["duration_s"])
        return []

    def _worker_started(self, event: Event) -> list[str]:
        if event.get("worker") is not None:
            self._places[event["worker"]] = where(event)
        return []

    def _plan_failed(self, event: Event) -> list[str]:
        follows = "complete uniform replicas" if event.get("number") is None else "the plan before"
        who = self._who(event["failed"])
        return [f"the plan's first step failed, so {follows} will follow; {who} raised: {event['error']}"]

    def _who(self, worker: int) -> str:
        return worker_at(worker, self._places)

    def _worker_dead(self, event: Event) -> list[str]:
        if event["dead"] in self._dead:
            return []
        self._dead.add(event["dead"])
        line = f"{self._who(event['dead'])} died ({event['cause']})"
        if event.get("died_at") is None:
            return [line]
        died_at = number(event["died_at"])
        self._died_at = died_at if self._died_at is None else min(died_at, self._died_at)
        noticed_at = number(event["time"] if event.get("noticed_at") is None else event["noticed_at"])
        return [f"{line}, noticed after {duration(noticed_at - died_at)}"]

    def _recovery(self, event: Event) -> list[str]:
        self._recovered += 1
        began = event.get("broken_at") if self._died_at is None else self._died_at
        ended = event["time"] if event.get("resumed_at") is None else event["resumed_at"]
        took = f" in {duration(number(ended) - number(began))}" if began is not None else ""
        plan = self._plan if self._epoch == event["to_epoch"] else None
        return [f"recovered{took}: {_outcome(plan, event)}"]

    def _first_step(self, event: Event) -> list[str]:
        # Each worker may write this event: the first of them is news.
        if self._died_at is None:
            return []
        took = number(event["time"]) - self._died_at
        self._died_at = None
        return [f"iteration {event['iteration']} done {duration(took)} after the death"]

    def _injection(self, event: Event) -> list[str]:
        iteration = "" if event.get("iteration") is None else f" at iteration {event['iteration']}"
        point = f" ({event['point']})" if event.get("point") else ""
        return [f"injected: {event['action']} {event['target']}{iteration}{point}"]

    def _injection_set(self, event: Event) -> list[str]:
        if not event["workers"]:
            return ["injected: all workers and links at full speed"]
        name = "worker" if len(event["workers"]) == 1 else "link"
        return [f"injected: {name} {'-'.join(map(str, event['workers']))} at {number(event['factor']):g} of its speed"]

    def _injection_refused(self, event: Event) -> list[str]:
        return [f"injection for {'-'.join(map(str, event['workers']))} not set: {event['reason']}"]

    def _evaluation(self, event: Event) -> list[str]:
        losses = listing(f"{name} {number(value):.4f}" for name, value in event["loss"].items())
        return [f"evaluation after iteration {event['iteration']}: {losses}"] if event["loss"] else []

    def _checkpoint(self, event: Event) -> list[str]:
        took = f" in {duration(number(event['seconds']))}" if event.get("seconds") is not None else ""
        return [f"checkpoint of iteration {event['iteration']} written{took}: {event['path']}"]

    def _salvage(self, event: Event) -> list[str]:
        # Each survivor writes its part; one line is enough.
        if self._salvaging:
            return []
        self._salvaging = True
        state = "all state" if event["complete"] else "INCOMPLETE state"
        return [f"no plan is left; survivors wrote {state} of iteration {event['iteration']}: {event['path']}"]

    def _suspicion(self, event: Event) -> list[str]:
        workers = listing(map(self._who, event["workers"]))
        if event["tested"]:
            return [f"iteration {event['iteration']}: the test of {workers} named nobody; they stay under suspicion"]
        speed = f"{100 * event['speed']:.0f} %"
        slow = f"one of {workers} runs at {speed} of its healthy speed"
        return [f"iteration {event['iteration']}: {slow}; they are tested"]

    def _run_finished(self, event: Event) -> list[str]:
        if event["exit_code"] == 0:
            return []
        reason = f": {event['reason']}" if event.get("reason") else ""
        return [f"run ended with exit code {event['exit_code']}{reason}"]


def _worker_restarted(event: Event) -> list[str]:
    return [f"worker {event['restarted']} starts in place of worker {event['instead_of']}"]


def _worker_waiting(event: Event) -> list[str]:
    return [f"worker {event['waiting']} is ready to be taken in"]


def _notice(event: Event) -> list[str]:
    workers = listing(f"worker {worker}" for worker in event["workers"])
    said = f"iteration {event['iteration']}: {event['what'].replace('_', ' ')} held up {workers}"
    if (event.get("times") or 1) == 1:
        return [f"{said} for {duration(number(event['seconds']))}"]
    total, longest = (duration(number(event[name])) for name in ("total_s", "longest_s"))
    return [f"{said}; {event['times']} iterations so far, for {total} in all, {longest} at most"]


def _stall(event: Event) -> list[str]:
    lasted, usual = (duration(number(event[name])) for name in ("seconds", "usual_s"))
    if event["over"]:
        return [f"iteration {event['iteration'] + 1} done after {lasted}; one usually takes {usual}"]
    meanwhile = f"; {event['meanwhile']} under way or due" if event.get("meanwhile") else ""
    after = f"after iteration {event['iteration']}"
    return [f"no iteration finished for {lasted} {after}; one usually takes {usual}{meanwhile}"]


def _planned(event: Event) -> list[str]:
    if event.get("instead_of"):
        return [f"planned by {event['strategy']} instead of {event['instead_of']}: {event.get('reason')}"]
    seconds, when = event.get("planning_s"), " ahead" if event.get("made_ahead") else ""
    return [f"planned{when} by {event['strategy']}{f' in {duration(number(seconds))}' if seconds is not None else ''}"]


def _reconfiguration(event: Event) -> list[str]:
    when = f"after iteration {event['resumed_iteration']}"
    return [f"change {event['number']} done {when}; stood still for {duration(number(event['stood_still_s']))}"]


def _change_measured(event: Event) -> list[str]:
    before, after = (duration(number(event[name])) for name in ("before_s", "after_s"))
    return [f"change {event['number']}: iterations took {before} before it, and take {after} now"]


def _detection_resumed(event: Event) -> list[str]:
    if not event["fits"]:
        return [f"the costs in {event['path']} are not this job's: slow workers are looked for after the usual warm-up"]
    return [f"slow workers are looked for from iteration {event['iteration'] + 1} on, by the costs in {event['path']}"]


def _outcome(plan: shape.Plan | None, recovery: Event) -> str:
    """What a recovery led to, for example "1 replica, 3 standbys, 0 bytes moved, resumed after iteration 10"."""
    parts = []
    if plan is not None:
        parts += [count(len(plan["replicas"]), "replica")]
        parts += [count(len(shape.standbys(plan)), "standby")]
    if recovery.get("bytes_moved") is not None:
        parts += [f"{size(recovery['bytes_moved'])} moved"]
    return ", ".join([*parts, f"resumed after iteration {recovery['resumed_iteration']}"])
