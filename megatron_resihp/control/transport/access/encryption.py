# SPDX-License-Identifier: Apache-2.0
"""TLS for a job's connections, where the user gives certificates: both ends show one, and no socket is touched here.

The proofs of `secure` cover the server's certificate, so that whoever sits on the way can't hand them on. Certificates
therefore need to name no host. May import: the standard library, `control.transport.access.secure`
and `control.transport.sockets`.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from megatron_resihp.control.transport.access.secure import GREETING, ForgedError, Session
from megatron_resihp.control.transport.sockets import StoreError

PREFIX: Final = "RESIHP_TLS_"
"""With which the names of these variables begin."""
CA: Final = f"{PREFIX}CACERT"
CERTIFICATE: Final = f"{PREFIX}CERT"
KEY: Final = f"{PREFIX}KEY"
LOOK_AGAIN_S: Final = 5.0
"""Between two looks at the files."""
RECORD_HEAD: Final = 5
"""Bytes before each of TLS's records; the last two are its length."""
READ_BYTES: Final = 1 << 16


class CertificateError(StoreError):
    """This process can't talk to the job with the certificates that it has, or without any; one line."""


class EncryptionError(ForgedError):
    """The files can't be used, or the other end speaks no TLS or shows no certificate of theirs; one line."""

    alert: bytes = b""
    """What the other end is to hear."""


@dataclass(frozen=True)
class _Loaded:
    server: ssl.SSLContext
    client: ssl.SSLContext
    fingerprint: bytes


class Certificates:
    """A process's own certificate and key, and the authorities that others' must come from.

    Files that are replaced while the job runs count for connections that begin later. Until all of them fit together
    again, the last ones do.

    Raises:
        EncryptionError: a file can't be used.
    """

    def __init__(self, ca: str, certificate: str, key: str) -> None:
        self._files = (ca, certificate, key)
        self._looked_at, self._looking = time.monotonic(), threading.Lock()
        self._stamp = self._stamped()
        self._loaded = self._load()

    def accept(self) -> Conversation:
        """The server's end of a connection."""
        loaded = self._newest()
        return Conversation(loaded.server, server_side=True, fingerprint=loaded.fingerprint)

    def offer(self) -> Conversation:
        """The client's end of one."""
        return Conversation(self._newest().client, server_side=False)

    def _newest(self) -> _Loaded:
        now = time.monotonic()
        if now >= self._looked_at + LOOK_AGAIN_S and not self._looking.locked():
            self._looked_at = now
            # In a thread of its own: a file system may take long, and connections are taken meanwhile.
            threading.Thread(target=self._look_again, name="resihp-certificates", daemon=True).start()
        return self._loaded

    def _look_again(self) -> None:
        with self._looking:
            stamp = self._stamped()
            if stamp == self._stamp:
                return
            try:
                loaded = self._load()
            except EncryptionError:
                return
            if self._stamped() == stamp:  # else they are being replaced, and the next look will tell
                self._loaded, self._stamp = loaded, stamp

    def _stamped(self) -> tuple[tuple[int, int] | None, ...]:
        return tuple(_stamp(file) for file in self._files)

    def _load(self) -> _Loaded:
        ca, certificate, key = self._files
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        server.num_tickets = 0  # nobody comes back by one
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(ca)
            except OSError as error:
                raise EncryptionError(
                    f"{CA}={ca} can't be used ({_why(error)}); give a file of certificates"
                ) from error
            try:
                # Without a password, OpenSSL would ask the terminal for that of a key that has one.
                context.load_cert_chain(certificate, key, password="")
                with open(certificate, errors="replace") as file:
                    fingerprint = sha256(ssl.PEM_cert_to_DER_cert(_first(file.read()))).digest()
            except (OSError, ValueError) as error:
                named = f"{CERTIFICATE}={certificate} with {KEY}={key}"
                mend = "give a certificate and its key, which has no password"
                raise EncryptionError(f"{named} can't be used ({_why(error)}); {mend}") from error
        return _Loaded(server, client, fingerprint)


def certificates_of(environment: Mapping[str, str]) -> Certificates | None:
    """Those that the variables name; None: there are none.

    Raises:
        EncryptionError: a file can't be used, or a variable is missing.
    """
    files = {name: environment.get(name, "").strip() for name in (CA, CERTIFICATE, KEY)}
    missing = [name for name, file in files.items() if not file]
    if len(missing) == len(files):
        return None
    if missing:
        raise EncryptionError(
            f"{' and '.join(missing)} not set; connections are encrypted with all of {', '.join(files)}"
        )
    return Certificates(*files.values())


class Conversation:
    """One end of an encrypted connection, for any thread.

    Attributes:
        ready: whether both ends have shown their certificates.
        fingerprint: of the server's certificate; a client's end has it once it is ready.
    """

    def __init__(self, context: ssl.SSLContext, *, server_side: bool, fingerprint: bytes = b"") -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._using = threading.Lock()
        self._server_side, self._heard = server_side, False
        self.fingerprint = fingerprint
        self.ready = False

    def shake(self, data: bytes = b"") -> bytes:
        """Take what the other end has sent; until `ready`, returns what to send to it.

        Raises:
            EncryptionError: the other end is not to be talked to.
        """
        if data and not self._heard:
            self._heard = True
            if data.startswith(GREETING[:RECORD_HEAD]):
                mend = f"unset {CA}, {CERTIFICATE} and {KEY} here, or set them where the job starts"
                raise EncryptionError(f"it speaks without TLS; {mend}")
        with self._using:
            self._incoming.write(data)
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                return self._outgoing.read()
            except ssl.SSLError as error:
                shown = "no certificate of this job's authorities" if self._server_side else "no such certificate"
                refused = EncryptionError(
                    f"it shows {shown} ({_why(error)}); give both ends {CA} of the same authority"
                )
                refused.alert = self._outgoing.read()
                raise refused from error
            self.ready = True
            if not self._server_side:
                self.fingerprint = sha256(self._tls.getpeercert(binary_form=True) or b"").digest()
            return self._outgoing.read()

    def seal(self, plain: bytes) -> bytes:
        """What to send for these bytes."""
        with self._using:
            left = memoryview(plain)
            while left:
                left = left[self._tls.write(left) :]
            return self._outgoing.read()

    def open(self, data: bytes) -> bytes:
        """What the other end has sent, as far as it is there.

        Raises:
            EncryptionError: that was changed on the way, or the other end refuses this one.
        """
        plain = bytearray()
        with self._using:
            self._incoming.write(data)
            try:
                while chunk := self._tls.read(READ_BYTES):
                    plain += chunk
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                raise EncryptionError(f"it refuses this process's certificate ({_why(error)})") from error
        return bytes(plain)


def bound(purpose: str, conversation: Conversation | None) -> str:
    """What both ends' proofs have to cover of a connection."""
    return purpose if conversation is None else f"{purpose} at {conversation.fingerprint.hex()}"


def encrypted(session: Session, conversation: Conversation) -> Session:
    """A session whose frames travel inside of an encrypted connection."""
    seal, feed = session.seal, session.feed

    def opened(data: bytes) -> Iterator[bytes]:
        return feed(conversation.open(data))

    session.seal, session.feed = lambda message: conversation.seal(seal(message)), opened
    return session


def _stamp(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


def _first(text: str) -> str:
    """A file's first certificate, which is the process's own; others lead to its authority."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    return begin + text.partition(begin)[2].partition(end)[0] + end


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).lower().replace("_", " ")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
