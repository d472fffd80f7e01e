# SPDX-License-Identifier: Apache-2.0
"""A store that a test serves, and a secret for it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.secret import Secret, fresh_secret
from megatron_resihp.control.transport.store import reserve
from megatron_resihp.control.transport.store_client import StoreClient, connect
from megatron_resihp.control.transport.store_server import StoreServer

HOST = "127.0.0.1"
CONNECT_S = 10.0


class Served:
    """A server, and connections to it."""

    def __init__(self, listener: socket.socket | None = None, secret: Secret | None = None) -> None:
        listener = reserve(HOST, 0) if listener is None else listener
        self.address = Address(HOST, listener.getsockname()[1])
        self.secret = fresh_secret() if secret is None else secret
        self.server = StoreServer(listener, self.secret)

    def connect(self) -> StoreClient:
        return connect(self.address, self.secret, CONNECT_S)

    def close(self) -> None:
        self.server.close()


@contextmanager
def serving() -> Iterator[Served]:
    served = Served()
    try:
        yield served
    finally:
        served.close()
