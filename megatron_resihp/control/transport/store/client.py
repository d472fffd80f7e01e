# SPDX-License-Identifier: Apache-2.0
"""A connection to the store that node 0 serves, and the ways to it: from an agent or a command, to its port.

May import: the standard library and `control.transport`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Final, Protocol

from megatron_resihp.control.transport.access.gate import enter
from megatron_resihp.control.transport.access.secret import Secret
from megatron_resihp.control.transport.access.secure import Session
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.leaders import ANSWER_S as LED_ANSWER_S
from megatron_resihp.control.transport.leaders import Leaders
from megatron_resihp.control.transport.sockets import PROBE_PERIOD_S, StoreError, end, keep_alive
from megatron_resihp.control.transport.store.wire import (
    LARGEST,
    LONGEST_WAIT_S,
    MAX_KEY_BYTES,
    MAX_VALUE_BYTES,
    PURPOSE,
    Op,
    Reply,
    Request,
    Said,
    read_reply,
    read_values,
    write_request,
)

CLONE_TIMEOUT_S: Final = 10.0
ANSWER_S: Final = 300.0
"""`patience_s` where no other coordinator may come: this one may be stopped."""
ATTEMPT_S: Final = 30.0
"""How long a server that is there may take to let one connection in, when there is time for another."""
READ_BYTES: Final = 1 << 18


class Carrier(Protocol):
    """Makes messages a stream, and a stream messages."""

    def seal(self, message: bytes) -> bytes: ...

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Whole messages so far; ValueError for what is none."""
        ...


class Way(Protocol):
    """A way to the store; as text, where that is."""

    @property
    def leaders(self) -> Leaders | None:
        """They tell of another coordinator, to whose store it leads once the last one's is lost; None: none follows."""
        ...

    def enter(self, within_s: float) -> Connection:
        """Open a connection, at the first attempt.

        Raises:
            RefusedSecretError, OtherProtocolError, StoreError: another server is there.
            OSError: none is, or it does not answer in time.
        """
        ...


class Direct:
    """The way of agents and commands: to the port.

    Args:
        leaders: tell where the store is now, if it is not at the address any more; None: it is there or nowhere.
    """

    def __init__(self, address: Address, secret: Secret, leaders: Leaders | None = None) -> None:
        self._address, self._secret, self.leaders = address, secret, leaders

    def __str__(self) -> str:
        return str(self._address)

    def address(self) -> Address:
        """Where the store is, which a file may tell."""
        return (self.leaders and self.leaders.address()) or self._address

    def open(self, address: Address, within_s: float) -> tuple[socket.socket, Session]:
        """Connect to the store there; raises as `enter` does."""
        sock, session = enter(address, self._secret, PURPOSE, LARGEST, within_s)
        keep_alive(sock)
        self._address = address
        return sock, session

    def enter(self, within_s: float) -> Connection:
        address = self.address()
        return Connection(address, self, *self.open(address, within_s))


class Connection:
    """One connection. It is no thread's but the caller's; whatever fails for want of the server raises StoreError.

    Args:
        address: of the store.
        way: that leads to it.
    """

    def __init__(self, address: Address, way: Way, sock: socket.socket, carrier: Carrier) -> None:
        self.address = address
        self.way = way
        self._answer_s = patience_s(way)
        self.closed = False
        self._sock = sock
        self._carrier = carrier
        self._lost: StoreError | None = None

    def ask(self, op: Op, *fields: bytes, within_s: float = 0.0) -> Reply:
        """Have the server do something, and wait for it.

        Args:
            within_s: in which what is asked for must come.
        """
        if self.closed:
            raise StoreError(f"this connection to the store at {self.address} is closed")
        if self._lost is not None:
            raise self._lost
        within_s = min(max(within_s, 0.0), LONGEST_WAIT_S)
        try:
            reply = exchange(self._sock, self._carrier, Request(op, fields, within_s), within_s + self._answer_s)
        except (OSError, ValueError) as error:
            raise self._lose(_why(error)) from error
        except BaseException:
            # An answer that comes later would be taken for the next one's.
            self._lose("a call was interrupted")
            raise
        if reply.said is Said.WRONG:
            raise ValueError(f"{fields[0].decode(errors='replace')!r}: {reply.value.decode(errors='replace')}")
        return reply

    def close(self) -> None:
        """From any thread; a call under way ends."""
        self.closed = True
        end(self._sock)

    def _lose(self, why: str) -> StoreError:
        end(self._sock)
        self._lost = StoreError(f"the connection to the store at {self.address} is lost ({why})")
        return self._lost


def patience_s(way: Way) -> float:
    """How long a server that is there may take to answer, beyond what it was asked to wait."""
    return ANSWER_S if way.leaders is None else LED_ANSWER_S


def exchange(sock: socket.socket, carrier: Carrier, request: Request, timeout_s: float) -> Reply:
    """Send a request and wait for its answer; raises OSError, and ValueError where what comes is none."""
    sock.settimeout(timeout_s)
    sock.sendall(carrier.seal(write_request(request)))
    while True:
        data = sock.recv(READ_BYTES)
        if not data:
            raise ConnectionResetError("its server has ended it")
        for message in carrier.feed(data):
            return read_reply(message)


class StoreClient:
    """The `Store` over one connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    @property
    def address(self) -> Address:
        return self.connection.address

    def set(self, key: str, value: str) -> None:
        self.connection.ask(Op.SET, *_sized(key, value))

    def get(self, key: str, timeout_s: float) -> str:
        reply = self.connection.ask(Op.GET, key.encode(), within_s=timeout_s)
        if reply.said is Said.NO:
            raise TimeoutError(f"the store has no {key!r} after {timeout_s:g} s")
        return _text(reply)

    def wait(self, key: str, timeout_s: float) -> bool:
        return self.connection.ask(Op.WAIT, key.encode(), within_s=timeout_s).said is Said.YES

    def check(self, key: str) -> bool:
        return self.connection.ask(Op.CHECK, key.encode()).said is Said.YES

    def compare_set(self, key: str, expected: str, desired: str) -> str | None:
        name, value = _sized(key, desired)
        reply = self.connection.ask(Op.COMPARE_SET, name, expected.encode(), value)
        return _text(reply) if reply.said is Said.YES else None

    def set_once(self, key: str, value: str) -> str:
        if not value:
            raise ValueError(f"{key!r}: an empty value cannot be told from none")
        return self.compare_set(key, "", value) or ""

    def add(self, key: str, amount: int) -> int:
        return int(self.connection.ask(Op.ADD, key.encode(), str(amount).encode()).value)

    def push(self, queue: str, value: str) -> None:
        self.connection.ask(Op.PUSH, *_sized(queue, value))

    def take(self, queue: str, timeout_s: float) -> list[str]:
        reply = self.connection.ask(Op.TAKE, queue.encode(), within_s=timeout_s)
        # Who pushes what is no text gets it back as something else that is none.
        return [each.decode(errors="replace") for each in read_values(reply.value)]

    def delete(self, key: str) -> bool:
        return self.connection.ask(Op.DELETE, key.encode()).said is Said.YES

    def delete_all(self, beginning: str) -> None:
        self.connection.ask(Op.DELETE_ALL, beginning.encode())

    def clone(self) -> StoreClient:
        return StoreClient(open_connection(self.connection.way, CLONE_TIMEOUT_S))

    def close(self) -> None:
        self.connection.close()


def connect(address: Address, secret: Secret, timeout_s: float, leaders: Leaders | None = None) -> StoreClient:
    """Connect to a store, waiting for it to be served; StoreError when it cannot be reached in time."""
    return StoreClient(open_connection(Direct(address, secret, leaders), timeout_s))


def open_connection(way: Way, timeout_s: float) -> Connection:
    """As `connect`, by any way.

    Raises:
        RefusedSecretError: another job answers there.
        StoreError: none answers in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        remaining = deadline - time.monotonic()
        try:
            return way.enter(min(max(remaining, PROBE_PERIOD_S), ATTEMPT_S))
        except OSError as error:
            if deadline - time.monotonic() <= PROBE_PERIOD_S:
                raise StoreError(f"nothing answers at {way} ({_why(error)})") from error
        time.sleep(PROBE_PERIOD_S)


def _sized(key: str, value: str) -> tuple[bytes, bytes]:
    name, data = key.encode(), value.encode()
    if len(data) > MAX_VALUE_BYTES or len(name) > MAX_KEY_BYTES:
        raise ValueError(f"{key[:80]!r}: the store takes values up to {MAX_VALUE_BYTES} bytes")
    return name, data


def _text(reply: Reply) -> str:
    return reply.value.decode(errors="replace")


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
