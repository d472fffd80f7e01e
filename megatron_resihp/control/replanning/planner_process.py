# SPDX-License-Identifier: Apache-2.0
"""The near end of a process that plans: asks it, and waits no longer than is good.

May import the standard library and this package's modules.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

REHEARSAL: Final = "rehearsal"
"""In a request: nobody waits for the answer."""
UNANSWERED: Final = "unanswered"
"""In an answer: it is not of the process, which has ended or taken too long."""
LOW_PRIORITY: Final = "--low-priority"
"""Tells the process that nobody stands still for its answers."""
REHEARSAL_S: Final = 60.0
"""How long a process that is busy may take to accept a rehearsal."""

Request = Mapping[str, Any]


class PlannerProcess:
    """Starts with the first request, or before. Any thread may ask; one at a time.

    Args:
        low_priority: whether training's processes go first.
    """

    def __init__(self, low_priority: bool = False) -> None:
        self._options = [LOW_PRIORITY] if low_priority else []
        self._process: subprocess.Popen[bytes] | None = None
        self._rehearsals: tuple[Request, ...] = ()
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, request: Request, timeout_s: float) -> dict[str, Any]:
        """A request of `planning.request_of` → its answer; {"no_plan": reason, UNANSWERED: True} if none came in time.

        A process that has not answered is ended. The next one rehearses at once what this one had rehearsed.
        """
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            return _unanswered(f"no plan within {timeout_s:g} s")
        try:
            if self._closed:
                return _unanswered("the job is ending")
            try:
                process = self._running()
                line = _read_line(process, deadline) if _write(process, request, deadline) else b""
                reason = f"no plan within {timeout_s:g} s"
            except OSError as error:
                line, reason = b"", f"the planner's process can't be asked: {error}"
            if not line:
                self._end()
                # Who asks stands still, and can't wait for that.
                threading.Thread(target=self.rehearse, args=self._rehearsals, daemon=True).start()
                return _unanswered(reason)
            answer: dict[str, Any] = json.loads(line)
            return answer
        finally:
            self._lock.release()

    def start(self) -> None:
        """Let the process load what it needs before anybody asks."""
        with self._lock, suppress(OSError):
            if not self._closed:
                self._running()

    def rehearse(self, *requests: Request) -> None:
        """Practise on these ahead of the first request; nobody waits for the answers."""
        deadline = time.monotonic() + REHEARSAL_S
        with self._lock:
            self._rehearsals = requests
            try:
                for request in requests:
                    if self._closed:
                        break
                    if not _write(self._running(), {**request, REHEARSAL: True}, deadline):
                        self._end()
                        break
            except OSError:
                self._end()

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
                [sys.executable, "-m", "megatron_resihp.control.replanning.planning", *self._options],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True,
            )  # fmt: skip
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
            if self._closed:  # meanwhile, by another thread that may not have seen it
                self._process.kill()
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _unanswered(reason: str) -> dict[str, Any]:
    return {"no_plan": reason, UNANSWERED: True}


def _write(process: subprocess.Popen[bytes], request: Request, deadline: float) -> bool:
    """False: the process, which is busy, has not read all of it by then. What is large doesn't fit into the pipe."""
    assert process.stdin is not None
    left = memoryview(json.dumps(request).encode() + b"\n")
    while left:
        if not select.select([], [process.stdin], [], max(deadline - time.monotonic(), 0.0))[1]:
            return False
        left = left[os.write(process.stdin.fileno(), left) :]
    return True


def _read_line(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """A whole line, or nothing if it does not come in time or the stream ends."""
    assert process.stdout is not None
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
            return b""
        part = process.stdout.read(1 << 16)
        if not part:
            return b""
        parts.append(part)
    return b"".join(parts)
