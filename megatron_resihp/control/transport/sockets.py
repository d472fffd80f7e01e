# SPDX-License-Identifier: Apache-2.0
"""Sockets of the store's connections: the port that it is served at, how ends are closed, and losses noticed.

May import: the standard library and `control.transport.address`.
"""

from __future__ import annotations

import errno
import socket
import time
from typing import Final

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
