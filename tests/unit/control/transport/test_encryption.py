# SPDX-License-Identifier: Apache-2.0
"""With certificates nobody on the way reads anything, and only those get in that show one of the job's authority."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from authority import authority, certificates, sign, variables
from go_between import GoBetween
from served import CONNECT_S, HOST, Served

from megatron_resihp.control.transport.access import encryption, gate
from megatron_resihp.control.transport.access.encryption import (
    CA,
    CERTIFICATE,
    KEY,
    EncryptionError,
    certificates_of,
)
from megatron_resihp.control.transport.access.gate import Gate, enter
from megatron_resihp.control.transport.access.secret import Secret, find_secret, fresh_secret, published_secret
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.sockets import StoreError, reserve
from megatron_resihp.control.transport.store.client import StoreClient, connect

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl")
WAIT_S = 10.0


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job's authority, with the certificates of two nodes and one that is over."""
    folder = authority(tmp_path_factory.mktemp("job") / "certificates")
    sign(folder)
    sign(folder, "other")
    sign(folder, "over", "-days", "-1")
    return folder


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = authority(tmp_path_factory.mktemp("foreign") / "certificates")
    sign(folder)
    return folder


@contextmanager
def serving(secret: Secret) -> Iterator[Served]:
    with closing(Served(secret=secret)) as served:
        yield served


def secret_with(folder: Path, name: str = "own", ca: Path | None = None) -> Secret:
    return Secret("a secret of all of them", certificates=certificates(folder, name, ca))


def test_values_of_any_size_come_through(job: Path) -> None:
    """Nodes may share a certificate, or have one each."""
    value = "0123456789" * 100_000
    with serving(secret_with(job)) as served:
        for secret in (served.secret, secret_with(job, "other")):
            with closing(connect(served.address, secret, CONNECT_S)) as store:
                store.set("key", value)
                assert store.get("key", WAIT_S) == value
                assert store.take("nothing there", 0.05) == []


def test_nobody_on_the_way_reads_anything(job: Path) -> None:
    """Or without certificates the test could not fail."""
    for secret, is_read in ((secret_with(job), False), (fresh_secret(), True)):
        with serving(secret) as served, closing(GoBetween(served.address, secret)) as between:
            with closing(connect(between.address, secret, CONNECT_S)) as store:
                store.set("what is said", "to nobody else")
                assert store.get("what is said", WAIT_S) == "to nobody else"
            assert (b"what is said" in between.heard, b"to nobody else" in between.heard) == (is_read, is_read)


def test_who_shows_a_certificate_of_others_is_not_let_in(job: Path, foreign: Path) -> None:
    with serving(secret_with(job)) as served:
        for secret in (secret_with(foreign, ca=job), secret_with(job, "over")):
            with pytest.raises(StoreError, match="it refuses this process's certificate"):
                connect(served.address, secret, CONNECT_S)
        with pytest.raises(StoreError, match=r"it shows no such certificate \(.*\); give both ends RESIHP_TLS_CACERT"):
            connect(served.address, secret_with(foreign), CONNECT_S)
        assert served.connect().check("key") is False, "and others still are"


def test_a_certificate_is_no_secret(job: Path) -> None:
    with serving(secret_with(job)) as served:
        stranger = Secret("another job's secret", certificates=certificates(job))
        with pytest.raises(gate.RefusedSecretError):
            connect(served.address, stranger, CONNECT_S)


def test_whoever_hands_the_proofs_on_with_a_certificate_of_the_job_does_not_get_in(job: Path) -> None:
    """One that is on the way, and has a node's certificate, but not the secret."""
    secret, between = secret_with(job), secret_with(job, "other")
    with serving(secret) as served, closing(reserve(HOST, 0)) as listener:
        listener.listen()
        handing = threading.Thread(target=hand_on, args=(listener, served.address, between), daemon=True)
        handing.start()
        with pytest.raises(StoreError):
            enter(Address(HOST, listener.getsockname()[1]), secret, "store", 1000, WAIT_S)
        handing.join(WAIT_S)
        assert not handing.is_alive()


def hand_on(listener: socket.socket, address: Address, own: Secret) -> None:
    """Speak TLS with both ends, and hand what they say to the other."""
    assert own.certificates is not None
    client, _ = listener.accept()
    with client, socket.create_connection(address, timeout=WAIT_S) as server:
        client.settimeout(WAIT_S)
        to_client, to_server = own.certificates.accept(), own.certificates.offer()
        server.sendall(to_server.shake())
        while not to_server.ready:
            server.sendall(to_server.shake(server.recv(1 << 16)))
        while not to_client.ready:
            client.sendall(to_client.shake(client.recv(1 << 16)))
        hello = to_server.open(b"")
        while not hello:
            hello = to_server.open(server.recv(1 << 16))
        client.sendall(to_client.seal(hello))
        answer = b""
        while not answer:
            answer = to_client.open(client.recv(1 << 16))
        server.sendall(to_server.seal(answer))
        client.sendall(to_client.seal(to_server.open(server.recv(1 << 16))))


def test_one_end_without_certificates_is_told_so_soon(job: Path) -> None:
    plain, sealed = Secret("a secret of all of them"), secret_with(job)
    started = time.monotonic()
    with serving(sealed) as served, pytest.raises(StoreError) as refused:
        connect(served.address, plain, CONNECT_S)
    assert "can't be talked to: it speaks TLS only; set RESIHP_TLS_CACERT, RESIHP_TLS_CERT" in str(refused.value)
    with serving(plain) as served, pytest.raises(StoreError) as refused:
        connect(served.address, sealed, CONNECT_S)
    assert "can't be talked to: it speaks without TLS; unset RESIHP_TLS_CACERT" in str(refused.value)
    assert time.monotonic() - started < CONNECT_S


def test_what_strangers_say_in_place_of_tls_ends_their_connection(job: Path) -> None:
    with serving(secret_with(job)) as served:
        for said in (os.urandom(4096), bytes(200), b"\x16\x03\x01\xff\xff" + bytes(1000), b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection(served.address, timeout=WAIT_S) as sock:
                sock.sendall(said)
                sock.settimeout(WAIT_S)
                try:
                    while sock.recv(4096):
                        pass
                except ConnectionError:
                    pass
        assert served.connect().check("key") is False


def test_what_is_changed_on_the_way_is_refused(job: Path) -> None:
    secret = secret_with(job)
    listener = reserve(HOST, 0)
    with closing(Gate(listener, secret, "store", 1000)) as door:
        let_in: list[tuple[socket.socket, bytes]] = []
        thread = threading.Thread(target=lambda: let_in.append(talk(listener, secret)))
        thread.start()
        deadline = time.monotonic() + WAIT_S
        found = []
        while not found and time.monotonic() < deadline:
            found = door.look(time.monotonic())
        thread.join(WAIT_S)
        ((_, session),) = found
        ((_, sealed),) = let_in
        changed = bytearray(sealed)
        changed[-1] ^= 1
        with pytest.raises(EncryptionError):
            list(session.feed(bytes(changed)))


def talk(listener: socket.socket, secret: Secret) -> tuple[socket.socket, bytes]:
    """A connection, and the next message as it would be sent."""
    sock, session = enter(Address(HOST, listener.getsockname()[1]), secret, "store", 1000, WAIT_S)
    return sock, session.seal(b"a message")


def test_files_that_are_replaced_count_for_later_connections(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before all of them fit together: until then the old ones do."""
    monkeypatch.setattr(encryption, "LOOK_AGAIN_S", 0.0)
    for name in ("ca.pem", "own.pem", "own.key"):
        shutil.copy(job / name, tmp_path / name)
    used = certificates(tmp_path)
    first, other = used.accept().fingerprint, certificates(job, "other").accept().fingerprint
    shutil.copy(job / "other.pem", tmp_path / "own.pem")
    used._look_again()
    assert used.accept().fingerprint == first != other, "the key is still the old one's"
    shutil.copy(job / "other.key", tmp_path / "own.key")
    deadline = time.monotonic() + WAIT_S
    while used.accept().fingerprint != other:
        assert time.monotonic() < deadline


def test_a_client_that_is_late_with_tls_tries_again(job: Path) -> None:
    """It may have been stopped. That the other end speaks no TLS is not what it is told."""
    secret, listener, now = secret_with(job), reserve(HOST, 0), time.monotonic()
    with (
        closing(Gate(listener, secret, "store", 1000)) as door,
        socket.create_connection(listener.getsockname(), timeout=WAIT_S) as sock,
    ):
        while not door.unanswered:
            door.look(now)
        door.look(now + 2 * gate.SAYS_NOTHING_S)
        late = gate._Server(sock, certificates(job).offer(), now + WAIT_S)
        with pytest.raises(ConnectionResetError):
            late.begin()


def test_a_crowd_is_let_in(job: Path) -> None:
    """More than wait for an answer at a time where there is one node."""
    crowd, secret = gate.UNANSWERED + 16, secret_with(job)
    with closing(Served(secret=secret, nodes=crowd)) as served:
        let_in: list[StoreClient] = []
        threads = [
            threading.Thread(target=lambda: let_in.append(connect(served.address, secret, WAIT_S)), daemon=True)
            for _ in range(crowd)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join(WAIT_S)
        assert len(let_in) == crowd
        for client in let_in:
            client.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({KEY: ""}, f"{KEY} not set; connections are encrypted with all of {CA}, {CERTIFICATE}, {KEY}"),
        ({CA: "/nowhere"}, f"{CA}=/nowhere can't be used (No such file or directory)"),
        ({CERTIFICATE: "/nowhere"}, f"{CERTIFICATE}=/nowhere with {KEY}="),
        ({KEY: "other.key"}, "can't be used (key values mismatch); give a certificate and its key"),
    ],
)  # fmt: skip
def test_files_that_can_not_be_used(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], said: str
) -> None:
    given = variables(job) | {name: str(job / file) if file else "" for name, file in changes.items()}
    with pytest.raises(EncryptionError) as refused:
        certificates_of(given)
    assert said in str(refused.value) and "\n" not in str(refused.value)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for having in (lambda: find_secret(tmp_path), lambda: published_secret(tmp_path).__enter__()):
        with pytest.raises(StoreError, match="RESIHP_TLS_"):
            having()


def test_certificates_go_with_the_secret(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert certificates_of({}) is None
    for name, value in variables(job).items():
        monkeypatch.setenv(name, value)
    with published_secret(tmp_path) as published:
        found = find_secret(tmp_path)
    assert published == found and published.certificates is not None is not found.certificates
