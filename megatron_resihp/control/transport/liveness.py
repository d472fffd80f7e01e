# SPDX-License-Identifier: Apache-2.0
"""Liveness connections: a stream socket whose bytes are heartbeats and whose end is death.

One runs from each worker to its agent, another from each agent to the one that runs the coordinator.
May import: the standard library and `control.transport.absence`.
"""

from __future__ import annotations

import select
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Final

from megatron_resihp.control.transport.absence import Absence

BEAT: Final = b"."
FAILED: Final = b"!"
ENDED: Final = b"e"
"""The last words of a worker that ends with an error of its own, and of one that was told to end: so the agent knows
whose output explains the end of the job."""

READ_BYTES: Final = 4096


class LivenessConnection:
    """The end of one that is watched: sends the beats, and hears when the watcher is gone.

    Args:
        sock: connected to the watcher; belongs to this object from now on.
        period_s: time between two beats; the first goes out at once.
        on_lost: called in the liveness connection's thread when the other end died, or gave this one up.
        seal: makes what is sent of a beat.
    """

    def __init__(
        self,
        sock: socket.socket,
        period_s: float,
        on_lost: Callable[[], None],
        seal: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self._period_s = period_s
        self._on_lost = on_lost
        self._seal = seal
        self._unsent = b""
        self._sending = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._beat, name="resihp-liveness", daemon=True)
        self._thread.start()

    def last_word(self, word: bytes) -> None:
        """Let the watcher know why this process ends: FAILED or ENDED."""
        self._send(word)

    def close(self) -> None:
        """Leave in order: `on_lost` is not called any more."""
        self._closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._thread.join()
        self._socket.close()

    def _beat(self) -> None:
        incoming = select.poll()
        incoming.register(self._socket, select.POLLIN)
        while not self._is_lost():
            self._send(BEAT)
            incoming.poll(1000 * self._period_s)
        if not self._closed:
            self._on_lost()

    def _is_lost(self) -> bool:
        try:
            return not self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _send(self, signal: bytes) -> None:
        with self._sending:
            # A watcher that is stopped will find beats enough.
            if signal != BEAT or not self._unsent:
                self._unsent += self._seal(signal)
            try:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            except OSError:
                # Full: the rest comes later. Broken: reading will show it.
                pass


class Heartbeats:
    """Which peers have not been heard of for too long. Pure: the time is handed in.

    No peer counts as silent before its first beat, and each silence is told once.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._heard: dict[int, float] = {}
        self._silent_from = inf
        """Before then no peer can have been silent for too long."""
        self._absence = Absence(timeout_s / 2)

    @property
    def names(self) -> tuple[int, ...]:
        """The peers that have been heard of, and have not fallen silent since."""
        return tuple(self._heard)

    def beat(self, name: int, now: float) -> None:
        self._heard[name] = now
        self._silent_from = min(self._silent_from, now + self._timeout_s)

    def forget(self, name: int) -> None:
        self._heard.pop(name, None)

    def silent(self, now: float) -> dict[int, float]:
        """The peers that fell silent, and for how many seconds they have been; call it often."""
        away_s = self._absence.before(now)
        if away_s:
            # A watcher that was stopped itself has heard nothing meanwhile.
            self._heard = {name: min(heard + away_s, now) for name, heard in self._heard.items()}
        # There is a look for each beat, so that looking at all peers each time would take the square of their number.
        if now <= self._silent_from:
            return {}
        found = {name: now - heard for name, heard in self._heard.items() if now - heard > self._timeout_s}
        for name in found:
            del self._heard[name]
        self._silent_from = min(self._heard.values(), default=inf) + self._timeout_s
        return found


class Kind(Enum):
    """What a liveness connection told."""

    LOST = "lost"
    """The other end closed the connection: the process died or cut it."""
    SILENT = "silent"
    """No beat for too long: the process is stopped, or its machine is gone."""
    DEAF = "deaf"
    """No beat for too long after a notice: no thread of the process runs."""
    FAILED = "failed"
    """The process ends with an error of its own."""
    ENDED = "ended"
    """The process ends because it was told to."""


LAST_WORDS: Final = {FAILED: Kind.FAILED, ENDED: Kind.ENDED}


@dataclass(frozen=True)
class Finding:
    """What was found out about a peer. `epoch`: whose end it was to hear of, and has shown no life since."""

    kind: Kind
    name: int
    silence_s: float = 0.0
    epoch: int | None = None


Feed = Callable[[bytes], Iterator[bytes]]


def plain(data: bytes) -> Iterator[bytes]:
    """What a peer has sent that nobody else can reach, as it is."""
    yield data


class Watcher:
    """The watching end of many liveness connections, for a loop that selects on `fileno` and calls `look`.

    Args:
        timeout_s: a longer silence is too long.
        notice_s: so is a longer one after a notice; None: there are none.
        period_s: how often to read what peers have sent; 0: at once. The end of a connection is always heard at once.
            A loop that each beat of a thousand peers woke would do little else.
    """

    def __init__(self, timeout_s: float, notice_s: float | None = None, period_s: float = 0.0) -> None:
        self._beats = Heartbeats(timeout_s)
        self._noticed = Heartbeats(timeout_s if notice_s is None else notice_s)
        self._broken: int | None = None
        self._sockets: dict[int, socket.socket] = {}
        self._feeds: dict[int, Feed] = {}
        self._period_s = period_s
        self._read_at = -inf
        self._selector = selectors.DefaultSelector()
        self._ends = select.epoll()

    @property
    def names(self) -> set[int]:
        """The peers whose liveness connections are held."""
        return set(self._sockets)

    def fileno(self) -> int:
        return self._ends.fileno() if self._period_s else self._selector.fileno()

    def add(self, name: int, sock: socket.socket, feed: Feed = plain) -> None:
        """Watch a peer. `feed`: makes beats of what it has sent; ValueError where that is none of its."""
        sock.setblocking(False)
        self._sockets[name] = sock
        self._feeds[name] = feed
        self._selector.register(sock, selectors.EVENT_READ, name)
        self._ends.register(sock, select.EPOLLRDHUP)

    def look(self, now: float) -> list[Finding]:
        """What happened since the last look; liveness connections that were lost are let go of."""
        findings = []
        if now >= self._read_at + self._period_s or self._ends.poll(0):
            self._read_at = now
            findings = [finding for key, _ in self._selector.select(0) for finding in self._read(key.data, now)]
        silent = [Finding(Kind.SILENT, name, silence_s) for name, silence_s in self._beats.silent(now).items()]
        deaf = [Finding(Kind.DEAF, name, age_s, self._broken) for name, age_s in self._noticed.silent(now).items()]
        return findings + silent + deaf

    def expect(self, epoch: int, now: float) -> None:
        """All peers are told that this epoch is broken; those that have ever beaten are to beat after it."""
        self._broken = epoch
        for name in self._beats.names:
            self._noticed.beat(name, now)

    def cut(self, name: int) -> None:
        """End a liveness connection: its holder ends itself as soon as it runs. One that is cut already stays so."""
        sock = self._sockets.pop(name, None)
        if sock is None:
            return
        del self._feeds[name]
        self._beats.forget(name)
        self._noticed.forget(name)
        self._selector.unregister(sock)
        try:
            self._ends.unregister(sock)
            # Closing alone would not do: forked children of others may hold this end too.
            sock.shutdown(socket.SHUT_RDWR)
        except (OSError, ValueError):  # it is gone already
            pass
        sock.close()

    def close(self) -> None:
        for name in list(self._sockets):
            self.cut(name)
        self._selector.close()
        self._ends.close()

    def _read(self, name: int, now: float) -> list[Finding]:
        try:
            data = self._sockets[name].recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        try:
            beats = b"".join(self._feeds[name](data))
        except ValueError:
            data = b""
        if not data:
            self.cut(name)
            return [Finding(Kind.LOST, name)]
        if beats:
            self._beats.beat(name, now)
            self._noticed.forget(name)
        return [Finding(kind, name) for word, kind in LAST_WORDS.items() if word in beats]
