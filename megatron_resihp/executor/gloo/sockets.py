# SPDX-License-Identifier: Apache-2.0
"""Ends gloo collectives that wait for a peer that will never answer. Imports the standard library only.

torch 2.15's gloo has no abort: a collective that waits for a stopped or hung peer waits until its timeout. But gloo
notices a dead peer at once, because its connections end. So we end our own: shutting a socket down makes gloo fail
every operation on it. Gloo's sockets are recognised by their ports: one end is always a gloo listener, whose address
gloo publishes. NCCL's must be left alone: its proxy frees memory of the device as soon as it finds its connections
ended after an abort, even where kernels still use that memory, which then fault.

Only receiving is shut, and a duplicate keeps the connection open when gloo closes its end. Gloo notices a moment later,
on its own thread. Until then all sends, here or by the peer, must still succeed: gloo forgets a send that fails before
it has noticed the end, and a wait for that send lasts until the group's timeout.

A connection that does not exist yet can't be ended: one side waits for the other to connect, and that peer may be dead
or have left the epoch. So we connect to our own listener in the peer's place, and end that connection.
"""

import os
import socket
import stat
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

CONNECT_S = 0.1
WORD = 8
"""Size in bytes of the numbers that gloo writes to the store, and of the rank that a connecting peer sends."""
FAMILY = 2
"""Bytes of a socket address before the port."""


class Ends(NamedTuple):
    """What a TCP socket is bound to: its port, and its peer's; 0: it has no peer."""

    listens: bool
    own: int
    peer: int


_settled: dict[str, Ends | None] = {}
"""By identity, what stays as it is: the ends of a socket that listens or is connected; None: it is no TCP socket."""


def tcp_sockets(except_for: Collection[str] = ()) -> Iterator[tuple[str, socket.socket]]:
    """Every TCP socket of this process as (identity, duplicate); the duplicate is closed on the next step.

    Sockets in `except_for` are not duplicated: gloo ends the process if a socket that it closes while freeing a group
    has a duplicate.
    """
    for identity, number, _ in _found(except_for):
        duplicate = _duplicate(number, identity)
        if duplicate is not None:
            with duplicate:
                yield identity, duplicate


def _found(except_for: Collection[str] = ()) -> Iterator[tuple[str, int, Ends]]:
    """Every TCP socket, as identity and file descriptor, with its ends. Only those that may have changed are asked:
    this is done several times in a recovery, and a socket's ends take ten times as long to find out as its identity."""
    seen = set()
    for number in map(int, os.listdir("/proc/self/fd")):
        identity = _identity(number)
        if identity is None:
            continue
        seen.add(identity)
        if identity in except_for:
            continue
        if identity not in _settled:
            ends, stays = _ask(number, identity)
            if stays:
                _settled[identity] = ends
        else:
            ends = _settled[identity]
        if ends is not None:
            yield identity, number, ends
    for gone in set(_settled) - seen:
        _settled.pop(gone, None)


def _identity(number: int) -> str | None:
    """Of the socket with this file descriptor, as /proc shows it; None: it is none."""
    try:
        file = os.fstat(number)
    except OSError:
        return None
    return f"socket:[{file.st_ino}]" if stat.S_ISSOCK(file.st_mode) else None


def _duplicate(number: int, identity: str) -> socket.socket | None:
    """Of the socket with this file descriptor; None: it has been closed."""
    try:
        copy = os.dup(number)
    except OSError:
        return None
    # Another may have got the number meanwhile.
    if _identity(copy) == identity:
        return socket.socket(fileno=copy)
    os.close(copy)
    return None


def _ask(number: int, identity: str) -> tuple[Ends | None, bool]:
    """A socket's ends, and whether they stay; None: it is no TCP socket, or has been closed."""
    duplicate = _duplicate(number, identity)
    if duplicate is None:
        return None, False
    with duplicate:
        if duplicate.family not in (socket.AF_INET, socket.AF_INET6) or duplicate.type != socket.SOCK_STREAM:
            return None, True
        own = duplicate.getsockname()[1]
        if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return Ends(True, own, 0), True
        try:
            return Ends(False, own, duplicate.getpeername()[1]), True
        except OSError:
            return Ends(False, own, 0), False


def identities(elsewhere_than: Collection[int] = ()) -> set[str]:
    """The TCP sockets that exist now, but for those at these ports of this process."""
    return {identity for identity, _, ends in _found() if ends.own not in elsewhere_than}


def ports(published: Iterable[bytes]) -> set[int]:
    """The ports in values that gloo groups have published; other values count for nothing."""
    return {_published_port(value) for value in published} - {0}


def listeners(published: Iterable[bytes], except_for: set[str]) -> set[str]:
    """The listening sockets of gloo groups, given the groups' published values; never one of `except_for`."""
    own = ports(published)
    return {identity for identity, _, ends in _found(except_for) if ends.listens and ends.own in own}


def end_receiving(except_for: set[str], listening: set[int]) -> dict[str, socket.socket]:
    """End receiving on connections that are not in `except_for` and have an end at one of these ports.

    Returns:
        by identity, the duplicate that keeps each connection open; close it once all peers have ended theirs.
    """
    kept: dict[str, socket.socket] = {}
    for identity, number, ends in _found(except_for):
        if identity in kept or ends.listens or not {ends.own, ends.peer} & listening:
            continue
        duplicate = _duplicate(number, identity)
        if duplicate is None:
            continue
        try:
            duplicate.shutdown(socket.SHUT_RD)
        except OSError:
            duplicate.close()  # already closed by its owner or its peer
            continue
        # Gloo's own, too, is blocking then, so a send under way finishes; else gloo would queue and forget its rest.
        duplicate.setblocking(True)
        kept[identity] = duplicate
    return kept


def stand_in(sought: Iterable[tuple[bytes, int]], except_for: set[str]) -> int:
    """Connect to this process's gloo listeners in the place of peers, which then seem to disconnect at once.

    Args:
        sought: for each peer, the value that gloo has published for this process's group, and the peer's rank in it. A
            gloo pair that is already connected ignores this.
        except_for: sockets that are not gloo's.

    Returns:
        the number of connections made.
    """
    sought = list(sought)
    wanted = {_published_port(published) for published, _ in sought}
    listeners = {}
    for identity, number, ends in _found(except_for) if sought else ():
        if ends.listens and ends.own in wanted and (duplicate := _duplicate(number, identity)) is not None:
            with duplicate:
                listeners[ends.own] = duplicate.family, duplicate.getsockname()
    count = 0
    for published, rank in sought:
        listener = listeners.get(_published_port(published))
        if listener is None:
            continue
        family, address = listener
        with socket.socket(family) as connection:
            connection.settimeout(CONNECT_S)
            try:
                connection.connect(address)
                connection.sendall(rank.to_bytes(WORD, sys.byteorder))
                count += 1
            except OSError:
                continue  # its owner is just closing it
    return count


def _published_port(published: bytes) -> int:
    """The port in the value that gloo writes to the store: length and name of the host, length and socket address. 0:
    the value is something else, such as NCCL's id."""
    port_at = WORD + int.from_bytes(published[:WORD], sys.byteorder) + WORD + FAMILY
    return int.from_bytes(published[port_at : port_at + 2], "big")
