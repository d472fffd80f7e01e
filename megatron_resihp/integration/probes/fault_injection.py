# SPDX-License-Identifier: Apache-2.0
"""Staged failures: this process kills or stops itself when it reaches a named point. And scheduled slowdowns.

Imports `config` only.
"""

import os
import signal
from collections.abc import Callable

from megatron_resihp.config import Injection, Slowdown

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class StagedError(RuntimeError):
    """What a rebuild fault injection raises; recovery takes it for a communicator's."""


class Injections:
    """The fault injections of one worker.

    Args:
        injections: all faults of the job.
        worker: this worker's id; fault injections for others are ignored.
        announce: called just before a fault injection strikes.
    """

    def __init__(self, injections: tuple[Injection, ...], worker: int, announce: Callable[[Injection], None]) -> None:
        self._waiting = [injection for injection in injections if injection.worker == worker]
        self._announce = announce

    def points(self) -> set[str]:
        """Points that anything waits for; the others need no hook."""
        return {injection.point for injection in self._waiting}

    def reach(self, point: str, iteration: int) -> None:
        """Called where a failure may strike; each strikes once, at the first visit not before its iteration."""
        for injection in list(self._waiting):
            if injection.point == point and iteration >= injection.iteration:
                self._waiting.remove(injection)
                self._announce(injection)
                if injection.action == "rebuild":
                    raise StagedError("a fault injection broke the epoch")
                os.kill(os.getpid(), SIGNALS[injection.action])


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
