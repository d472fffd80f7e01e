# SPDX-License-Identifier: Apache-2.0
"""Bounded waiting for gloo's operations. May import torch.

Ending gloo's connections makes its operations fail (`gloo_sockets`), with one exception: if gloo finds a dead peer's
connection broken while it sends, torch 2.15's gloo forgets the send, and its wait lasts until the group's timeout. So
every wait in gloo can be abandoned. Collectives are waited for in slices. P2P runs on a thread that can be left behind,
because posting it waits for the peer to connect, and a wait that times out breaks the group.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

SLICE = timedelta(milliseconds=50)
NO_TIMEOUT = timedelta(0)
P2P_OPERATIONS = (12, 13, 14)
"""c10d's OpType values of send, recv and recv from any source."""
SLICE_OVER = "Operation timed out"


class WaitAbandoned(RuntimeError):
    """The epoch broke during a wait for gloo, and gloo reported no error."""


class Waiter:
    """Waits for c10d work objects until they are done or `interrupted`."""

    def __init__(self, interrupted: Callable[[], bool]) -> None:
        self._interrupted = interrupted
        self._wait: Callable[..., bool] = dist.Work.wait
        self._calls: queue.SimpleQueue[_Call | None] | None = None
        self._abandoned: list[_Result] = []
        self._waits: dict[int, float] = {}

    def longest_s(self, now: float) -> float:
        """The age of the oldest present wait of any thread, at `now` on the monotonic clock; 0: no thread waits."""
        return now - min(self._waits.values(), default=now)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Time that this thread spends in this context counts for `longest_s`, in a wait around another one since the
        last end of such: then something had come."""
        thread = threading.get_ident()
        around = thread in self._waits
        self._waits[thread] = time.monotonic()
        try:
            yield
        finally:
            if around:
                self._waits[thread] = time.monotonic()
            else:
                del self._waits[thread]

    @property
    def left_behind(self) -> int:
        """Number of calls made aside that were given up and have not returned yet."""
        self._abandoned = [result for result in self._abandoned if not result.done.is_set()]
        return len(self._abandoned)

    def install(self) -> None:
        """Let every wait of the process go through this object."""
        original = self._wait

        @functools.wraps(original)
        def wait(work: Any, timeout: timedelta = NO_TIMEOUT) -> bool:
            return self.wait(work) if timeout == NO_TIMEOUT else original(work, timeout)

        dist.Work.wait = wait
        for name in ("isend", "irecv"):
            posted = self._posting(getattr(dist, name))
            # batch_isend_irecv compares with the names of both modules.
            setattr(dist, name, posted)
            setattr(dist.distributed_c10d, name, posted)

    def _posting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """isend or irecv, posted aside: gloo's first operation of a pair waits for the peer to connect."""

        @functools.wraps(original)
        def post(*positional: Any, **options: Any) -> Any:
            return self.aside(functools.partial(original, *positional, **options))

        return post

    def wait(self, work: Any) -> bool:
        """Wait for one operation.

        Raises:
            WaitAbandoned, or gloo's own error.
        """
        if work._get_op_type() in P2P_OPERATIONS:
            return self.aside(functools.partial(self._wait, work))
        with self.noted():
            return self._wait_in_slices(work)

    def _wait_in_slices(self, work: Any) -> bool:
        while True:
            try:
                return self._wait(work, SLICE)
            except RuntimeError as error:
                if SLICE_OVER not in str(error):
                    raise
            if work.is_completed():
                return self._wait(work)  # done just after the slice; this returns or raises at once
            self.give_up_if_interrupted()

    def aside(self, call: Callable[[], Any]) -> Any:
        """Make a call that may block in gloo on another thread and wait for its result.

        Raises:
            WaitAbandoned, or the call's own error.
        """
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), name="resihp-aside", daemon=True).start()
        result = _Result()
        self._calls.put((call, result))
        with self.noted():
            self._await(result)
        if result.error is not None:
            raise result.error
        return result.value

    def _await(self, result: _Result) -> None:
        assert self._calls is not None
        while not result.done.wait(SLICE.total_seconds()):
            try:
                self.give_up_if_interrupted()
            except WaitAbandoned:
                self._calls.put(None)
                self._calls = None  # its thread may take long to return; the next call gets another one
                self._abandoned.append(result)
                raise

    def give_up_if_interrupted(self) -> None:
        if self._interrupted():
            raise WaitAbandoned("gloo did not answer after the epoch was broken")


class _Result:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None


_Call = tuple[Callable[[], Any], _Result]


def _serve(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (item := calls.get()) is not None:
        call, result = item
        try:
            result.value = call()
        except Exception as error:
            result.error = error
        result.done.set()
        del item, call, result
