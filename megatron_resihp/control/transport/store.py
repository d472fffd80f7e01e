# SPDX-License-Identifier: Apache-2.0
"""The key-value store that all processes of a job share: what it promises, and the port that it is served at.

May import: the standard library and `control.transport.address`.
"""

from __future__ import annotations

import errno
import socket
import time
from typing import Final, Protocol, Self

from megatron_resihp.control.transport.address import Address

PROBE_PERIOD_S: Final = 0.05
SILENT_S: Final = 20
"""Seconds; well below the time in which workers have to report after a death, so that a cut-off worker still can."""


class StoreError(RuntimeError):
    """The store cannot be served, reached or used; its text is one line for people."""


class ElsewhereError(StoreError):
    """A port is to be served at an address that this machine does not have."""


class TakenError(StoreError):
    """A port is in use already."""


class Store(Protocol):
    """Strings under keys, counters and queues, shared by every process of the job.

    One object is one connection, and a blocking call holds it: every thread has its own, from `clone`. When a call that
    writes has returned, every other connection sees what it wrote; but a worker's may be told what was there before if
    another of its node's asked for the same key earlier. Whatever fails for want of the store raises StoreError; what
    merely takes too long is told by TimeoutError, False or an empty list.
    """

    def set(self, key: str, value: str) -> None:
        """Store the value, whatever was there."""

    def get(self, key: str, timeout_s: float) -> str:
        """Wait for the key and return its value; TimeoutError when it does not come in time."""
        ...

    def wait(self, key: str, timeout_s: float) -> bool:
        """Wait until the key exists; False when it does not come in time."""
        ...

    def check(self, key: str) -> bool:
        """Whether the key exists now."""
        ...

    def compare_set(self, key: str, expected: str, desired: str) -> str | None:
        """Replace exactly `expected` ("" stands for no value yet) by `desired`; returns what is stored afterwards."""

    def set_once(self, key: str, value: str) -> str:
        """Store a non-empty value unless one is there: the first writer wins. Returns what is stored."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return its new value."""
        ...

    def push(self, queue: str, value: str) -> None:
        """Append to a queue."""

    def take(self, queue: str, timeout_s: float) -> list[str]:
        """Take values off a queue, the oldest first, each for one taker only: some of those that are there, or the
        first that comes; empty when none comes in time."""
        ...

    def delete(self, key: str) -> bool:
        """Remove a key, and say whether it was there."""
        ...

    def delete_all(self, beginning: str) -> None:
        """Remove the keys that begin so; queues stay."""

    def clone(self) -> Self:
        """Open another connection to the same store."""
        ...

    def close(self) -> None:
        """Let go of the connection; its server ends it for all."""


def reserve(host: str, port: int) -> socket.socket:
    """Take the port that a store will be served on, before anything is started that needs to know it.

    Port 0 takes any free one. Whatever other addresses this machine has, the port can't be reached there.
    """
    try:
        family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise StoreError(f"the host {host!r} is unknown ({error.strerror})") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keep_alive(listener)  # What it accepts inherits that.
    try:
        listener.bind((found[0], port))
        # Until it is listened at, another process that sets this, too, could take the port (`gate.Gate` sets it again).
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ElsewhereError(f"{host} is not an address of this machine; give one that is") from error
        kind = TakenError if error.errno == errno.EADDRINUSE else StoreError
        raise kind(f"cannot serve the store on port {port} ({error.strerror})") from error
    return listener


def end(sock: socket.socket) -> None:
    """Close this end of a connection. The other side hears of it, even if a process that was forked meanwhile has this
    end, too."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    sock.close()


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel end a connection whose other end does not answer any more, idle or not, within SILENT_S."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S // 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT_S // 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_S)


def wait_until_reachable(address: Address, timeout_s: float) -> None:
    """Wait for something to listen there; StoreError when nothing does in time. Needs neither torch nor threads."""
    deadline = time.monotonic() + timeout_s
    while True:
        remaining = deadline - time.monotonic()
        try:
            socket.create_connection(address, timeout=max(remaining, PROBE_PERIOD_S)).close()
            return
        except OSError as error:
            if remaining <= PROBE_PERIOD_S:
                raise StoreError(f"nothing answers at {address} ({error.strerror or error})") from error
        time.sleep(PROBE_PERIOD_S)
