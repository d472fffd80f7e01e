# SPDX-License-Identifier: Apache-2.0
"""The key-value store that all processes of a job share: what it promises, and TCPStore's way of keeping it.

May import: the standard library, `control.transport.address` and `control.linux`; torch only inside functions, because
importing it costs seconds.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, Protocol, Self

from megatron_resihp.control import linux
from megatron_resihp.control.transport.address import Address

PREFIX: Final = "resihp/"
MAX_VALUE_BYTES: Final = 8 * 1024 * 1024
"""TCPStore's server drops the connection of a client that sends more."""

CLONE_TIMEOUT_S: Final = 10.0
TORCH_TIMEOUT: Final = timedelta(seconds=300)
PROBE_PERIOD_S: Final = 0.05
EMPTY_PAUSE_S: Final = 0.01
LONGEST_WAIT_S: Final = 24 * 3600.0
SILENT_S: Final = 20
"""Seconds; well below the time in which workers have to report after a death, so that a cut-off worker still can."""


class StoreError(RuntimeError):
    """The store cannot be served, reached or used; its text is one line for people."""


class Store(Protocol):
    """Strings under keys, counters and queues, shared by every process of the job.

    One object is one connection, and a blocking call holds it: every thread has its own, from `clone`. When a call that
    writes has returned, every other connection sees what it wrote. Whatever fails for want of the store raises
    StoreError; what merely takes too long is told by TimeoutError, False or None.
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

    def pop(self, queue: str, timeout_s: float) -> str | None:
        """Take the oldest value off a queue, each for one taker only; None when none comes in time."""

    def delete(self, key: str) -> bool:
        """Remove a key, and say whether it was there."""
        ...

    def clone(self) -> Self:
        """Open another connection to the same store."""
        ...

    def close(self) -> None:
        """Let go of the connection; its server ends it for all."""


class _Connection:
    """One connection to a TCPStore; what fails for want of the server raises StoreError."""

    def __init__(self, raw: Any, address: Address) -> None:
        self._raw = raw
        self._address = address

    @property
    def raw(self) -> Any:
        """The c10d store. Raises StoreError once the connection is closed."""
        if self._raw is None:
            raise StoreError(f"this connection to the store at {self._address} is closed")
        return self._raw

    @property
    def closed(self) -> bool:
        return self._raw is None

    def close(self) -> None:
        self._raw = None

    def call(self, operation: str, *arguments: Any) -> Any:
        """Call a method of the c10d store by name."""
        from torch.distributed import DistNetworkError

        try:
            return getattr(self.raw, operation)(*arguments)
        except DistNetworkError as error:
            raise self.lost(error) from error

    def write(self, operation: str, key: str, value: str) -> None:
        """Call a method that writes, and return once other connections see the value."""
        self.call(operation, PREFIX + key, value)
        # TCPStore does not answer a write: without this, one to a dead server is taken for done, and one that was done
        # may be overtaken by a later one of another connection.
        self.call("check", [PREFIX])

    def call_for_bytes(self, operation: str, *arguments: Any) -> bytes:
        found: bytes = self.call(operation, *arguments)
        return found

    def lost(self, error: Exception) -> StoreError:
        """What to raise where the server is gone."""
        return StoreError(f"the connection to the store at {self._address} is lost ({_first_line(error)})")


class TcpStore:
    """The `Store` over torch's TCPStore: no server of our own, and the same one that process groups meet in."""

    def __init__(self, raw: Any, address: Address) -> None:
        self.address = address
        self._connection = _Connection(raw, address)

    @property
    def torch_store(self) -> Any:
        """The c10d store under this connection, without our prefix, for the rendezvous of process groups.

        It is held by the code that uses it: hand `clone().torch_store` to a process group.
        """
        return self._connection.raw

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._connection.closed

    def set(self, key: str, value: str) -> None:
        _check_size(key, value)
        self._connection.write("set", key, value)

    def get(self, key: str, timeout_s: float) -> str:
        if not self.wait(key, timeout_s):
            raise TimeoutError(f"the store has no {key!r} after {timeout_s:g} s")
        return self._connection.call_for_bytes("get", PREFIX + key).decode(errors="replace")

    def wait(self, key: str, timeout_s: float) -> bool:
        from torch.distributed import DistNetworkError, DistStoreError

        if timeout_s <= 0:
            return self.check(key)
        try:
            self._connection.raw.wait([PREFIX + key], timedelta(seconds=min(timeout_s, LONGEST_WAIT_S)))
        except DistStoreError:
            return False
        except DistNetworkError as error:
            raise self._connection.lost(error) from error
        return True

    def check(self, key: str) -> bool:
        found: bool = self._connection.call("check", [PREFIX + key])
        return found

    def compare_set(self, key: str, expected: str, desired: str) -> str | None:
        _check_size(key, desired)
        stored = self._connection.call_for_bytes("compare_set", PREFIX + key, expected, desired).decode()
        # For a key that does not exist TCPStore gives back what was expected, as if it were there.
        if expected and stored == expected and not self.check(key):
            return None
        return stored

    def set_once(self, key: str, value: str) -> str:
        if not value:
            raise ValueError(f"{key!r}: an empty value cannot be told from none")
        _check_size(key, value)
        return self._connection.call_for_bytes("compare_set", PREFIX + key, "", value).decode()

    def add(self, key: str, amount: int) -> int:
        total: int = self._connection.call("add", PREFIX + key, amount)
        return total

    def push(self, queue: str, value: str) -> None:
        _check_size(queue, value)
        self._connection.write("queue_push", queue, value)

    def pop(self, queue: str, timeout_s: float) -> str | None:
        from torch.distributed import QueueEmptyError

        deadline = time.monotonic() + timeout_s
        # A queue is a key while it holds something, but another taker may be faster, or the key be no queue's.
        while self.wait(queue, deadline - time.monotonic()):
            try:
                # Who pushes what is no text gets it back as something else that is none.
                return self._connection.call_for_bytes("queue_pop", PREFIX + queue, False).decode(errors="replace")
            except QueueEmptyError:
                if time.monotonic() >= deadline:
                    break
                time.sleep(EMPTY_PAUSE_S)
        return None

    def delete(self, key: str) -> bool:
        was_there: bool = self._connection.call("delete_key", PREFIX + key)
        return was_there

    def clone(self) -> TcpStore:
        return connect(self.address.host, self.address.port, CLONE_TIMEOUT_S)

    def close(self) -> None:
        self._connection.close()


def _check_size(key: str, value: str) -> None:
    if len(value) > MAX_VALUE_BYTES // 4 and len(value.encode()) > MAX_VALUE_BYTES:
        raise ValueError(f"{key!r}: the store takes values up to {MAX_VALUE_BYTES} bytes")


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
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise StoreError(f"{host} is no address of this machine; give node 0's own") from error
        raise StoreError(f"cannot serve the store on port {port} ({error.strerror})") from error
    return listener


def serve(host: str, port: int = 0, listener: socket.socket | None = None) -> TcpStore:
    """Serve a store from this process, on a socket from `reserve` or on one of its own, and connect to it.

    Others reach it at `host`, which has to name this machine.
    """
    listener = reserve(host, port) if listener is None else listener
    port = listener.getsockname()[1]
    raw = _torch_store(
        host,
        port,
        is_master=True,
        master_listen_fd=listener.detach(),  # The server closes it.
        wait_for_workers=False,
    )
    return TcpStore(raw, Address(host, port))


def connect(host: str, port: int, timeout_s: float) -> TcpStore:
    """Connect to a store, waiting for it to be served; StoreError when it cannot be reached in time."""
    address = Address(host, port)
    deadline = time.monotonic() + timeout_s
    # TCPStore's own retries overrun their limit by seconds and print a stack trace each.
    wait_until_reachable(address, timeout_s)
    remaining = timedelta(seconds=max(deadline - time.monotonic(), 1.0))
    return TcpStore(_torch_store(host, port, timeout=remaining), address)


def _torch_store(host: str, port: int, **options: Any) -> Any:
    # Every wait that runs out, which is nothing to warn of, makes c10d print two warnings. Torch's import reads this.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed import DistError, TCPStore

    try:
        raw = TCPStore(host, port, use_libuv=True, **options)
    except DistError as error:
        raise StoreError(f"no store answers at {Address(host, port)} ({_first_line(error)})") from error
    raw.set_timeout(TORCH_TIMEOUT)
    for connection in linux.own_connections_to(raw.port):
        with suppress(OSError):  # another thread's, which that has closed meanwhile
            keep_alive(connection)
    return raw


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


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
