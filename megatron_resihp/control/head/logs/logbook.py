# SPDX-License-Identifier: Apache-2.0
"""Megatron's log on node 0, and the plugin's own curves beside it.

The coordinator hands it pages in order, each once, and never waits for it. May import `protocol`, `events` and this
package's other modules.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from megatron_resihp.control.head.logs.lane import Lane
from megatron_resihp.control.head.logs.own_curves import FOLLOWED, OwnCurves, OwnPage
from megatron_resihp.control.head.logs.tensorboard_files import TensorBoardFiles
from megatron_resihp.control.head.logs.wandb_run import WandbRun
from megatron_resihp.control.head.logs.writer import CarefulWriter, Term
from megatron_resihp.events.bus import EventBus
from megatron_resihp.events.event import Event, stamped
from megatron_resihp.events.job import LogFailed
from megatron_resihp.events.training import Iteration
from megatron_resihp.protocol.logs import BEFORE_ALL, LogPage, LogsWanted

FINISH_S: Final = 20.0
"""How long the end of the job waits for the last pages: SLURM and Kubernetes kill what takes longer than 30 s."""

Tell = Callable[[LogFailed], None]
MakeWriters = Callable[[LogsWanted, Tell, Term], Sequence[CarefulWriter]]


def make_writers(wanted: LogsWanted, tell: Tell, term: Term) -> list[CarefulWriter]:
    """What writes the logs that are wanted."""
    writers = []
    if (tensorboard := wanted.tensorboard) is not None:
        files = partial(TensorBoardFiles, tensorboard, term)
        writers.append(CarefulWriter("TensorBoard", files, tell, is_over=term.is_over))
    if (wandb := wanted.wandb) is not None:
        writers.append(CarefulWriter("W&B", partial(WandbRun, wandb, term), tell, is_over=term.is_over))
    return writers


class Logbook:
    """Writes what it is given in each of the logs that are wanted.

    Args:
        bus: tells what the plugin's own curves show, and takes what is to be said. To be followed from the start on:
            what a coordinator that takes over is told first is what the curves begin with.
        term: of the coordinator.
        make: makes what writes.
        before: as of `OwnCurves`.
    """

    def __init__(
        self, bus: EventBus, term: Term, make: MakeWriters = make_writers, before: Iterable[Iteration] = ()
    ) -> None:  # fmt: skip
        self._bus = bus
        self._term = term
        self._make = make
        self._lanes: tuple[Lane, ...] = ()
        self._curves = OwnCurves(before)
        self._reached = BEFORE_ALL
        self._ahead: deque[OwnPage] = deque()
        """Points of iterations whose page has not come: W&B takes steps in their order only."""
        self._lock = threading.Lock()
        bus.subscribe(self._note, *FOLLOWED)

    def take(self, part: LogsWanted | LogPage) -> None:
        """A part of Megatron's log, which is to be written."""
        if isinstance(part, LogPage):
            with self._lock:
                self._put(part)
                self._reached = part.place
                while self._ahead and self._ahead[0].place <= self._reached:
                    self._put(self._ahead.popleft())
        elif not self._lanes:
            self._lanes = tuple(Lane(writer, self._tell) for writer in self._make(part, self._tell, self._term))

    def close(self, timeout_s: float = FINISH_S) -> None:
        """Write all that has come, and end."""
        with self._lock:
            while self._ahead:
                self._put(self._ahead.popleft())
        until = time.monotonic() + timeout_s
        for lane in self._lanes:
            lane.begin_to_close()
        for lane in self._lanes:
            lane.close(until)

    def _note(self, event: Event) -> None:
        # Several threads publish events, and curves are put in the order in which they are drawn.
        with self._lock:
            page = self._curves.note(event)
            if page is None or not self._lanes:
                return
            if page.place <= self._reached:
                self._put(page)
            else:
                self._ahead.append(page)

    def _put(self, page: LogPage) -> None:
        for lane in self._lanes:
            lane.put(page)

    def _tell(self, failed: LogFailed) -> None:
        self._bus.publish(stamped(failed, time.time()))
