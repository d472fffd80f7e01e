# SPDX-License-Identifier: Apache-2.0
"""What threads and signal handlers have to tell the agent's loop, which selects on it.

May import: the standard library, `control.exit_codes` and `control.linux`.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Final, NoReturn

from megatron_resihp.control import exit_codes
from megatron_resihp.control.linux import HANDLED


@dataclass(frozen=True)
class Ending:
    """Why and how the workers of this node are to end.

    Attributes:
        code: exit code of the agent.
        reason: for people.
        grace_s: how long the workers have to exit by themselves.
        terminate_s: and from SIGTERM, which comes then, to SIGKILL; None: as usual.
        agreed: the coordinator said so; False: this agent could not go on.
        members: workers that have a part in the job's end, all others are ended at once; None: all have.
    """

    code: int
    reason: str
    grace_s: float = 0.0
    agreed: bool = False
    members: frozenset[int] | None = None
    terminate_s: float | None = None


LAST_SAVE_S: Final = 600.0
"""How long workers that have lost the coordinator may take to save what they hold."""


def coordinator_lost(why: object) -> Ending:
    """How workers end then: they hear of it by themselves, save what they hold and exit.

    SIGTERM ends workers that run without the plugin, which ignores it, and workers that have not begun.
    """
    return Ending(exit_codes.RETRY, f"the coordinator is lost: {why}", terminate_s=LAST_SAVE_S)


@dataclass(frozen=True)
class GivenUp:
    """The coordinator has given up workers, which may be of any node. `for_good`: none come in their places."""

    workers: frozenset[int]
    for_good: bool = False


@dataclass(frozen=True)
class Drained:
    """The nodes of these workers are to leave."""

    workers: frozenset[int]


@dataclass(frozen=True)
class BrokenEpoch:
    """This epoch is broken, and all workers are told so."""

    epoch: int


Letter = Ending | GivenUp | Drained | BrokenEpoch


@contextmanager
def signals_while_waiting() -> Iterator[None]:
    """Before there are workers: a signal to end ends this process in order, by SystemExit; those that only mean a job
    that runs are ignored. Only for the main thread."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        print(f"resihp: ended by {signal.Signals(number).name} before it had begun", file=sys.stderr, flush=True)
        raise SystemExit(exit_codes.stopped_by(number))

    ignored = (signal.SIGUSR1, signal.SIGUSR2)
    before = {n: signal.signal(n, signal.SIG_IGN if n in ignored else end) for n in _handled()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handled() -> list[signal.Signals]:
    """Under nohup the job outlives the terminal."""
    return [n for n in HANDLED if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


class Mailbox:
    """Letters from any thread and signals from their handlers; whatever comes makes `fileno` readable."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._letters: deque[Letter] = deque()
        self._signals: deque[int] = deque()

    def fileno(self) -> int:
        return self._reader.fileno()

    def end(self, ending: Ending) -> None:
        """Thread-safe; the first one counts."""
        self._letters.append(ending)
        self._wake()

    def put(self, letter: GivenUp | Drained | BrokenEpoch) -> None:
        """Thread-safe."""
        self._letters.append(letter)
        self._wake()

    def take(self) -> list[Letter | int]:
        """Everything that came, signals first."""
        try:
            self._reader.recv(4096)
        except BlockingIOError:
            pass
        taken: list[Letter | int] = []
        while self._signals:
            taken.append(self._signals.popleft())
        while self._letters:
            taken.append(self._letters.popleft())
        return taken

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Have signals delivered here; only for the main thread."""
        before = {number: signal.signal(number, self._handle) for number in _handled()}
        # A child that is stopped or continued is looked at, at once. And where this signal is ignored, as under some
        # process managers, children vanish before any code can ask for their end.
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: self._wake())
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        self._wake()

    def _wake(self) -> None:
        try:
            self._writer.send(b"\0")
        except OSError:
            # Full: the loop is awake already. Closed: it no longer listens.
            pass
