# SPDX-License-Identifier: Apache-2.0
"""Groups of earlier epochs, which are freed after a step. May import the executor's `gloo`."""

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from megatron_resihp.executor.gloo import loops as gloo_loops

FREEING_S: Final = 0.3
"""A group that takes longer to be freed may wait for its event loop, which `gloo_loops` then lets end."""
LOST_S: Final = 0.3
"""A group that is still not free after this time waits for an operation that gloo has lost, until its timeout."""


class RetiredGroups:
    """The retired groups of one worker."""

    def __init__(self) -> None:
        self._groups: list[Any] = []
        self._listeners: set[str] = set()
        self._freeing: list[threading.Thread] = []

    def add(self, groups: Iterable[Any], listeners: Iterable[str] = ()) -> None:
        """Keep groups until `free`. `listeners`: their listening sockets."""
        self._groups += groups
        self._listeners.update(listeners)

    def free(self) -> None:
        """Free all groups at once: each joins its threads."""
        holders = [[group] for group in self._groups]
        self._groups.clear()
        threads = [threading.Thread(target=holder.clear, name="resihp-freeing", daemon=True) for holder in holders]
        for thread in threads:
            thread.start()
        late = _still_alive(threads, FREEING_S)
        if late or self._freeing:
            gloo_loops.calm(self._listeners)
        self._freeing = [*_still_alive(self._freeing, 0.0), *_still_alive(late, LOST_S)]
        if not self._freeing:
            self._listeners.clear()

    @property
    def left(self) -> int:
        """Groups that are not free yet."""
        return sum(thread.is_alive() for thread in self._freeing)


def _still_alive(threads: Sequence[threading.Thread], seconds: float) -> list[threading.Thread]:
    """Wait for threads to end, for `seconds` in total; returns the threads that are still alive."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]
