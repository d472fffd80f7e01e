# SPDX-License-Identifier: Apache-2.0
"""Serves the store, in a thread of node 0's launcher. Whoever has not proved to be of the job is not heard.

May import: the standard library and `control.transport`.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import deque
from typing import Final, cast

from megatron_resihp.control.transport.access.gate import Gate
from megatron_resihp.control.transport.access.secret import Secret
from megatron_resihp.control.transport.access.secure import ForgedError, Session
from megatron_resihp.control.transport.store.storage import Storage, Told
from megatron_resihp.control.transport.store.wire import (
    LARGEST,
    PURPOSE,
    MalformedRequestError,
    Op,
    Request,
    read_number,
    read_relayed,
    read_request,
    write_numbered,
    write_reply,
)

READ_BYTES: Final = 1 << 18
LOOK_S: Final = 1.0
"""How often the gate is looked at when nothing comes."""
MOST_OPEN: Final = 4096
"""Requests under numbers that one connection may have open."""
MOST_UNSENT: Final = 8 * LARGEST
"""Bytes of answers that a connection has not taken, beyond which nothing more is answered."""


class _Client:
    """A connection, and what it has not taken yet.

    Attributes:
        open: numbers under which it waits for answers.
        unread: messages that have come and wait until earlier answers are taken.
    """

    def __init__(self, sock: socket.socket, session: Session) -> None:
        self.sock = sock
        self.session = session
        self.unsent = b""
        self.open: set[int] = set()
        self.unread: deque[bytes] = deque()


_Asker = tuple[_Client, int | None]
"""And under which number; None: a request that has none, for which its connection waits."""


class StoreServer:
    """Serves until it is closed.

    Args:
        listener: bound; belongs to this object from now on.
        nodes: how many may connect at once.
    """

    def __init__(self, listener: socket.socket, secret: Secret, nodes: int = 1) -> None:
        self._gate = Gate(listener, secret, PURPOSE, LARGEST, nodes)
        self._storage = Storage()
        self._clients: dict[int, _Client] = {}
        self._closing = False
        self._waker, self._wakened = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._gate, selectors.EVENT_READ)
        self._selector.register(self._wakened, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="resihp-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections; the port is free then."""
        self._closing = True
        self._waker.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            for client in list(self._clients.values()):
                self._drop(client)
            self._gate.close()
            self._selector.close()
            self._wakened.close()

    def _turn(self) -> None:
        now = time.monotonic()
        deadline = self._storage.next_deadline
        within_s = LOOK_S if deadline is None else min(max(deadline - now, 0.0), LOOK_S)
        for key, _ in self._selector.select(within_s):
            if isinstance(key.data, _Client) and self._clients.get(key.fd) is key.data:
                self._serve(key.data)
        self._tell(self._storage.give_out())
        now = time.monotonic()
        for sock, session in self._gate.look(now):
            client = self._clients[sock.fileno()] = _Client(sock, session)
            self._selector.register(sock, selectors.EVENT_READ, client)
        self._tell(self._storage.expire(now))

    def _serve(self, client: _Client) -> None:
        """Read from a client, or send it the rest of an answer."""
        try:
            if client.unsent:
                self._send(client, b"")
                self._take_unread(client)
                return
            data = client.sock.recv(READ_BYTES)
            for message in client.session.feed(data):
                client.unread.append(message)
                self._take_unread(client)
        except BlockingIOError:
            return
        except (OSError, ForgedError, MalformedRequestError):
            data = b""
        if not data:
            self._drop(client)

    def _take_unread(self, client: _Client) -> None:
        """Raises MalformedRequestError."""
        while client.unread and len(client.unsent) <= MOST_UNSENT:
            self._take(client, read_request(client.unread.popleft()))

    def _take(self, client: _Client, request: Request) -> None:
        """Raises MalformedRequestError."""
        asker: _Asker = (client, None)
        if request.op is Op.DROP:
            number = read_number(request)
            self._storage.forget((client, number))
            client.open.discard(number)
            return
        if request.op is Op.RELAY:
            number = read_number(request)
            if number in client.open or len(client.open) >= MOST_OPEN:
                raise MalformedRequestError("more than one may ask at once")
            client.open.add(number)
            asker, request = (client, number), read_relayed(request)
        elif client.unsent or self._storage.waits(asker):
            raise MalformedRequestError("a request before the last one was answered")
        self._tell(self._storage.ask(asker, request, time.monotonic()))

    def _tell(self, told: Told) -> None:
        for asker, reply in told:
            client, number = cast(_Asker, asker)
            if number is not None:
                client.open.discard(number)
                reply = write_numbered(number, reply)
            self._send(client, client.session.seal(write_reply(reply)))

    def _send(self, client: _Client, data: bytes) -> None:
        waited = bool(client.unsent)
        unsent = memoryview(client.unsent + data)
        try:
            sent = client.sock.send(unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            # Reading will show that it is gone.
            sent = len(unsent)
        client.unsent = bytes(unsent[sent:])
        if waited != bool(client.unsent):
            self._selector.modify(client.sock, selectors.EVENT_WRITE if client.unsent else selectors.EVENT_READ, client)

    def _drop(self, client: _Client) -> None:
        for number in (None, *client.open):
            self._storage.forget((client, number))
        self._selector.unregister(client.sock)
        del self._clients[client.sock.fileno()]
        client.sock.close()
