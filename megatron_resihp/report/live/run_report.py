# SPDX-License-Identifier: Apache-2.0
"""Writes a running job's events to its log and the terminal. A failure of one ends neither the job nor the other.

May import: the standard library and this package's modules; rich only at the end.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import TextIO

from megatron_resihp.events.bus import EventBus
from megatron_resihp.events.event import Event, stamped
from megatron_resihp.events.job import LogGap, RunFinished
from megatron_resihp.events.log import FILE_NAME, EventLog, read_events
from megatron_resihp.report.live.progress import Progress
from megatron_resihp.report.run.summary import summarize_log


class RunReport:
    """Writes a run's events to its log, and shows them; `finish` prints the report of the whole run.

    Raises:
        OSError: the log can't be opened.
    """

    def __init__(self, run_dir: Path, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._log = EventLog(run_dir / FILE_NAME)
        self._progress = Progress(self._stream)
        self._lock = threading.Lock()
        self._missing = 0
        """Number of events missing in the log that no `log_gap` has reported yet."""
        self._missing_since = 0.0
        self._warned = False
        self._end: Event | None = None

    def follow(self, bus: EventBus) -> None:
        """Subscribe to the run's events, which come from any thread."""
        bus.subscribe(self._write, Event)
        bus.subscribe(self._progress.feed, Event)

    def take_over(self) -> None:
        """Write a log in which no coordinator before this one writes any more."""
        try:
            self._log.take_over()
        except OSError as error:
            print(f"resihp: {self._log.path} can't be copied ({error.strerror or error}); if the coordinator before "
                  "this one still writes there, lines may be damaged", file=sys.stderr, flush=True)  # fmt: skip

    def _write(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, RunFinished):
                self._end = event
            try:
                if self._missing:
                    self._log.write(self._gap())
                    self._missing = 0
                self._log.write(event)
            except OSError as error:
                self._miss(error)

    def finish(self) -> None:
        """Close the log, and print the report of the whole run and the number of missing events."""
        from megatron_resihp.report.console import console_for
        from megatron_resihp.report.run.terminal import render

        self._log.close()
        self._progress.close()
        found = read_events(self._log.path)
        if self._missing:
            found.events.append(stamped(self._gap(), time.time()))
            found.events.extend([self._end] if self._end is not None else [])
        render(summarize_log(found), console_for(self._stream))

    def _gap(self) -> LogGap:
        return LogGap(events=self._missing, since=self._missing_since)

    def _miss(self, error: OSError) -> None:
        if not self._missing:
            self._missing_since = time.time()
        self._missing += 1
        if not self._warned:
            self._warned = True
            why = error.strerror or error
            print(f"resihp: {self._log.path} can't be written ({why}); the job goes on, and what happens is told here "
                  "only until it can", file=sys.stderr, flush=True)  # fmt: skip
