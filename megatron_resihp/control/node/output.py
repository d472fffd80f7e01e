# SPDX-License-Identifier: Apache-2.0
"""Where the workers' output goes: a file each, or this process's standard output with each line marked, or both.

May import: the standard library.
"""

from __future__ import annotations

import os
import queue
import selectors
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO

MODES: Final = ("file", "prefix", "both")
LAST_LINES: Final = 30
READ_BYTES: Final = 65536
LOOK_S: Final = 0.2
"""How soon a worker that is started later is read from."""
TAIL_BYTES: Final = 65536


@dataclass
class _Stream:
    """One worker's output. `pipe`: what we read it from; `unfinished`: bytes of a line whose end is to come."""

    worker: int
    path: Path | None = None
    starts_at: int = 0
    file: int | None = None
    pipe: int | None = None
    unfinished: bytes = b""
    last: deque[bytes] = field(default_factory=lambda: deque(maxlen=LAST_LINES))


class Outputs:
    """The output of one node's workers.

    Files are written by the workers themselves, so that nothing is lost or slowed down; for marked lines a thread reads
    a pipe per worker. It is not the agent's own: a terminal that is held up must not hold up the watching.

    Args:
        mode: of MODES.
        directory: of the files.
        terminal: takes the lines; never fails, as of `streams.unfailing`.
    """

    def __init__(self, mode: str, directory: Path, terminal: TextIO) -> None:
        self._mode = mode
        self._directory = directory
        self._terminal = terminal
        self._streams: dict[int, _Stream] = {}
        self._opened: queue.SimpleQueue[_Stream] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing, self._stopping = threading.Event(), threading.Event()

    def open(self, worker: int) -> int:
        """A file descriptor for a worker to write to; the caller closes it when the worker has it. In one thread."""
        stream = self._streams[worker] = _Stream(worker)
        if self._mode != "prefix":
            stream.path = self._directory / f"worker_{worker}.log"
            stream.file = os.open(stream.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            stream.starts_at = os.fstat(stream.file).st_size
        if self._mode == "file":
            assert stream.file is not None
            given, stream.file = stream.file, None
            return given
        stream.pipe, given = os.pipe()
        os.set_blocking(stream.pipe, False)
        self._opened.put(stream)
        return given

    def start(self) -> None:
        """Begin to pass on what the workers write; after all that the job begins with have been started."""
        if self._mode != "file":
            self._thread = threading.Thread(target=self._relay, name="resihp-output", daemon=True)
            self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Pass on what is left. A process that a worker has left behind may still hold a pipe: the time is bounded."""
        if self._thread is not None:
            self._closing.set()
            self._thread.join(timeout_s)
            self._stopping.set()
            self._thread.join(timeout_s)

    def last_lines(self, worker: int) -> list[str]:
        """The end of what a worker wrote."""
        stream = self._streams[worker]
        if stream.path is not None and self._mode == "file":
            lines = _tail(stream.path, stream.starts_at)
        else:
            lines = list(stream.last)
        return [line.decode(errors="replace") for line in lines[-LAST_LINES:]]

    def _relay(self) -> None:
        with selectors.DefaultSelector() as selector:
            while not self._stopping.is_set():
                while not self._opened.empty():
                    stream = self._opened.get()
                    assert stream.pipe is not None
                    selector.register(stream.pipe, selectors.EVENT_READ, stream)
                if self._closing.is_set() and not selector.get_map():
                    break
                for key, _ in selector.select(LOOK_S):
                    if not self._pass_on(key.data):
                        selector.unregister(key.fileobj)
                        _close(key.data)
        for stream in self._streams.values():
            _close(stream)

    def _pass_on(self, stream: _Stream) -> bool:
        """Read some output; returns whether there is more to come."""
        assert stream.pipe is not None
        data = os.read(stream.pipe, READ_BYTES)
        if stream.file is not None:
            _write_all(stream.file, data)
        *lines, stream.unfinished = (stream.unfinished + data).split(b"\n")
        if not data and stream.unfinished:
            lines.append(stream.unfinished)
        stream.last.extend(lines)
        self._terminal.write("".join(f"[w{stream.worker}] {line.decode(errors='replace')}\n" for line in lines))
        self._terminal.flush()
        return bool(data)


def _close(stream: _Stream) -> None:
    for number in (stream.pipe, stream.file):
        if number is not None:
            os.close(number)
    stream.pipe = stream.file = None


def _tail(path: Path, starts_at: int) -> list[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(max(starts_at, path.stat().st_size - TAIL_BYTES))
            return file.read().splitlines()
    except OSError:
        return []


def _write_all(file: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(file, data) :]
    except OSError:
        # A full disk ends the log, not the job.
        pass
