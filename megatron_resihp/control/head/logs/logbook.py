# SPDX-License-Identifier: Apache-2.0
"""The thread on node 0 that writes Megatron's log, and the plugin's own curves beside it.

The coordinator hands it pages in order, each once, and never waits for it. May import `protocol`, `events` and this
package's other modules.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Final

from megatron_resihp.control.head.logs.own_curves import FOLLOWED, OwnCurves
from megatron_resihp.control.head.logs.tensorboard_files import TensorBoardFiles
from megatron_resihp.control.head.logs.wandb_run import WandbRun
from megatron_resihp.control.head.logs.writer import CarefulWriter
from megatron_resihp.events.bus import EventBus
from megatron_resihp.events.event import Event, stamped
from megatron_resihp.events.job import LogFailed
from megatron_resihp.protocol.logs import LogPage, LogsWanted

LOOK_S: Final = 0.2
WAITING: Final = 4096
"""Pages and events that wait to be written; of more, the newest are dropped."""
FINISH_S: Final = 60.0
"""How long the end of the job waits for the last ones."""

Tell = Callable[[LogFailed], None]
MakeWriters = Callable[[LogsWanted, Tell], Sequence[CarefulWriter]]


def make_writers(wanted: LogsWanted, tell: Tell) -> list[CarefulWriter]:
    """What writes the logs that are wanted."""
    writers = []
    if (tensorboard := wanted.tensorboard) is not None:
        writers.append(CarefulWriter("TensorBoard", lambda: TensorBoardFiles(tensorboard), tell))
    if (wandb := wanted.wandb) is not None:
        writers.append(CarefulWriter("W&B", lambda: WandbRun(wandb), tell))
    return writers


class Logbook:
    """Writes in a thread of its own, which begins once logs are wanted.

    Args:
        bus: tells what the plugin's own curves show, and takes what is to be said.
        make: makes what writes.
    """

    def __init__(self, bus: EventBus, make: MakeWriters = make_writers) -> None:
        self._bus = bus
        self._make = make
        self._to_write: queue.Queue[LogPage | Event] = queue.Queue(WAITING)
        self._dropped = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, part: LogsWanted | LogPage) -> None:
        """A part of Megatron's log, which is to be written."""
        if isinstance(part, LogPage):
            self._put(part)
        elif self._thread is None and (part.tensorboard or part.wandb):
            self._bus.subscribe(self._put, *FOLLOWED)
            self._thread = threading.Thread(target=self._run, args=[part], name="resihp-logbook", daemon=True)
            self._thread.start()

    def close(self, timeout_s: float = FINISH_S) -> None:
        """Write all that has come, and end."""
        self._closing.set()
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            left = f"{self._to_write.qsize()} pages are not written {timeout_s:g} s after the end of the job"
            self._tell(LogFailed(part="log", error=left))

    def _put(self, part: LogPage | Event) -> None:
        try:
            self._to_write.put_nowait(part)
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                self._tell(LogFailed(part="log", error=f"{WAITING} pages wait already: newer ones are dropped"))

    def _tell(self, failed: LogFailed) -> None:
        self._bus.publish(stamped(failed, time.time()))

    def _run(self, wanted: LogsWanted) -> None:
        try:
            self._serve(self._make(wanted, self._tell))
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self._tell(LogFailed(part="log", error=f"{type(error).__name__}: {error}"))

    def _serve(self, writers: Sequence[CarefulWriter]) -> None:
        curves = OwnCurves()
        while True:
            try:
                part = self._to_write.get(timeout=LOOK_S)
            except queue.Empty:
                if self._closing.is_set():
                    break
                continue
            page = part if isinstance(part, LogPage) else curves.note(part)
            if page is not None:
                for writer in writers:
                    writer.write(page)
        for writer in writers:
            writer.close()
