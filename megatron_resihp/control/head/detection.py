# SPDX-License-Identifier: Apache-2.0
"""The thread that judges records on node 0, beside the coordinator and never in its way.

What it is told of the run's events only ends up in a queue; a failure of the judging is contained, told once, and
leaves membership, training and the log as they are. May import: the standard library and this package's modules.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from megatron_resihp.control.transport.shipping import Inbox
from megatron_resihp.events.bus import EventBus
from megatron_resihp.events.detection import DetectionFailed, Validation
from megatron_resihp.events.epochs import EpochStarted
from megatron_resihp.events.event import Event, stamped
from megatron_resihp.events.job import CoordinatorReplaced, Job, RunStarted

LOOK_S: Final = 0.2
WAITING: Final = 4096
"""Records that wait to be judged; when there are more, agents stop reading, and workers drop what they can't send."""


class Judge(Protocol):
    """Turns records and events into new events. Called in one thread; time is monotonic."""

    def note(self, event: Event) -> Iterable[Event]:
        """Something happened in the run."""
        ...

    def take(self, message: bytes, now: float) -> Iterable[Event]:
        """A record has come."""
        ...

    def look(self, now: float) -> Iterable[Event]:
        """Time has passed."""
        ...

    def finish(self) -> Iterable[Event]:
        """Nothing more will come."""
        ...


class Detection:
    """Runs a judge.

    Args:
        make_judge: called in the thread when the first record or event comes; may take a while.
        bus: tells of what judging needs, and takes the judge's events.

    Attributes:
        inbox: where records arrive.
    """

    def __init__(self, make_judge: Callable[[], Judge], bus: EventBus) -> None:
        self.inbox = Inbox(WAITING)
        self._make_judge = make_judge
        self._bus = bus
        self._judge: Judge | None = None
        self._news: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._closing = threading.Event()
        bus.subscribe(self._news.put, RunStarted, Job, EpochStarted, Validation, CoordinatorReplaced)
        self._thread = threading.Thread(target=self._run, name="resihp-detection", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Judge what has come, and end."""
        self._closing.set()
        self._thread.join(timeout_s)
        self.inbox.close()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            traceback.print_exc()
            self._tell([DetectionFailed(part="verdicts", error=f"{type(error).__name__}: {error}")])
        while not self._closing.is_set():
            # Whoever sends does not have to know.
            self.inbox.take(LOOK_S)

    def _serve(self) -> None:
        while True:
            message = self.inbox.take(LOOK_S)
            while not self._news.empty():
                self._tell(self._the_judge().note(self._news.get()))
            now = time.monotonic()
            if message is not None:
                self._tell(self._the_judge().take(message, now))
            elif self._closing.is_set():
                break
            elif self._judge is not None:
                self._tell(self._judge.look(now))
        if self._judge is not None:
            self._tell(self._judge.finish())

    def _the_judge(self) -> Judge:
        if self._judge is None:
            self._judge = self._make_judge()
        return self._judge

    def _tell(self, events: Iterable[Event]) -> None:
        for event in events:
            self._bus.publish(stamped(event, time.time()))
