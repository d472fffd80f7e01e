# SPDX-License-Identifier: Apache-2.0
"""The run's event log: the names of its events, one writer, one reader.

One JSON object a line in RUN_DIR/events.jsonl; `schema` says what each holds.
May import: the standard library.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from megatron_resihp.events.nonfinite import jsonable

Event = dict[str, Any]

FILE_NAME: Final = "events.jsonl"

RUN_STARTED: Final = "run_started"
JOB: Final = "job"
EPOCH_STARTED: Final = "epoch_started"
ITERATION: Final = "iteration"
AGREED: Final = "agreed"
SAMPLES: Final = "samples"
WORKER_STARTED: Final = "worker_started"
WORKER_DEAD: Final = "worker_dead"
WORKER_FAILED: Final = "worker_failed"
PLAN_FAILED: Final = "plan_failed"
WORKER_RESTARTED: Final = "worker_restarted"
WORKER_WAITING: Final = "worker_waiting"
EXPOSED: Final = "exposed"
NODE_LEFT: Final = "node_left"
EPOCH_BROKEN: Final = "epoch_broken"
PHASE: Final = "phase"
RECOVERY: Final = "recovery"
PLAN_CHANGE: Final = "plan_change"
CHANGE_REFUSED: Final = "change_refused"
RECONFIGURATION: Final = "reconfiguration"
MODEL: Final = "model"
PLANNED: Final = "planned"
CHANGE_MEASURED: Final = "change_measured"
WOULD_CHANGE: Final = "would_change"
PROPOSAL: Final = "proposal"
POLICY_FAILED: Final = "policy_failed"
NO_PLAN: Final = "no_plan"
FIRST_STEP: Final = "first_step"
DRILL: Final = "drill"
DRILL_SET: Final = "drill_set"
DRILL_REFUSED: Final = "drill_refused"
EMULATION: Final = "emulation"
OPTIMIZER_COPY: Final = "optimizer_copy"
EVALUATION: Final = "evaluation"
RESOURCES: Final = "resources"
DIGEST: Final = "digest"
CHECKPOINT: Final = "checkpoint"
SALVAGE: Final = "salvage"
STALL: Final = "stall"
VERDICT: Final = "verdict"
SUSPICION: Final = "suspicion"
VALIDATION: Final = "validation"
NOTICE: Final = "notice"
DETECTION_RESUMED: Final = "detection_resumed"
DETECTION: Final = "detection"
DETECTION_FAILED: Final = "detection_failed"
LINK_FAILED: Final = "link_failed"
MESSAGE_DROPPED: Final = "message_dropped"
LOG_GAP: Final = "log_gap"
RUN_FINISHED: Final = "run_finished"

PHASES: Final = ("notice", "abort", "agree", "rebuild", "migrate", "data", "ready", "first_step")
"""The parts of a recovery, in the order in which a worker goes through them."""


class EventLog:
    """Appends events to a file; any thread may write.

    Every event is one write to a file opened for appending, so that a killed process leaves whole lines
    and several processes of one node may share the file.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self._clock = clock
        self._lock = threading.Lock()
        self._file: int | None = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._torn = not _ends_with_newline(self._file)
        """A writer died in the middle of a line, or had no room for the rest: it must not swallow the next."""

    def write(self, event: Mapping[str, Any]) -> None:
        """Append one event; `time` is filled in where the caller left it out.

        Raises:
            OSError: it can't be written; later ones perhaps can.
        """
        line = json.dumps(jsonable({"time": self._clock(), **event}), default=_plain, allow_nan=False)
        with self._lock:
            if self._file is None:
                raise ValueError(f"{self.path} is closed; no event can be written to it")
            before, self._torn = b"\n" if self._torn else b"", True
            _write_all(self._file, before + line.encode() + b"\n")
            self._torn = False

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EventFile(NamedTuple):
    """What `read_events` found: the events and the lines that are none."""

    events: list[Event]
    malformed: list[int]
    """Numbers, from 1, of the lines that hold no event; a cut-off last line is not among them."""
    truncated: bool
    """The last line was cut off: its writer died, or is still writing."""
    damaged: bool
    """Lines of the last run hold no event. Those of earlier runs don't count, nor does a cut-off last line, as all that
    came before it is there."""


def read_events(path: str | os.PathLike[str]) -> EventFile:
    """Read an event log that may have been cut off or damaged; raises OSError if it cannot be read at all."""
    lines = Path(path).read_bytes().split(b"\n")
    unfinished = lines.pop()
    events: list[Event] = []
    malformed: list[int] = []
    before_last_run = 0
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        event = _parse(line)
        if event is None:
            malformed.append(line_number)
        else:
            events.append(event)
            if event["event"] == RUN_STARTED:
                before_last_run = len(malformed)
    last = _parse(unfinished)
    if last is not None:
        events.append(last)
    truncated = bool(unfinished.strip()) and last is None
    return EventFile(events, malformed, truncated, damaged=len(malformed) > before_last_run)


def _parse(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(event, dict) and isinstance(event.get("event"), str):
        return event
    return None


def _plain(value: Any) -> Any:
    """A JSON value for what the json module does not know, such as a NumPy or torch scalar or a path."""
    item = getattr(value, "item", None)
    return jsonable(item()) if callable(item) else str(value)


def _ends_with_newline(file: int) -> bool:
    size = os.fstat(file).st_size
    return size == 0 or os.pread(file, 1, size - 1) == b"\n"


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
