"""Wakes collectives of gloo that wait for a peer which will never answer. Imports the standard library only.

torch 2.15's gloo has no abort: a collective that waits for a stopped or hung peer waits until its timeout. A peer that
dies, though, is noticed at once because its connections end. So we end our own: shutting a socket down makes gloo fail
every operation on it. Gloo's sockets are told from others by their ports: one end is always a listener of gloo's.
"""

import os
import socket
from collections.abc import Iterator


def tcp_sockets() -> Iterator[tuple[str, socket.socket]]:
    """Every TCP socket of this process as (identity, duplicate); the duplicate is closed on the next step."""
    for name in os.listdir("/proc/self/fd"):
        try:
            identity = os.readlink(f"/proc/self/fd/{name}")
            if not identity.startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
                yield identity, duplicate


def identities() -> set[str]:
    """The TCP sockets that exist now."""
    return {identity for identity, _ in tcp_sockets()}


def listening_ports(except_for: set[str]) -> list[int]:
    """Ports that this process listens on through sockets that are not in `except_for`."""
    return [tcp.getsockname()[1] for identity, tcp in tcp_sockets() if identity not in except_for and _listens(tcp)]


def shut_down(except_for: set[str], ports: set[int] | None) -> int:
    """Shut down connections that are not in `except_for` and have an end at one of `ports` (None: all of them).

    Returns:
        how many connections were shut down.
    """
    count = 0
    for identity, tcp in tcp_sockets():
        if identity in except_for or _listens(tcp):
            continue
        try:
            if ports is None or tcp.getsockname()[1] in ports or tcp.getpeername()[1] in ports:
                tcp.shutdown(socket.SHUT_RDWR)
                count += 1
        except OSError:
            continue  # already closed by its owner or its peer
    return count


def _listens(tcp: socket.socket) -> bool:
    return bool(tcp.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
