# SPDX-License-Identifier: Apache-2.0
"""One connection to the store that carries the questions of many, for a loop that never waits.

May import `control.transport`.
"""

from __future__ import annotations

import socket
from collections.abc import Hashable, Iterable
from typing import Final

from megatron_resihp.control.transport.access.secure import Session
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.store.questions import Gathering, Questions, Told
from megatron_resihp.control.transport.store.wire import Request, read_numbered, read_reply, write_request

READ_BYTES: Final = 1 << 18


class Line:
    """Asks at the store's port.

    Args:
        address: of the store.
        sock: connected to it; belongs to this object from now on.
        gathering: as of `Questions`.
    """

    def __init__(self, address: Address, sock: socket.socket, session: Session, gathering: Gathering) -> None:
        self.address = address
        self._sock = sock
        self._session = session
        self._questions = Questions(gathering)
        self._unsent = bytearray()
        sock.setblocking(False)

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `send_rest` is to be called as soon as the connection takes more."""
        return bool(self._unsent)

    @property
    def next_deadline(self) -> float | None:
        """When to call `expire`, at the latest."""
        return self._questions.next_deadline

    @property
    def unanswered_since(self) -> float | None:
        """As of `Questions`."""
        return self._questions.unanswered_since

    def asks(self, asker: Hashable) -> bool:
        return self._questions.asks(asker)

    def ask(self, asker: Hashable, request: Request, now: float) -> None:
        """Raises MalformedRequestError if the asker's last question is open."""
        self._send(self._questions.ask(asker, request, now))

    def forget(self, asker: Hashable, now: float) -> None:
        self._send(self._questions.forget(asker, now))

    def expire(self, now: float) -> None:
        self._send(self._questions.expire(now))

    def hear(self, now: float) -> Told:
        """Read what has come.

        Raises:
            OSError, ValueError: the connection is lost.
        """
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("its server has ended it")
        told: Told = []
        for message in self._session.feed(data):
            answered, requests = self._questions.hear(*read_numbered(read_reply(message)), now)
            told += answered
            self._send(requests)
        return told

    def send_rest(self) -> None:
        """Send what the connection has not taken yet; reading shows whether it is lost."""
        try:
            del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    def close(self) -> None:
        self._sock.close()

    def _send(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._unsent += self._session.seal(write_request(request))
        if self._unsent:
            self.send_rest()
