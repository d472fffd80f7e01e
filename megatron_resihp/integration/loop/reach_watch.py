# SPDX-License-Identifier: Apache-2.0
"""Looks for the others where a wait for them lasts long, and tells the coordinator which it can't reach.

Two nodes may lose each other while both reach node 0. Their connections are silent then, and collectives that need them
end only when they run out of time. May import `control` and `executor`.
"""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from megatron_resihp.control.worker.client import WorkerControl
from megatron_resihp.control.worker.errors import JobEnded
from megatron_resihp.protocol.messages import CommunicationFailed

LOOK_S: Final = 10.0
FIRST_LOOKS_S: Final = 1.0
"""Until it is known which workers can be reached at all."""
LONG_S: Final = 20.0
"""A wait that lasts longer. Where it is for a checkpoint or an evaluation of others, these answer."""
TIMES: Final = 3
"""In so many looks in a row. A machine that is gone has been silent for longer than agents allow by then."""


class ReachWatch:
    """The watch of one worker.

    Args:
        longest_s: for how long it has been in one wait, at a moment of the monotonic clock.
    """

    def __init__(self, longest_s: Callable[[float], float], control: WorkerControl) -> None:
        self._longest_s = longest_s
        self._control = control
        self._missed: Counter[int] = Counter()
        self._known: set[int] = set()
        self._told = False

    def begin(self) -> None:
        """Look again and again, in a thread."""
        threading.Thread(target=self._watch, name="resihp-reach", daemon=True).start()

    def _watch(self) -> None:
        pause_s = FIRST_LOOKS_S
        while True:
            time.sleep(pause_s)
            try:
                pause_s = self.look(time.monotonic())
            except JobEnded:
                return  # the thread that listens to notices ends this worker

    def look(self, now: float) -> float:
        """Look once, which may take a few seconds; returns the seconds until the next look."""
        try:
            return self._look(now)
        except OSError as error:
            # Too many open files, or a name that can't be looked up for a while: it says nothing about the others.
            if not self._told:
                print(f"resihp: can't look for other workers now ({error}); trying again", file=sys.stderr, flush=True)
            self._told = True
            return LOOK_S

    def _look(self, now: float) -> float:
        epoch = self._control.epoch
        if self._control.heard.broken():
            self._missed.clear()
            return LOOK_S
        others = self._control.doors.one_of_each_node(self._control.members)
        if self._longest_s(now) < LONG_S:
            self._missed.clear()
            if self._control.members and self._known.issuperset(others):
                return LOOK_S
            # A machine that answers now counts as lost when it doesn't later.
            self._control.doors.silent(others)
            self._known |= self._control.doors.known
            return FIRST_LOOKS_S
        silent = self._control.doors.silent(others)
        self._missed = Counter({worker: self._missed[worker] + 1 for worker in silent})
        lost = sorted(worker for worker, times in self._missed.items() if times >= TIMES)
        if lost:
            self._missed.clear()
            self._control.tell(CommunicationFailed(self._control.worker, epoch, f"worker {lost[0]} can't be reached"))
        return LOOK_S
