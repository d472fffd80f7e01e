# SPDX-License-Identifier: Apache-2.0
"""The way of a worker to the store: its agent asks there for it. May import: the standard library and
`control.transport`.

A worker makes the two ends of each connection, and hands one over to the agent, at a hatch that it has from its start.
So no other process can come in its name, and it needs no secret.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from megatron_resihp.control.transport.access.encryption import CertificateError
from megatron_resihp.control.transport.access.gate import OtherProtocolError, RefusedSecretError
from megatron_resihp.control.transport.address import Address, parse_address
from megatron_resihp.control.transport.frames import Frames, framed
from megatron_resihp.control.transport.leaders import Leaders
from megatron_resihp.control.transport.sockets import StoreError, end
from megatron_resihp.control.transport.store.client import Connection, exchange
from megatron_resihp.control.transport.store.wire import LARGEST, Op, Reply, Request, Said

LATE_S: Final = 1.0
"""How much later than it was told to the agent may say that the store can't be reached."""
HANDED_OVER: Final = b"."
NUMBER: Final = struct.Struct("i")
"""Of a file."""
LARGEST_LOCAL: Final = LARGEST - 64
"""Bytes of a request or an answer: under a number it is longer."""


class Kind(StrEnum):
    """Why an agent can't reach the store."""

    REFUSED = "refused"
    """Its machine is there, and no process listens."""
    SILENT = "silent"
    SECRET = "secret"
    VERSION = "version"
    FOREIGN = "foreign"
    """Something else answers."""


_KINDS: Final[dict[Kind, type[StoreError]]] = {
    Kind.SECRET: RefusedSecretError, Kind.VERSION: OtherProtocolError, Kind.FOREIGN: StoreError,
}  # fmt: skip


class Plain:
    """Frames without seals: nobody else reaches this connection."""

    def __init__(self) -> None:
        self.feed = Frames(LARGEST).feed
        self.seal = framed


class ByAgent:
    """The way of a worker, and of its agent's own threads.

    Args:
        hand_over: gives the agent one end of a connection; OSError where that can't be.
        leaders: as of `Way`.
    """

    def __init__(self, hand_over: Callable[[socket.socket], None], leaders: Leaders | None) -> None:
        self._hand_over = hand_over
        self.leaders = leaders
        self._place = "node 0"

    def __str__(self) -> str:
        return self._place

    def enter(self, within_s: float) -> Connection:
        own, given = socket.socketpair()
        try:
            with given:
                self._hand_over(given)
            carrier = Plain()
            reply = exchange(own, carrier, Request(Op.REACH, (), within_s), within_s + LATE_S)
            return Connection(self._read(reply), self, own, carrier)
        except BaseException:
            end(own)
            raise

    def _read(self, reply: Reply) -> Address:
        if reply.said is Said.NO:
            raise TimeoutError(errno.ETIMEDOUT, "timed out")
        kind, place, why = reply.value.decode(errors="replace").split("\n", 2)
        self._place = place or self._place
        if reply.said is Said.YES:
            return parse_address(place)
        if kind in _KINDS:
            raise _KINDS[Kind(kind)](why)
        raise OSError(errno.ECONNREFUSED if kind == Kind.REFUSED else errno.EHOSTUNREACH, why)


def at_hatch(hatch: socket.socket) -> Callable[[socket.socket], None]:
    """What hands a connection over there, in any thread."""

    def hand_over(given: socket.socket) -> None:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, NUMBER.pack(given.fileno()))
        hatch.sendmsg([HANDED_OVER], [rights], socket.MSG_DONTWAIT)

    return hand_over


def take_at_hatch(hatch: socket.socket) -> socket.socket | None:
    """The next connection that was handed over; None: it was none, or there is no place for it.

    Raises:
        BlockingIOError: none has come.
        OSError: none comes any more.
    """
    said, rights, _, _ = hatch.recvmsg(
        len(HANDED_OVER), socket.CMSG_LEN(NUMBER.size), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    )
    # Where this process may open no more files, nothing has come with it.
    numbers = [NUMBER.unpack(data)[0] for _, _, data in rights if len(data) == NUMBER.size]
    found = _connection(numbers[0]) if numbers else None
    if said:
        return found
    if found is not None:
        found.close()
    raise ConnectionResetError("its worker has ended")


def _connection(number: int) -> socket.socket | None:
    try:
        sock = socket.socket(fileno=number)
    except OSError:
        os.close(number)
        return None
    if sock.family == socket.AF_UNIX and sock.type == socket.SOCK_STREAM:
        return sock
    sock.close()
    return None


def reached(address: Address) -> Reply:
    """What an agent says that reaches the store there."""
    return Reply(Said.YES, _said("", address, ""))


def unreachable(address: Address | None, error: Exception) -> Reply:
    """What an agent says that can't reach the store."""
    kind = Kind.SILENT
    if isinstance(error, ConnectionRefusedError):
        kind = Kind.REFUSED
    if isinstance(error, CertificateError):
        kind = Kind.FOREIGN
    for each, cause in _KINDS.items():
        if type(error) is cause:
            kind = each
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return Reply(Said.WRONG, _said(kind, address, why))


def _said(kind: str, address: Address | None, why: str) -> bytes:
    return "\n".join((kind, "" if address is None else str(address), why)).encode(errors="replace")
