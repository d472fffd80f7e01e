# SPDX-License-Identifier: Apache-2.0
"""Stands between processes and a server, and cuts or holds up what they say."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from megatron_resihp.control.transport.access.secret import Secret
from megatron_resihp.control.transport.address import Address


class GoBetween:
    """Passes on what comes to its port, until it cuts all connections; it takes new ones.

    Attributes:
        came: how many connections have come.
        heard: what has passed, in both directions.
        open: unset it, and nothing is passed on until it is set again.
    """

    def __init__(self, target: Address, secret: Secret) -> None:
        self._target = target
        self.secret = secret
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self.came = 0
        self.heard = bytearray()
        self.open = threading.Event()
        self.open.set()
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.open.set()
        self.cut()

    def _serve(self) -> None:
        while True:
            try:
                one, _ = self._listener.accept()
            except OSError:
                return
            self.came += 1
            other = socket.create_connection(self._target)
            self._ends += [one, other]
            for source, sink in ((one, other), (other, one)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self.open.wait()
                self.heard += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
