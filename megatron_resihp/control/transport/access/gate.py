# SPDX-License-Identifier: Apache-2.0
"""Where connections come in and go out: only those whose other end has the run's secret get through.

May import: the standard library and `control.transport`.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from megatron_resihp.control.transport.access.encryption import (
    CA,
    CERTIFICATE,
    KEY,
    READ_BYTES,
    RECORD_HEAD,
    CertificateError,
    Conversation,
    EncryptionError,
    bound,
    encrypted,
)
from megatron_resihp.control.transport.access.secret import Secret
from megatron_resihp.control.transport.access.secure import (
    ANSWER_BYTES,
    ENCRYPTED,
    GREETING,
    HELLO_BYTES,
    PROOF,
    Answer,
    Challenge,
    EncryptedError,
    ForeignError,
    OtherVersionError,
    RefusedError,
    Session,
)
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.sockets import StoreError

ANSWER_S: Final = 5.0
"""How long a client may take to answer the challenge."""
SAYS_NOTHING_S: Final = 1.0
"""How long a client may take to begin with TLS, where that is spoken, before it is told so."""
UNANSWERED: Final = 64
"""Connections of one listener that may have not answered yet, at least; of more, the oldest of the busiest host ends.
All nodes of a job may come at once."""
AT_ONCE: Final = 256
"""How many are accepted before others get their turn."""
HANDSHAKES: Final = 16
"""Parts of handshakes that are answered before others get their turn: each takes some milliseconds at most."""
PAUSE_S: Final = 0.1
"""Without files to open, nothing is accepted for so long."""
AGAIN_S: Final = 0.05
"""After a gate has turned a client away without an answer, since too many came."""


class RefusedSecretError(StoreError):
    """A job answers, and it has another secret."""


class OtherProtocolError(StoreError):
    """A job answers, and speaks another major version of the protocol."""


@dataclass
class _Newcomer:
    sock: socket.socket
    host: str
    challenge: Challenge
    came_at: float
    tls: Conversation | None
    said: bytearray = field(default_factory=bytearray)
    silent: bool = True

    @property
    def shakes_hands(self) -> bool:
        """Whether what it sends next is a part of TLS's handshake."""
        return self.tls is not None and not self.tls.ready

    def read(self) -> bytes:
        """What it has sent, of its answer at most where nothing is encrypted."""
        return self.sock.recv(ANSWER_BYTES - len(self.said) if self.tls is None else READ_BYTES)

    def hear(self, data: bytes) -> bytes:
        """Take what it has sent, and return what to say to that before it has answered.

        Raises:
            EncryptionError: it is not to be talked to.
        """
        self.silent = False
        if self.tls is None:
            self.said += data
            return b""
        if self.tls.ready:
            self.said += self.tls.open(data)
            return b""
        words = self.tls.shake(data)
        return words + self.tls.seal(self.challenge.hello) if self.tls.ready else words

    def judge(self) -> tuple[bytes, Session | None]:
        """What to say to its answer, and the session; None: it is refused."""
        if len(self.said) > ANSWER_BYTES:
            return b"", None
        word, session = self.challenge.judge(bytes(self.said))
        if self.tls is None:
            return word, session
        word = self.tls.seal(word)
        return word, None if session is None else encrypted(session, self.tls)


class Gate:
    """The server's end, for a loop that selects on `fileno` and calls `look`, also when nothing comes.

    Args:
        listener: bound; belongs to this object from now on.
        purpose: of the connections.
        largest: bytes of a message that comes in.
        nodes: how many may connect at once.
    """

    def __init__(self, listener: socket.socket, secret: Secret, purpose: str, largest: int, nodes: int = 1) -> None:
        self._listener = listener
        self._most_unanswered = most_unanswered(nodes)
        self._secret, self._purpose, self._largest = secret, purpose, largest
        self._newcomers: dict[int, _Newcomer] = {}
        self._paused_until: float | None = None
        listener.setblocking(False)
        # What it accepts inherits that, so that the port can be served again at once.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.listen(socket.SOMAXCONN)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    @property
    def unanswered(self) -> int:
        return len(self._newcomers)

    def fileno(self) -> int:
        return self._selector.fileno()

    def look(self, now: float) -> list[tuple[socket.socket, Session]]:
        """Those that got through since the last look; sockets don't block.

        Args:
            now: of a monotonic clock.
        """
        if self._paused_until is not None and now > self._paused_until:
            self._paused_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        let_in, hands = [], HANDSHAKES
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept(now)
            elif (newcomer := self._newcomers.get(key.fd)) is not None and hands > 0:
                hands -= newcomer.shakes_hands
                if session := self._hear(newcomer, now):
                    let_in.append((newcomer.sock, session))
        for newcomer in list(self._newcomers.values()):
            if newcomer.tls is not None and newcomer.silent and now - newcomer.came_at > SAYS_NOTHING_S:
                self._turn_away(newcomer, ENCRYPTED.ljust(HELLO_BYTES))
            elif now - newcomer.came_at > ANSWER_S:
                self._turn_away(newcomer)
        return let_in

    def close(self) -> None:
        for newcomer in list(self._newcomers.values()):
            self._turn_away(newcomer)
        self._selector.close()
        self._listener.close()

    def _accept(self, now: float) -> None:
        for _ in range(AT_ONCE):
            try:
                sock, peer = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._selector.unregister(self._listener)
                    self._paused_until = now + PAUSE_S
                return
            certificates = self._secret.certificates
            tls = None if certificates is None else certificates.accept()
            challenge = Challenge(self._secret.key, bound(self._purpose, tls), self._largest)
            self._challenge(_Newcomer(sock, peer[0], challenge, now, tls))

    def _challenge(self, newcomer: _Newcomer) -> None:
        newcomer.sock.setblocking(False)
        if len(self._newcomers) >= self._most_unanswered:
            # Who has begun with TLS has cost both ends some work.
            begun = self._newcomers.values()
            waiting = [each for each in begun if each.silent] or list(begun)
            (busiest, _), *_ = Counter(each.host for each in waiting).most_common(1)
            self._turn_away(next(each for each in waiting if each.host == busiest))
        self._newcomers[newcomer.sock.fileno()] = newcomer
        self._selector.register(newcomer.sock, selectors.EVENT_READ)
        try:
            newcomer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if newcomer.tls is None:  # with TLS, clients speak first
                newcomer.sock.send(newcomer.challenge.hello)
        except OSError:
            self._turn_away(newcomer)

    def _hear(self, newcomer: _Newcomer, now: float) -> Session | None:
        """The session of a newcomer that has answered."""
        try:
            shook_hands, data = newcomer.shakes_hands, newcomer.read()
            if data and (words := newcomer.hear(data)):
                newcomer.sock.send(words)
            if shook_hands and not newcomer.shakes_hands:
                newcomer.came_at = now  # it may have waited for others' handshakes
        except BlockingIOError:
            return None
        except EncryptionError as error:
            self._turn_away(newcomer, error.alert)
            return None
        except OSError:
            data = b""
        if data and len(newcomer.said) < ANSWER_BYTES:
            return None
        if data:
            word, session = newcomer.judge()
            try:
                newcomer.sock.send(word)
            except OSError:
                session = None
            if session is not None:
                self._forget(newcomer)
                return session
        self._turn_away(newcomer)
        return None

    def _turn_away(self, newcomer: _Newcomer, last_words: bytes = b"") -> None:
        self._forget(newcomer)
        with suppress(OSError):
            newcomer.sock.send(last_words)
        newcomer.sock.close()

    def _forget(self, newcomer: _Newcomer) -> None:
        self._selector.unregister(newcomer.sock)
        del self._newcomers[newcomer.sock.fileno()]


def most_unanswered(nodes: int) -> int:
    """How many connections of one listener may have not answered yet, where so many nodes may come at once."""
    return max(UNANSWERED, nodes)


def enter_in_time(
    address: Address, secret: Secret, purpose: str, largest: int, timeout_s: float, who: int = 0
) -> tuple[socket.socket, Session]:
    """As `enter`, and again where too many have come at once, until the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return enter(address, secret, purpose, largest, timeout_s, who)
        except (ConnectionResetError, BrokenPipeError):
            if time.monotonic() + AGAIN_S > deadline:
                raise
        time.sleep(AGAIN_S)


def enter(
    address: Address, secret: Secret, purpose: str, largest: int, timeout_s: float, who: int = 0
) -> tuple[socket.socket, Session]:
    """Connect to a gate; the socket blocks, with `timeout_s` for each call.

    Args:
        largest: bytes of a message that comes in.

    Raises:
        RefusedSecretError: a job with another secret is there.
        OtherProtocolError: a job of another version is.
        CertificateError: one end speaks TLS, and has no certificate that the other takes.
        StoreError: something else is.
        OSError: nothing is, or it does not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    tls = None if secret.certificates is None else secret.certificates.offer()
    begin = b"" if tls is None else tls.shake()  # a gate that speaks TLS waits a moment only for that
    sock = socket.create_connection(address, timeout=timeout_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(begin)
        session = _answered(_Server(sock, tls, deadline), secret.key, purpose, largest, who)
        sock.settimeout(timeout_s)
        return sock, session
    except BaseException as error:
        sock.close()
        if isinstance(error, RefusedError):
            mend = "give the run directory, or the secret, of the job that runs there"
            problem = f"the job at {address} is not the one that the secret from {secret.source} is of"
            raise RefusedSecretError(f"{problem} ({error}); {mend}") from error
        if isinstance(error, OtherVersionError):
            raise OtherProtocolError(f"the job at {address} {error}") from error
        if isinstance(error, EncryptedError):
            mend = f"set {CA}, {CERTIFICATE} and {KEY} as where the job was started"
            raise CertificateError(f"the job at {address} can't be talked to: {error}; {mend}") from error
        if isinstance(error, EncryptionError):
            raise CertificateError(f"what answers at {address} can't be talked to: {error}") from error
        if isinstance(error, ForeignError):
            raise StoreError(f"what answers at {address} is not this job ({error})") from error
        raise


def _answered(server: _Server, key: bytes, purpose: str, largest: int, who: int) -> Session:
    """Answer a gate's challenge; raises as `enter` does."""
    server.begin()
    answer = Answer(key, bound(purpose, server.tls), largest, who)
    server.send(answer.to(server.receive(HELLO_BYTES)))
    session = answer.welcomed(server.receive(PROOF))
    return session if server.tls is None else encrypted(session, server.tls)


class _Server:
    """What a client hears from a gate, and says to it, until it is let in."""

    def __init__(self, sock: socket.socket, tls: Conversation | None, deadline: float) -> None:
        self._sock, self.tls, self._deadline = sock, tls, deadline
        self._opened = b""

    def begin(self) -> None:
        """Show each other certificates, where both have some."""
        while self.tls is not None and not self.tls.ready:
            self._sock.sendall(self.tls.shake(self._record()))

    def send(self, words: bytes) -> None:
        self._sock.sendall(words if self.tls is None else self.tls.seal(words))

    def receive(self, size: int) -> bytes:
        """So many bytes, and no more of what follows: whoever has the connection later waits for that at the socket."""
        if self.tls is None:
            return self._exactly(size)
        while len(self._opened) < size:
            self._opened += self.tls.open(self._record())
        words, self._opened = self._opened[:size], self._opened[size:]
        return words

    def _record(self) -> bytes:
        """The next of TLS's records."""
        head = self._exactly(RECORD_HEAD)
        if not head.startswith(GREETING[:RECORD_HEAD]):
            return head + self._exactly(int.from_bytes(head[-2:]))
        hello = head + self._exactly(HELLO_BYTES - RECORD_HEAD)
        if hello.startswith(ENCRYPTED):
            raise ConnectionResetError(errno.ECONNRESET, "it has not heard of TLS from here in time")
        return hello

    def _exactly(self, size: int) -> bytes:
        received = b""
        while len(received) < size:
            self._sock.settimeout(max(self._deadline - time.monotonic(), 0.001))
            data = self._sock.recv(size - len(received))
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, "it ended the connection")
            received += data
        return received
