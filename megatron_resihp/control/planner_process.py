"""The near end of the process that plans: asks it, and waits no longer than is good.

May import the standard library and this room's modules.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any, Final

REHEARSAL: Final = "rehearsal"
"""In a request: nobody waits for the answer."""
UNANSWERED: Final = "unanswered"
"""In an answer: it is not of the process, which has ended or taken too long."""


class PlannerProcess:
    """Starts with the first request, and again after one that took too long. Any thread may ask; one at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """A request of `planning.request_of` → its answer; {"no_plan": reason, UNANSWERED: True} if none came."""
        with self._lock:
            if self._closed:
                return {"no_plan": "the job is ending", UNANSWERED: True}
            try:
                process = self._running()
                assert process.stdout is not None
                _write(process, request)
                line = _read_line(process.stdout, timeout_s)
            except OSError as error:
                line, reason = b"", f"the planner's process can't be asked: {error}"
            else:
                reason = f"no plan within {timeout_s:g} s"
            if not line:
                self._end()
                return {"no_plan": reason, UNANSWERED: True}
            answer: dict[str, Any] = json.loads(line)
            return answer

    def rehearse(self, request: Mapping[str, Any]) -> None:
        """Start it ahead of the first request, with one to practise on whose answer nobody waits for."""
        with self._lock:
            if not self._closed:
                with suppress(OSError):
                    _write(self._running(), {**request, REHEARSAL: True})

    def close(self) -> None:
        """End the process; an answer that is waited for becomes none."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_resihp.control.planning"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True,
            )  # fmt: skip
            if self._closed:  # meanwhile, by another thread that may not have seen it
                self._process.kill()
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _write(process: subprocess.Popen[bytes], request: Mapping[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()


def _read_line(stream: IO[bytes], timeout_s: float) -> bytes:
    """A whole line, or nothing if it does not come in time or the stream ends."""
    deadline = time.monotonic() + timeout_s
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([stream], [], [], left)[0]:
            return b""
        part = stream.read(1 << 16)
        if not part:
            return b""
        parts.append(part)
    return b"".join(parts)
