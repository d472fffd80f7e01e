# SPDX-License-Identifier: Apache-2.0
"""Runs each case in a process of its own: one that hangs or crashes has failed, and the others go on.

The process is forked, so that what the caller has imported is there; the caller must not have used the device. Imports
psutil and the standard library.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Final

import psutil
from setting import Row, Setting

MARK: Final = "GPU_CHECK_CASE"
"""An environment variable by which all processes of a case are found, whoever their parent is by now."""
LEAST_SHARE: Final = 0.5
"""A case begins if this share of its limit is left: most cases take much less than their limit."""
TAIL_LINES: Final = 8
KILL_S: Final = 10.0
_FORK: Final = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Part:
    """Cases that belong together.

    Attributes:
        call: in which of the three calls it runs.
        run: the findings of a case, by its name.
        cases: their names, which no other part has.
        limit_s: the longest that a case may take on a device.
        beside: whether its cases measure no speed, so that they can run beside each other.
    """

    name: str
    call: int
    run: Callable[[Setting, str], Row]
    cases: Collection[str]
    limit_s: float
    what: str
    beside: bool = False


def run_cases(part: Part, names: Sequence[str], setting: Setting, beside: int) -> Generator[Row, None, None]:
    """The findings of cases in the order in which they end.

    Args:
        beside: how many may run at the same time.
    """
    waiting, running = deque(names), list[CaseProcess]()
    try:
        while waiting or running:
            while waiting and len(running) < beside:
                name = waiting.popleft()
                if setting.seconds_left() < LEAST_SHARE * setting.limit(part.limit_s):
                    yield {"case": name, "ok": False, "error": "no time left"}
                else:
                    running.append(CaseProcess(part, name, setting))
            if running:
                ended = _first_to_end(running)
                running.remove(ended)
                yield ended.findings()
    finally:
        for each in running:
            each.end()


class CaseProcess:
    """A case that runs.

    Attributes:
        ends_at: monotonic time at which it is ended.
    """

    def __init__(self, part: Part, name: str, setting: Setting) -> None:
        self._name, self._begun = name, time.monotonic()
        self._limit = min(setting.limit(part.limit_s), setting.seconds_left())
        self.ends_at = self._begun + self._limit
        self._result, self._log = (setting.out / f"{part.name}-{name}.{end}" for end in ("json", "log"))
        self._mark = f"{os.getpid()}/{part.name}/{name}"
        self._process = _FORK.Process(target=self._run, args=(part, setting))
        self._process.start()

    @property
    def sentinel(self) -> int:
        """Can be read once the process has ended."""
        return self._process.sentinel

    def findings(self) -> Row:
        """What it found, once it has ended or its time is over; nothing of it runs afterwards."""
        late = self._process.is_alive()
        seconds = time.monotonic() - self._begun
        self.end()
        if self._result.exists():
            row: Row = json.loads(self._result.read_text())
        else:
            code = self._process.exitcode
            error = f"still ran after {self._limit:.0f} s" if late else f"ended with code {code}"
            row = {"ok": False, "error": error, "log": _tail(self._log)}
        return {"case": self._name, **row, "seconds": round(seconds, 2)}

    def end(self) -> None:
        """Kill what still runs of it, and wait until it has ended."""
        deadline = time.monotonic() + KILL_S
        self._process.kill()
        self._process.join()
        while (left := _marked(self._mark)) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=1.0)

    def _run(self, part: Part, setting: Setting) -> None:
        """What the process does."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        os.environ[MARK] = self._mark
        with self._log.open("w") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        try:
            row = part.run(setting, self._name)
        except Exception as error:
            row = {"ok": False, "error": f"{type(error).__name__}: {error}"[:300]}
        unfinished = self._result.with_suffix(".part")
        unfinished.write_text(json.dumps(row))
        unfinished.rename(self._result)
        sys.stdout.flush()
        # Threads that wait for the device would keep the process alive.
        os._exit(0)


def _first_to_end(running: Sequence[CaseProcess]) -> CaseProcess:
    """The first that ends or is out of time."""
    first = min(running, key=lambda each: each.ends_at)
    ready = connection.wait([each.sentinel for each in running], max(0.0, first.ends_at - time.monotonic()))
    return next((each for each in running if each.sentinel in ready), first)


def _marked(mark: str) -> list[psutil.Process]:
    """The processes that a case has started and that still run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _tail(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-TAIL_LINES:] if log.exists() else []
