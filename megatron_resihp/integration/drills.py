"""Staged failures: this process kills or stops itself when it reaches a named point. Imports `config` only."""

import os
import signal
from collections.abc import Callable

from megatron_resihp.config import Drill

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
