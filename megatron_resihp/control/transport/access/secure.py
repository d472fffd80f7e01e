# SPDX-License-Identifier: Apache-2.0
"""How both ends of a connection prove that they have the run's secret, and how frames are sealed afterwards. Pure.

    server → client   hello: version, nonce
    client → server   answer: nonce, who asks, proof
    server → client   proof, or a refusal

Proofs and keys are HMACs of both nonces, of who asks, and of the connection's purpose, so nothing that was heard on one
connection is of use on another. Each direction has a key of its own. A frame's seal covers its place in the stream, so
a frame that is forged, repeated, left out or moved is refused. Nothing is encrypted. May import: the standard library
and the protocol's version.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Iterator
from hashlib import blake2b
from typing import Final

from megatron_resihp.protocol.version import MAJOR

GREETING: Final = b"resihp/"
VERSION: Final = GREETING + str(MAJOR).encode()
"""Processes of another major version of the protocol are turned away here, before they say anything."""
ENCRYPTED: Final = GREETING + b"tls"
"""Who speaks TLS only says so to clients that don't."""
NONCE: Final = 32
PROOF: Final = 32
WHO: Final = struct.Struct(">I")
HELLO_BYTES: Final = len(VERSION) + NONCE
ANSWER_BYTES: Final = NONCE + WHO.size + PROOF
REFUSAL: Final = b"another run's secret".ljust(PROOF, b".")

LENGTH: Final = struct.Struct(">I")
PLACE: Final = struct.Struct(">QI")
"""Of a frame in the stream, and its length."""
SEAL: Final = 16


class ForeignError(ValueError):
    """The other end is no part of this job; the message says why."""


class OtherVersionError(ForeignError):
    """The other end is of a job, and speaks another major version of the protocol."""


class EncryptedError(ForeignError):
    """The other end speaks TLS only."""


class RefusedError(ForeignError):
    """The other end has another secret."""


class ForgedError(ValueError):
    """A frame that the other end has not sent, or not here."""


class Sealer:
    """Makes frames for one direction of a connection."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._place = 0

    def seal(self, message: bytes) -> bytes:
        """The frame that carries a message."""
        frame = b"".join((LENGTH.pack(len(message)), message, _seal(self._key, self._place, message)))
        self._place += 1
        return frame


class Opener:
    """Cuts one direction of a connection into messages, and checks each.

    Args:
        largest: bytes of a message.
    """

    def __init__(self, key: bytes, largest: int) -> None:
        self._key = key
        self._largest = largest
        self._place = 0
        self._unread = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Whole messages so far.

        Raises:
            ForgedError: a frame is none. Nothing is to be read any more.
        """
        self._unread += data
        while len(self._unread) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._unread)
            if length > self._largest:
                raise ForgedError(f"a message of {length} bytes")
            end = LENGTH.size + length
            if len(self._unread) < end + SEAL:
                return
            message, seal = bytes(self._unread[LENGTH.size : end]), bytes(self._unread[end : end + SEAL])
            if not hmac.compare_digest(seal, _seal(self._key, self._place, message)):
                raise ForgedError("a forged or repeated message")
            self._place += 1
            del self._unread[: end + SEAL]
            yield message


class Session:
    """A connection whose other end has proved that it has the secret.

    Attributes:
        who: the client said it is.
    """

    def __init__(self, sealer: Sealer, opener: Opener, who: int) -> None:
        self.seal = sealer.seal
        self.feed = opener.feed
        self.who = who


def _seal(key: bytes, place: int, message: bytes) -> bytes:
    seal = blake2b(PLACE.pack(place, len(message)), key=key, digest_size=SEAL)
    seal.update(message)
    return seal.digest()


class _Words:
    """What follows from the secret and all that was said."""

    def __init__(self, key: bytes, purpose: str, nonces: bytes, who: int) -> None:
        self._key = key
        self._said = b"\0".join((VERSION, purpose.encode(), nonces + WHO.pack(who)))

    def word(self, use: bytes) -> bytes:
        return hmac.digest(self._key, use + b"\0" + self._said, "sha256")

    def session(self, sends: bytes, receives: bytes, largest: int, who: int) -> Session:
        return Session(Sealer(self.word(sends)), Opener(self.word(receives), largest), who)


CLIENTS_PROOF: Final = b"client's proof"
SERVERS_PROOF: Final = b"server's proof"
TO_SERVER: Final = b"key to the server"
TO_CLIENT: Final = b"key to the client"


class Challenge:
    """The server's end.

    Args:
        key: the secret.
        purpose: of the connection; both ends must mean the same.
        largest: bytes of a message of the client's.

    Attributes:
        hello: to be sent first.
    """

    def __init__(self, key: bytes, purpose: str, largest: int) -> None:
        self._key, self._purpose, self._largest = key, purpose, largest
        self._nonce = secrets.token_bytes(NONCE)
        self.hello = VERSION + self._nonce

    def judge(self, answer: bytes) -> tuple[bytes, Session | None]:
        """What to send back, and the session; None: the client is refused.

        Args:
            answer: ANSWER_BYTES.
        """
        nonce, (who,) = answer[:NONCE], WHO.unpack_from(answer, NONCE)
        words = _Words(self._key, self._purpose, self._nonce + nonce, who)
        if not hmac.compare_digest(words.word(CLIENTS_PROOF), answer[NONCE + WHO.size :]):
            return REFUSAL, None
        return words.word(SERVERS_PROOF), words.session(TO_CLIENT, TO_SERVER, self._largest, who)


class Answer:
    """The client's end.

    Args:
        key, purpose: as of the challenge.
        largest: bytes of a message of the server's.
        who: what the client says it is.
    """

    def __init__(self, key: bytes, purpose: str, largest: int, who: int = 0) -> None:
        self._key, self._purpose, self._largest, self._who = key, purpose, largest, who
        self._nonce = secrets.token_bytes(NONCE)
        self._words: _Words | None = None

    def to(self, hello: bytes) -> bytes:
        """What to send back.

        Args:
            hello: HELLO_BYTES.

        Raises:
            OtherVersionError: the server is of a job of another version.
            EncryptedError: it speaks TLS only.
            ForeignError: it is of none.
        """
        if hello.startswith(ENCRYPTED):
            raise EncryptedError("it speaks TLS only")
        if not hello.startswith(VERSION):
            if hello.startswith(GREETING):
                major = hello[len(GREETING) : len(VERSION)].decode(errors="replace")
                mend = "give all nodes, and where commands are given, the same installation"
                raise OtherVersionError(f"speaks protocol {major!r}, this process {MAJOR}; {mend}")
            raise ForeignError("it is not a coordinator")
        self._words = _Words(self._key, self._purpose, hello[len(VERSION) :] + self._nonce, self._who)
        return self._nonce + WHO.pack(self._who) + self._words.word(CLIENTS_PROOF)

    def welcomed(self, proof: bytes) -> Session:
        """The session.

        Args:
            proof: PROOF bytes, the server's last word.

        Raises:
            RefusedError: either end has another secret.
        """
        assert self._words is not None
        if not hmac.compare_digest(self._words.word(SERVERS_PROOF), proof):
            raise RefusedError("it refuses the secret" if proof == REFUSAL else "it does not know the secret")
        return self._words.session(TO_SERVER, TO_CLIENT, self._largest, self._who)
