# SPDX-License-Identifier: Apache-2.0
"""Python's garbage collections, which stop the training thread. Imports `detector.input.records`."""

import gc
import time
from collections import deque

from megatron_resihp.detector.input.records import SpanKind

MOST_PAUSES = 256
"""Garbage collections that are kept since the last record; the newest are kept."""

Span = tuple[int, float, float]


class Pauses:
    """Notes collections from `watch` on."""

    def __init__(self) -> None:
        # A standby's collections are never taken.
        self._noted: deque[Span] = deque(maxlen=MOST_PAUSES)
        self._began = 0.0

    def watch(self) -> None:
        """Called once."""
        gc.callbacks.append(self.on_collection)

    def on_collection(self, phase: str, _: dict[str, int]) -> None:
        """Comes at any moment and in any thread: touches nothing but a queue."""
        if phase == "start":
            self._began = time.monotonic()
        else:
            self._noted.append((SpanKind.GARBAGE_COLLECTION, self._began, time.monotonic()))

    def take(self) -> list[Span]:
        """The pauses noted since the last call."""
        taken = []
        while self._noted:
            taken.append(self._noted.popleft())
        return taken
