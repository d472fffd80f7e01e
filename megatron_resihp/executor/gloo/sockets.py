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

CONNECT_S = 0.1
WORD = 8
"""Size in bytes of the numbers that gloo writes to the store, and of the rank that a connecting peer sends."""
FAMILY = 2
"""Bytes of a socket address before the port."""


def tcp_sockets(except_for: Collection[str] = ()) -> Iterator[tuple[str, socket.socket]]:
    """Every TCP socket of this process as (identity, duplicate); the duplicate is closed on the next step.

    Sockets in `except_for` are not duplicated: gloo ends the process if a socket that it closes while freeing a group
    has a duplicate.
    """
    for name in os.listdir("/proc/self/fd"):
        try:
            file = os.fstat(int(name))
            identity = f"socket:[{file.st_ino}]"  # as /proc shows it
            if not stat.S_ISSOCK(file.st_mode) or identity in except_for:
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
                yield identity, duplicate


def identities(elsewhere_than: Collection[int] = ()) -> set[str]:
    """The TCP sockets that exist now, but for those at these ports of this process."""
    return {identity for identity, tcp in tcp_sockets() if tcp.getsockname()[1] not in elsewhere_than}


def ports(published: Iterable[bytes]) -> set[int]:
    """The ports in values that gloo groups have published; other values count for nothing."""
    return {_published_port(value) for value in published} - {0}


def listeners(published: Iterable[bytes], except_for: set[str]) -> set[str]:
    """The listening sockets of gloo groups, given the groups' published values; never one of `except_for`."""
    own = ports(published)
    return {identity for identity, tcp in tcp_sockets(except_for) if _listens(tcp) and tcp.getsockname()[1] in own}


def end_receiving(except_for: set[str], listening: set[int]) -> dict[str, socket.socket]:
    """End receiving on connections that are not in `except_for` and have an end at one of these ports.

    Returns:
        by identity, the duplicate that keeps each connection open; close it once all peers have ended theirs.
    """
    kept: dict[str, socket.socket] = {}
    for identity, tcp in tcp_sockets(except_for):
        if identity in kept or _listens(tcp):
            continue
        try:
            if tcp.getsockname()[1] in listening or tcp.getpeername()[1] in listening:
                tcp.shutdown(socket.SHUT_RD)
                # It also makes gloo's socket blocking, so a send under way finishes; else gloo would queue and forget
                # its rest.
                kept[identity] = tcp.dup()
        except OSError:
            continue  # already closed by its owner or its peer
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
    if not sought:
        return 0
    listeners = {
        tcp.getsockname()[1]: (tcp.family, tcp.getsockname()) for _, tcp in tcp_sockets(except_for) if _listens(tcp)
    }
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


def _listens(tcp: socket.socket) -> bool:
    return bool(tcp.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
