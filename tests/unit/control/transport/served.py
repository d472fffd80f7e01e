# SPDX-License-Identifier: Apache-2.0
"""A store that a test serves, a secret for it, and the relay of a node's agent to it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

from megatron_resihp.control.transport.access.secret import Secret, fresh_secret
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.leaders import Leaders
from megatron_resihp.control.transport.sockets import reserve
from megatron_resihp.control.transport.store.by_agent import ByAgent, at_hatch
from megatron_resihp.control.transport.store.client import Direct, StoreClient, connect, open_connection
from megatron_resihp.control.transport.store.relay import StoreRelay
from megatron_resihp.control.transport.store.server import StoreServer
from megatron_resihp.protocol.together import Together

HOST = "127.0.0.1"
CONNECT_S = 10.0


class Served:
    """A server, and connections to it."""

    def __init__(self, listener: socket.socket | None = None, secret: Secret | None = None, nodes: int = 1) -> None:
        listener = reserve(HOST, 0) if listener is None else listener
        self.address = Address(HOST, listener.getsockname()[1])
        self.secret = fresh_secret() if secret is None else secret
        self.server = StoreServer(listener, self.secret, nodes)

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


class Node:
    """A node's agent, as far as its workers know it: it relays what they ask to the store at an address."""

    def __init__(self, address: Address, secret: Secret, leaders: Leaders | None = None) -> None:
        self._leaders = leaders
        self.relay = StoreRelay(Direct(address, secret, leaders), Together("node"))
        self.hatches: dict[int, socket.socket] = {}
        self.relay.start()

    def way(self, worker: int = 0) -> ByAgent:
        """That of a worker to the store."""
        if worker not in self.hatches:
            kept, self.hatches[worker] = socket.socketpair(type=socket.SOCK_SEQPACKET)
            self.relay.add(worker, kept)
        return ByAgent(at_hatch(self.hatches[worker]), self._leaders)

    def connect(self, worker: int = 0) -> StoreClient:
        return StoreClient(open_connection(self.way(worker), CONNECT_S))

    def close(self) -> None:
        self.relay.close(CONNECT_S)
        for hatch in self.hatches.values():
            hatch.close()


@contextmanager
def relaying(address: Address, secret: Secret, leaders: Leaders | None = None) -> Iterator[Node]:
    with closing(Node(address, secret, leaders)) as node:
        yield node
