# SPDX-License-Identifier: Apache-2.0
"""Calls that training does not wait for, made one after another in a thread. May import: the standard library."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

_Calls = queue.SimpleQueue[tuple[Callable[[], None], "Future[None]"] | None]


class Behind:
    """Makes calls in the order in which they were begun. Once a call has raised, no later one is made.

    Args:
        name: of the thread, which the first call starts, and which ends with this object.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: _Calls | None = None
        self._last: Future[None] | None = None

    def begin(self, call: Callable[[], None]) -> None:
        """Make this call after all that were begun before."""
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), name=self._name, daemon=True).start()
            weakref.finalize(self, self._calls.put, None)
        self._last = Future()
        self._calls.put((call, self._last))

    def settle(self) -> None:
        """Wait until all calls that were begun are over.

        Raises:
            what the first that failed has raised, each time.
        """
        if self._last is not None:
            self._last.result()


def _serve(calls: _Calls) -> None:
    error: BaseException | None = None
    while (item := calls.get()) is not None:
        call, over = item
        try:
            if error is None:
                call()
        except BaseException as raised:
            error = raised
        if error is None:
            over.set_result(None)
        else:
            over.set_exception(error)
        del item, call, over  # they may hold tensors
