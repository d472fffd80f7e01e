# SPDX-License-Identifier: Apache-2.0
"""Really slows worker processes: stops and continues each in short slices, so that it runs a given share of the time.

May import: the standard library.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PERIOD_S: Final = 0.02
"""A running and a stopped slice together."""
LONGEST_STOP_S: Final = 0.2
"""A slice that ends late is made up for, but not by a stop longer than this."""


@dataclass
class DutyCycle:
    """How long the slices of a process are that shall run a share `speed` < 1 of the time.

    It keeps an account of how long they really were, so that lateness does not add up.
    """

    speed: float
    _owed_s: float = 0.0
    """Seconds for which the process has still to be stopped, given how long it has run."""

    def stop_after(self, ran_s: float) -> float:
        """How long to stop the process after it has run for so many seconds."""
        self._owed_s = min(self._owed_s + ran_s * (1.0 - self.speed) / self.speed, LONGEST_STOP_S)
        return max(self._owed_s, 0.0)

    def run_after(self, stopped_s: float) -> float:
        """How long to let the process run after it was stopped for so many seconds."""
        self._owed_s -= stopped_s
        return PERIOD_S * self.speed + max(-self._owed_s, 0.0) * self.speed / (1.0 - self.speed)


class Process:
    """A child that is signalled; the code that waits for its end must `forget` it at the injector first."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._pidfd = pidfd

    def stop(self) -> bool:
        """Stop it; False if it is stopped already, by another process, or is dead."""
        try:
            if self._stat.read_text().rpartition(")")[2].split()[0] in "TtZX":
                return False
        except OSError:
            return False
        return self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> bool:
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        return True


@dataclass
class _Slice:
    """The slice that a process is in, on the monotonic clock."""

    process: Process
    cycle: DutyCycle
    began: float
    ends: float
    stopped: bool = False

    def turn(self, now: float) -> None:
        """Begin the next slice."""
        lasted = now - self.began
        if self.stopped:
            self.process.go_on()
            self.stopped, self.ends = False, now + self.cycle.run_after(lasted)
        else:
            self.stopped = self.process.stop()
            self.ends = now + (self.cycle.stop_after(lasted) if self.stopped else PERIOD_S)
        self.began = now

    def end(self) -> None:
        if self.stopped:
            self.process.go_on()


class SlowdownInjector:
    """Slices the workers of one node, in a thread that is started when the first one is slowed.

    No worker is left stopped: neither when it is cleared or forgotten, nor when this ends. (When the agent is killed,
    the kernel kills its workers, stopped ones too.)

    Args:
        processes: pid and pidfd of each worker.
    """

    def __init__(self, processes: Mapping[int, tuple[int, int]]) -> None:
        self._processes = {number: Process(*ids) for number, ids in processes.items()}
        self._slices: dict[int, _Slice] = {}
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def slow(self, speeds: Mapping[int, float]) -> None:
        """From now on these workers run at these speeds, and all others without stops."""
        now = time.monotonic()
        with self._changed:
            for number in list(self._slices):
                if self._slices[number].cycle.speed != speeds.get(number):
                    self._slices.pop(number).end()
            for number, speed in speeds.items():
                if number in self._processes and number not in self._slices:
                    cycle = DutyCycle(speed)
                    self._slices[number] = _Slice(self._processes[number], cycle, now, now + cycle.run_after(0.0))
            self._start_if_needed()
            self._changed.notify()

    def add(self, number: int, pid: int, pidfd: int) -> None:
        """Add a worker that may be slowed."""
        with self._changed:
            self._processes[number] = Process(pid, pidfd)

    def forget(self, number: int) -> None:
        """Signal this worker no more."""
        with self._changed:
            self._processes.pop(number, None)
            if number in self._slices:
                self._slices.pop(number).end()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            while self._slices:
                self._slices.popitem()[1].end()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _start_if_needed(self) -> None:
        if self._slices and self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="resihp-slices", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                ends = min((each.ends for each in self._slices.values()), default=None)
                self._changed.wait(None if ends is None else max(ends - time.monotonic(), 0.0))
                now = time.monotonic()
                for each in self._slices.values():
                    if each.ends <= now:
                        each.turn(now)
