# SPDX-License-Identifier: Apache-2.0
"""The near end of a process that plans: asks it, and waits no longer than is good.

May import the standard library and `protocol`.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import IO, Final

from megatron_resihp.protocol.planning import PLANNER_ANSWERS, PLANNER_REQUESTS, NoPlan, PlannerAnswer, PlannerRequest
from megatron_resihp.protocol.wire import COORDINATOR, MalformedError

LOW_PRIORITY: Final = "--low-priority"
"""Tells the process that training does not stand still for its answers."""
REHEARSAL_S: Final = 60.0
"""How long a process that is busy may take to accept a rehearsal."""


class PlannerProcess:
    """Starts with the first request, or before. Any thread may ask; one at a time.

    Args:
        low_priority: whether training's processes go first.
    """

    def __init__(self, low_priority: bool = False) -> None:
        self._options = [LOW_PRIORITY] if low_priority else []
        self._process: subprocess.Popen[bytes] | None = None
        self._rehearsals: tuple[PlannerRequest, ...] = ()
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, request: PlannerRequest, timeout_s: float) -> PlannerAnswer:
        """The answer, or that there was none that can be read in time.

        A process that has not answered is ended. The next one rehearses at once what this one had rehearsed.
        """
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            return NoPlan(f"no plan within {timeout_s:g} s", unanswered=True)
        try:
            if self._closed:
                return NoPlan("the job is ending", unanswered=True)
            try:
                if line := self._answer(request, deadline):
                    return PLANNER_ANSWERS.read(line.decode(errors="replace")).body
                if self._closed:
                    return NoPlan("the job is ending", unanswered=True)
                late = time.monotonic() >= deadline
                reason = f"no plan within {timeout_s:g} s" if late else "the planner's process has ended"
            except MalformedError as error:
                reason = str(error)
            except Exception as error:  # whatever it is, there are plans that need no planner
                reason = f"the planner's process can't be asked: {type(error).__name__}: {error}"
            self._begin_again()
            return NoPlan(reason, unanswered=True)
        finally:
            self._lock.release()

    def start(self) -> None:
        """Let the process load what it needs before the first request."""
        with self._lock, suppress(Exception):
            if not self._closed:
                self._running()

    def rehearse(self, *requests: PlannerRequest) -> None:
        """Practise on these ahead of the first request; no thread waits for the answers."""
        deadline = time.monotonic() + REHEARSAL_S
        with self._lock:
            self._rehearsals = requests
            try:
                for request in requests:
                    if self._closed:
                        break
                    if not _write(self._running(), replace(request, rehearsal=True), deadline):
                        self._end()
                        break
            except Exception:  # the first plan takes longer then
                self._end()

    def close(self) -> None:
        """End the process; an answer that is waited for becomes none."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _answer(self, request: PlannerRequest, deadline: float) -> bytes:
        """The line of the answer; empty: there is none in time."""
        process = self._running()
        return _read_line(process, deadline) if _write(process, request, deadline) else b""

    def _begin_again(self) -> None:
        self._end()
        with suppress(RuntimeError):  # no thread can be started now; then the next request starts the process
            # Who asks stands still, and can't wait for that.
            threading.Thread(target=self.rehearse, args=self._rehearsals, daemon=True).start()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_resihp.control.replanning.processes.planning", *self._options],
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
            with suppress(Exception):  # it is forgotten in any case
                process.kill()
                process.communicate()


def _write(process: subprocess.Popen[bytes], request: PlannerRequest, deadline: float) -> bool:
    """False: the process, which is busy, has not read all of it by then. What is large doesn't fit into the pipe."""
    assert process.stdin is not None
    left = memoryview(PLANNER_REQUESTS.write(request, COORDINATOR).encode() + b"\n")
    while left:
        if not _is_ready(process.stdin, select.POLLOUT, deadline):
            return False
        left = left[os.write(process.stdin.fileno(), left) :]
    return True


def _read_line(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """A whole line, or nothing if it does not come in time or the stream ends."""
    assert process.stdout is not None
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        if time.monotonic() >= deadline or not _is_ready(process.stdout, select.POLLIN, deadline):
            return b""
        part = process.stdout.read(1 << 16)
        if not part:
            return b""
        parts.append(part)
    return b"".join(parts)


def _is_ready(pipe: IO[bytes], event: int, deadline: float) -> bool:
    """Whether one can read or write by then, or finds out that the other end is gone.

    By poll, as select knows files up to 1023 only, and node 0 of a large job has more open.
    """
    poll = select.poll()
    poll.register(pipe, event)
    return bool(poll.poll(max(deadline - time.monotonic(), 0.0) * 1000))
