# SPDX-License-Identifier: Apache-2.0
"""Strikes a running job from outside, and lets it rest until those that died are back, for test_chaos.py."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from chaos_sequences import Sequence, Strike
from jobs import Job
from launched import is_alive

REST_S = 20.0
"""After which a job goes on although somebody has not come back: it may not stand still for 30 s."""


class Driver:
    """Watches a job's events and does what a sequence has from outside.

    Args:
        job: run with wishing_gpt.py, and with the wishes of `rests`.
    """

    def __init__(self, job: Job, sequence: Sequence) -> None:
        self._job = job
        self._sequence = sequence
        self._events = Tail(job)
        self._count: Counter[str] = Counter()
        self._due: list[tuple[float, Strike | int]] = []
        """When, and what: a strike, or a process to be continued."""
        self._strikes = list(sequence.strikes)
        self._rests = list(sequence.rests)
        self._rest_ends: float | None = None
        self._away: set[int] = set()
        """Workers that have been started anew, and are not ready yet, or are to be."""

    def look(self) -> None:
        """Act on what has happened since the last look."""
        now = time.monotonic()
        for event in self._events.more():
            self._hear(event, now)
        for due in [due for due in self._due if due[0] <= now]:
            self._due.remove(due)
            self._strike(due[1], now)
        if self._rest_ends is not None and (not self._away or now > self._rest_ends):
            self._rest_ends = None
            self._job.wish(f"go_on-{self._rests.pop(0)}")

    def _hear(self, event: dict[str, Any], now: float) -> None:
        name, places = event["event"], self._sequence.cast.workers
        for strike in [strike for strike in self._strikes if self._is_cue(strike, event)]:
            self._strikes.remove(strike)
            self._due.append((now + strike.delay_s, strike))
        self._count[name] += 1
        # An iteration whose reporter has died is told of when the next epoch is agreed on.
        if name in ("iteration", "agreed") and self._rests and event["iteration"] == self._rests[0] - 1:
            self._rest_ends = now + REST_S
        if name == "worker_dead":
            self._away.discard(event["dead"])
            if event["dead"] + places < places * (self._sequence.restarts + 1):
                self._away.add(event["dead"] + places)
        if name == "worker_waiting":
            self._away.discard(event["waiting"])

    def _is_cue(self, strike: Strike, event: dict[str, Any]) -> bool:
        if event["event"] != strike.after:
            return False
        number = event["iteration"] if strike.after == "iteration" else self._count[strike.after]
        return bool(number == strike.number)

    def _strike(self, what: Strike | int, now: float) -> None:
        if isinstance(what, int):
            _send(what, signal.SIGCONT)
            return
        pid = self._job.worker_pids().get(what.worker)
        if pid is None or what.worker in self._job.exits():
            return
        _send(pid, signal.SIGKILL if what.action == "kill" else signal.SIGSTOP)
        if what.action == "pause":
            self._due.append((now + what.pause_s, pid))


def _send(pid: int, number: signal.Signals) -> None:
    if is_alive(pid):
        os.kill(pid, number)


@dataclass
class Tail:
    """Reads the event log as it grows."""

    job: Job
    _offset: int = field(default=0, init=False)

    def more(self) -> list[dict[str, Any]]:
        """The events that have come since the last call."""
        path = self.job.events_path
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return [json.loads(line) for line in whole.split(b"\n") if line]
