# SPDX-License-Identifier: Apache-2.0
"""A connection to the store that node 0 serves. May import: the standard library and this package's modules."""

from __future__ import annotations

import socket
import time
from typing import Final

from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.gate import enter
from megatron_resihp.control.transport.leaders import ANSWER_S as LED_ANSWER_S
from megatron_resihp.control.transport.leaders import Leaders
from megatron_resihp.control.transport.secret import Secret
from megatron_resihp.control.transport.secure import ForgedError, Session
from megatron_resihp.control.transport.store import PROBE_PERIOD_S, StoreError, keep_alive
from megatron_resihp.control.transport.store_wire import (
    LARGEST,
    MAX_KEY_BYTES,
    MAX_VALUE_BYTES,
    PURPOSE,
    MalformedRequestError,
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
"""How long a server that is there may take to answer, beyond what it was asked to wait: it may be stopped."""
ATTEMPT_S: Final = 30.0
"""How long a server that is there may take to let one connection in, when there is time for another."""
LONGEST_WAIT_S: Final = 24 * 3600.0
READ_BYTES: Final = 1 << 18


class Connection:
    """One connection. It is no thread's but the caller's; whatever fails for want of the server raises StoreError.

    Args:
        leaders: tell where the store is once this one's server is lost; None: nowhere.
    """

    def __init__(
        self, address: Address, secret: Secret, sock: socket.socket, session: Session, leaders: Leaders | None = None
    ) -> None:
        self.address = address
        self.secret = secret
        self.leaders = leaders
        self._answer_s = ANSWER_S if leaders is None else LED_ANSWER_S
        self.closed = False
        self._sock = sock
        self._session = session
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
            self._sock.settimeout(within_s + self._answer_s)
            self._sock.sendall(self._session.seal(write_request(Request(op, fields, within_s))))
            reply = self._receive()
        except (OSError, ForgedError, MalformedRequestError) as error:
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
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()

    def _lose(self, why: str) -> StoreError:
        self._sock.close()
        self._lost = StoreError(f"the connection to the store at {self.address} is lost ({why})")
        return self._lost

    def _receive(self) -> Reply:
        while True:
            data = self._sock.recv(READ_BYTES)
            if not data:
                raise ConnectionResetError("its server has ended it")
            for message in self._session.feed(data):
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
        return connect(self.address, self.connection.secret, CLONE_TIMEOUT_S, self.connection.leaders)

    def close(self) -> None:
        self.connection.close()


def connect(address: Address, secret: Secret, timeout_s: float, leaders: Leaders | None = None) -> StoreClient:
    """Connect to a store, waiting for it to be served; StoreError when it cannot be reached in time."""
    return StoreClient(open_connection(address, secret, timeout_s, leaders))


def open_connection(
    address: Address, secret: Secret, timeout_s: float, leaders: Leaders | None = None
) -> Connection:  # fmt: skip
    """As `connect`.

    Args:
        leaders: tell where the store is now, if it is not at the address any more.

    Raises:
        RefusedSecretError: another job answers there.
        StoreError: none answers in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        remaining = deadline - time.monotonic()
        try:
            at = (leaders and leaders.address()) or address
            sock, session = enter(at, secret, PURPOSE, LARGEST, min(max(remaining, PROBE_PERIOD_S), ATTEMPT_S))
            keep_alive(sock)
            return Connection(at, secret, sock, session, leaders)
        except OSError as error:
            if deadline - time.monotonic() <= PROBE_PERIOD_S:
                raise StoreError(f"nothing answers at {address} ({_why(error)})") from error
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
