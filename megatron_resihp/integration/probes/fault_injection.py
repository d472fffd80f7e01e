"""Staged failures: this process kills or stops itself when it reaches a named point. And scheduled slowdowns.

Imports `config` only.
"""

import os
import signal
from collections.abc import Callable

from megatron_resihp.config import Drill, Slowdown

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class StagedError(RuntimeError):
    """What a rebuild drill raises; recovery takes it for a communicator's."""


class Drills:
    """The drills of one worker.

    Args:
        drills: all drills of the job.
        worker: this worker's id; drills for others are ignored.
        announce: called just before a drill strikes.
    """

    def __init__(self, drills: tuple[Drill, ...], worker: int, announce: Callable[[Drill], None]) -> None:
        self._waiting = [drill for drill in drills if drill.worker == worker]
        self._announce = announce

    def points(self) -> set[str]:
        """Points that anything waits for; the others need no hook."""
        return {drill.point for drill in self._waiting}

    def reach(self, point: str, iteration: int) -> None:
        """Called where a failure may strike; a drill strikes once, at the first visit not before its iteration."""
        for drill in list(self._waiting):
            if drill.point == point and iteration >= drill.iteration:
                self._waiting.remove(drill)
                self._announce(drill)
                if drill.action == "rebuild":
                    raise StagedError("a drill broke the epoch")
                os.kill(os.getpid(), SIGNALS[drill.action])


class ScheduledSlowdowns:
    """Asks for each slowdown when its iteration begins, as all workers do; the coordinator listens to the first.

    Args:
        slowdowns: of the job.
        ask: called with the index of one and the slowdown, once for each.
    """

    def __init__(self, slowdowns: tuple[Slowdown, ...], ask: Callable[[int, Slowdown], None]) -> None:
        self._waiting = list(enumerate(slowdowns))
        self._ask = ask

    def begin(self, iteration: int) -> None:
        """Called when an iteration begins; those of iterations before it are due too."""
        due = [each for each in self._waiting if iteration >= (each[1].iteration or 0)]
        self._waiting = [each for each in self._waiting if each not in due]
        for index, slowdown in due:
            self._ask(index, slowdown)
