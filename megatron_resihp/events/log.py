# SPDX-License-Identifier: Apache-2.0
"""The run's event log: one writer, one reader.

One JSON object a line in RUN_DIR/events.jsonl; docs/events.md says what each holds.
May import: the standard library and this package's modules.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from megatron_resihp.events.codec import UnusableEventError, plain, read_event
from megatron_resihp.events.event import NOT_YET, Event
from megatron_resihp.events.job import RunStarted
from megatron_resihp.events.nonfinite import jsonable
from megatron_resihp.events.own_file import in_place_of
from megatron_resihp.events.training import Iteration

FILE_NAME: Final = "events.jsonl"


class EventLog:
    """Appends events to a file; any thread may write.

    Every event is one write to a file opened for appending, so that a killed process leaves whole lines
    and several processes of one node may share the file.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self._clock = clock
        self._lock = threading.Lock()
        self._file: int | None = _opened(self.path)
        self._torn = not _ends_with_newline(self._file)
        """A writer died in the middle of a line, or had no room for the rest: it must not swallow the next."""

    def write(self, event: Event) -> None:
        """Append one event; `time` is filled in where the caller left it out.

        Raises:
            OSError: it can't be written; later ones perhaps can.
        """
        line = _line_of(event, self._clock())
        with self._lock:
            if self._file is None:
                raise ValueError(f"{self.path} is closed; no event can be written to it")
            before, self._torn = b"\n" if self._torn else b"", True
            _write_all(self._file, before + line.encode() + b"\n")
            self._torn = False

    def take_over(self) -> None:
        """Go on in a file of its own, with all that is in this one, and in its place; see `own_file`.

        Raises:
            OSError: that can't be, and this file is gone on with.
        """
        with self._lock:
            file = in_place_of(self.path, lambda own: _opened(Path(shutil.copyfile(self.path, own))))
            before, self._file = self._file, file
            self._torn = not _ends_with_newline(file)
        if before is not None:
            os.close(before)

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
    ignored: Mapping[str, int]
    """How many events were left out, by what is wrong with them."""


def read_events(path: str | os.PathLike[str], last_bytes: int | None = None) -> EventFile:
    """Read an event log that may have been cut off or damaged; raises OSError if it cannot be read at all.

    Args:
        last_bytes: read only so many, whose first line may lack its beginning; None: the whole log.
    """
    with Path(path).open("rb") as file:
        if last_bytes is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
        lines = file.read().split(b"\n")
    unfinished = lines.pop()
    events: list[Event] = []
    ignored: Counter[str] = Counter()
    malformed: list[int] = []
    before_last_run = 0
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        value = _parse(line)
        if value is None:
            malformed.append(line_number)
            continue
        _add(value, events, ignored)
        if value["event"] == RunStarted.name:
            before_last_run = len(malformed)
    last = _parse(unfinished)
    if last is not None:
        _add(last, events, ignored)
    truncated = bool(unfinished.strip()) and last is None
    return EventFile(events, malformed, truncated, len(malformed) > before_last_run, dict(ignored))


class Logged:
    """Which events a log had when the process that wrote it was lost, by its end.

    Args:
        read_end: gives the last events of the log. Called once, when it is first asked.
    """

    def __init__(self, read_end: Callable[[], Sequence[Event]]) -> None:
        self._read_end = read_end

    def has(self, event: Event) -> bool:
        """Whether it had an event that has its time. A worker's events are written in order, so those from before its
        first one in the end are before the end. Of a worker that has none there, that is as good as certain of what is
        older than all."""
        lines, since = self._end
        return event.time < since.get(event.worker, since[None]) or _line_of(event) in lines

    @cached_property
    def _end(self) -> tuple[Set[str], Mapping[int | None, float]]:
        """Its lines, and the time of each worker's first event there; None: of all."""
        end = self._read_end()
        since: dict[int | None, float] = {None: min((event.time for event in end), default=0.0)}
        for event in end:
            if event.worker is not None:
                since.setdefault(event.worker, event.time)
        return {_line_of(event) for event in end}, since


def read_last_run[E: Event](path: str | os.PathLike[str], kind: type[E]) -> list[E]:
    """The events of one kind that a log has of its last run. Only their lines are parsed, so a long log takes little
    time. Raises OSError if it cannot be read at all."""
    names = [f'"{each.name}"'.encode() for each in (kind, RunStarted)]
    events: list[Event] = []
    with Path(path).open("rb") as file:
        for line in file:
            value = _parse(line) if any(name in line for name in names) else None
            if value is None:
                continue
            if value["event"] == RunStarted.name:
                events.clear()
            _add(value, events, Counter())
    return [event for event in events if isinstance(event, kind)]


def read_first_epoch(path: str | os.PathLike[str], most: int) -> list[Iteration]:
    """The last iterations that a log has of its last run's first epoch, at most so many.

    Other lines are not parsed, as in `read_last_run`, nor are those of more iterations. Raises OSError if it cannot be
    read at all.
    """
    named = b'"event": "%s"'
    begun, done = (named % kind.name.encode() for kind in (RunStarted, Iteration))
    lines: deque[bytes] = deque(maxlen=most)
    with Path(path).open("rb") as file:
        for line in file:
            if begun in line:
                lines.clear()
            elif done in line and b'"epoch": 0,' in line:
                lines.append(line)
    events: list[Event] = []
    for line in lines:
        if (value := _parse(line)) is not None:
            _add(value, events, Counter())
    return [event for event in events if isinstance(event, Iteration)]


def _line_of(event: Event, time: float = NOT_YET) -> str:
    return json.dumps(jsonable(plain(event, time)), default=_plain, allow_nan=False)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and isinstance(value.get("event"), str):
        return value
    return None


def _add(value: Mapping[str, Any], events: list[Event], ignored: Counter[str]) -> None:
    try:
        events.append(read_event(value))
    except UnusableEventError as error:
        ignored[str(error)] += 1


def _plain(value: Any) -> Any:
    """A JSON value for what the json module does not know, such as a NumPy or torch scalar or a path."""
    item = getattr(value, "item", None)
    return jsonable(item()) if callable(item) else str(value)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)


def _ends_with_newline(file: int) -> bool:
    size = os.fstat(file).st_size
    return size == 0 or os.pread(file, 1, size - 1) == b"\n"


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
