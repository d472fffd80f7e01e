# SPDX-License-Identifier: Apache-2.0
"""Which workers a worker can reach: each listens at a port, and the others try it when communication has failed.

A broken link causes no error that names it: waits for a peer's message time out on all workers alike. That
a machine answers at all is known within seconds. May import: the standard library and `control.transport.address`.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from typing import Final

from megatron_resihp.control.transport.address import Address

KNOCK_S: Final = 3.0
"""Machines that are there answer within a round trip, however busy they are: the kernel does."""
AT_ONCE: Final = 128


class Door:
    """Takes connections, and ends them.

    Args:
        host: an address of this machine.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=AT_ONCE)
        self.address = Address(host, self._listener.getsockname()[1])
        threading.Thread(target=self._open, name="resihp-door", daemon=True).start()

    def close(self) -> None:
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()

    def _open(self) -> None:
        while True:
            try:
                self._listener.accept()[0].close()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ECONNABORTED):
                    time.sleep(KNOCK_S / 10)
                    continue
                return


def unreachable(addresses: Mapping[int, Address], timeout_s: float = KNOCK_S) -> list[int]:
    """The workers whose machines do not answer; a machine that refuses the connection has answered."""
    numbers = sorted(addresses)
    parts = (numbers[first : first + AT_ONCE] for first in range(0, len(numbers), AT_ONCE))
    return [number for part in parts for number in _knock({each: addresses[each] for each in part}, timeout_s)]


def _knock(addresses: Mapping[int, Address], timeout_s: float) -> list[int]:
    silent = []
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as waiting:
        for number, address in addresses.items():
            knocking = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
            knocking.setblocking(False)
            error = knocking.connect_ex(address)
            if error == errno.EINPROGRESS:
                waiting.register(knocking, selectors.EVENT_WRITE, number)
                continue
            knocking.close()
            if not _answers(error):
                silent.append(number)
        while waiting.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in waiting.select(left_s):
                knocking = key.fileobj  # type: ignore[assignment]
                waiting.unregister(knocking)
                if not _answers(knocking.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                    silent.append(key.data)
                knocking.close()
        for key in list(waiting.get_map().values()):
            silent.append(key.data)
            key.fileobj.close()  # type: ignore[union-attr]
    return sorted(silent)


def _answers(error: int) -> bool:
    return error in (0, errno.ECONNREFUSED, errno.ECONNRESET)
