# SPDX-License-Identifier: Apache-2.0
"""A thread for each writer, with its own bounded queue: one that is slow holds up neither the job nor the others.

May import `protocol`, `events` and this package's other modules.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from megatron_resihp.control.head.logs.writer import CarefulWriter
from megatron_resihp.events.job import LogFailed
from megatron_resihp.protocol.logs import LogPage

LOOK_S: Final = 0.2
NAME: Final = "resihp-log-"
"""How the names of these threads begin."""
WAITING: Final = 4096
"""Pages that wait to be written; of more, the newest are dropped."""


def any_left() -> bool:
    """Whether some writer of this process still writes, though the job no longer waits for it."""
    return any(thread.name.startswith(NAME) for thread in threading.enumerate())


class Lane:
    """Writes pages in order, in a thread of its own.

    Args:
        writer: contains its own failures.
        tell: takes events.
    """

    def __init__(self, writer: CarefulWriter, tell: Callable[[LogFailed], None]) -> None:
        self._writer = writer
        self._tell = tell
        self._pages: queue.Queue[LogPage] = queue.Queue(WAITING)
        self._dropped = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{NAME}{writer.part}", daemon=True)
        self._thread.start()

    def put(self, page: LogPage) -> None:
        """Have a page written; never waits."""
        try:
            self._pages.put_nowait(page)
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                reason = f"{self._pages.maxsize} pages wait already, so newer ones are dropped"
                self._tell(LogFailed(part=self._writer.part, error=reason))

    def begin_to_close(self) -> None:
        """Nothing more comes."""
        self._closing.set()

    def close(self, until: float) -> None:
        """Wait until all is written, but no longer than `until`, in monotonic seconds."""
        self._closing.set()
        self._thread.join(max(until - time.monotonic(), 0.0))
        if self._thread.is_alive():
            reason = f"{self._pages.qsize()} pages still wait at the end of the job, and are not written"
            self._tell(LogFailed(part=self._writer.part, error=reason))

    def _run(self) -> None:
        while True:
            try:
                self._writer.write(self._pages.get(timeout=LOOK_S))
            except queue.Empty:
                if self._closing.is_set():
                    break
        self._writer.close()
