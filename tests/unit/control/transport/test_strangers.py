# SPDX-License-Identifier: Apache-2.0
"""What strangers without the secret, and those with an old one, can do at the ports of a job: nothing.

| attack | test |
| --- | --- |
| random bytes, huge lengths, unfinished frames | `test_what_strangers_say_is_not_heard` |
| forged ends, notices, exits, failures, stops, plans, slowdowns; garbage; a plan in advance; stolen messages; endless
  keys; a value in a queue's place | `test_what_would_do_harm_does_nothing_from_a_stranger` |
| one byte at a time | `test_who_does_not_answer_has_to_go` |
| many that say nothing | `test_few_wait_for_an_answer_however_many_come`, `test_a_crowd_from_one_host_…`,
  `test_the_store_serves_on_while_a_crowd_says_nothing` |
| silent liveness connections, second greetings | `test_no_stranger_counts_as_a_node_…` |
| forged measurements | `test_records_are_taken_from_the_job_only` |
| an old run's worker | `test_an_old_runs_worker_at_a_new_runs_address_does_nothing_there` |
| changed or repeated frames | `test_a_frame_that_is_changed_or_repeated_…` |

`tests/integration/test_attacks.py` has a running job take all of them, and 10,000 silent connections.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from attacks import REQUESTS, STALE, plainly, with_a_stale_secret
from served import Served, serving

from megatron_resihp.control import keys
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.transport.access import gate
from megatron_resihp.control.transport.access.gate import Gate, RefusedSecretError, enter
from megatron_resihp.control.transport.access.secret import Secret, fresh_secret
from megatron_resihp.control.transport.access.secure import ANSWER_BYTES, HELLO_BYTES, LENGTH, PROOF, VERSION, Answer
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.node_liveness import NodeWatcher
from megatron_resihp.control.transport.shipping import PURPOSE as RECORDS
from megatron_resihp.control.transport.shipping import Relay
from megatron_resihp.control.transport.sockets import StoreError, reserve
from megatron_resihp.control.transport.store.client import connect
from megatron_resihp.control.transport.store.wire import LARGEST, PURPOSE, Op, Request, write_request

WAIT_S = 10.0
PLAIN = write_request(Request(Op.SET, (keys.END.encode(), b"forged")))


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as served:
        served.connect().set("key", "value")
        yield served


def stranger(address: Address) -> socket.socket:
    sock = socket.create_connection(address, timeout=WAIT_S)
    assert sock.recv(HELLO_BYTES).startswith(VERSION)
    return sock


def is_ended(sock: socket.socket) -> bool:
    """Whether the server ends the connection, whatever it says before."""
    with suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


@pytest.mark.parametrize(
    "said",
    [
        os.urandom(4096),
        bytes(ANSWER_BYTES),
        b"\xff" * ANSWER_BYTES,  # a huge length, where one is expected
        PLAIN.ljust(ANSWER_BYTES, b"\0"),
        (LENGTH.pack(len(PLAIN)) + PLAIN).ljust(ANSWER_BYTES, b"\0"),
        struct.pack(">4sI", b"rshp", 1).ljust(ANSWER_BYTES, b"\0"),  # how nodes once greeted
        b"GET / HTTP/1.1\r\n\r\n".ljust(ANSWER_BYTES, b" "),
    ],
    ids=["random", "nothing", "huge", "request", "frame", "old", "http"],
)
def test_what_strangers_say_is_not_heard(served: Served, said: bytes) -> None:
    with stranger(served.address) as sock:
        with suppress(ConnectionError):
            sock.sendall(said)
        assert is_ended(sock)
    store = served.connect()
    assert not store.check(keys.END) and store.get("key", WAIT_S) == "value"


@pytest.mark.parametrize("attack", REQUESTS)
def test_what_would_do_harm_does_nothing_from_a_stranger(served: Served, attack: str) -> None:
    """Neither without a secret nor with an old one: what the store holds stays as it is."""
    store = served.connect()
    store.push(keys.INBOX, "a real message")
    before = int(store.connection.ask(Op.COUNT).value)
    for said in plainly(REQUESTS[attack]):
        with stranger(served.address) as sock:
            with suppress(ConnectionError):
                sock.sendall(said)
            assert is_ended(sock)
    with suppress(ConnectionError), with_a_stale_secret(served.address, REQUESTS[attack], WAIT_S) as sock:
        assert is_ended(sock)
    assert int(store.connection.ask(Op.COUNT).value) == before and store.get("key", WAIT_S) == "value"
    assert store.take(keys.INBOX, 0.0) == ["a real message"]


@pytest.mark.parametrize("attack", REQUESTS)
def test_the_same_from_the_job_itself_is_carried_out(served: Served, attack: str) -> None:
    """Or the test above could not fail; what is too large ends the connection of whoever sends it."""
    store, request = served.connect(), REQUESTS[attack]
    store.push(keys.INBOX, "a real message")
    before = int(store.connection.ask(Op.COUNT).value)
    if attack in ("an endless key", "a huge value"):
        with pytest.raises(StoreError):
            store.connection.ask(request.op, *request.fields)
        return
    store.connection.ask(request.op, *request.fields)
    left = store.take(keys.INBOX, 0.0)
    assert int(store.connection.ask(Op.COUNT).value) != before or left != ["a real message"]


def test_an_old_runs_secret_is_refused_with_one_line(served: Served) -> None:
    started = time.monotonic()
    with pytest.raises(RefusedSecretError) as refusal:
        connect(served.address, STALE, WAIT_S)
    assert time.monotonic() - started < WAIT_S / 2, "trying again is of no use"
    said = str(refusal.value)
    assert "is not the one that the secret from this process is of" in said
    assert "\n" not in said and STALE.text not in said


def test_an_old_runs_worker_at_a_new_runs_address_does_nothing_there(served: Served) -> None:
    """Its connection was let in by a server that is gone by now."""
    with serving() as old:
        sock, session = enter(old.address, old.secret, PURPOSE, LARGEST, WAIT_S)
        sock.close()
    with stranger(served.address) as sock:
        sock.sendall(session.seal(PLAIN).ljust(ANSWER_BYTES, b"\0"))
        assert is_ended(sock)
    assert not served.connect().check(keys.END)


def test_a_client_tells_no_secret_to_a_stranger_that_has_the_port() -> None:
    secret = fresh_secret()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address("127.0.0.1", listener.getsockname()[1])
        sock = socket.create_connection(address)
        accepted, _ = listener.accept()
        sock.close()
        accepted.close()
        listener.settimeout(WAIT_S)
        for hello, last, error in (
            (b"SSH-2.0-OpenSSH".ljust(HELLO_BYTES), b"", "is not this job"),
            (VERSION + bytes(HELLO_BYTES - len(VERSION)), bytes(PROOF), "does not know the secret"),
        ):
            heard = bytearray()
            with pytest.raises(StoreError, match=error):
                _with_server(listener, hello, last, heard, lambda: connect(address, secret, WAIT_S))
            assert secret.key not in heard


def _with_server(
    listener: socket.socket, hello: bytes, last: bytes, heard: bytearray, call: Callable[[], object]
) -> None:
    def serve() -> None:
        sock, _ = listener.accept()
        with sock, suppress(OSError):
            sock.sendall(hello)
            heard.extend(sock.recv(4096))
            sock.sendall(last)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        call()
    finally:
        thread.join(WAIT_S)


def test_a_frame_that_is_changed_or_repeated_ends_its_connection_and_does_nothing(served: Served) -> None:
    for spoil in (
        lambda frame: frame[:-1] + bytes([frame[-1] ^ 1]),
        lambda frame: frame.replace(b"forged", b"FORGED"),
        lambda frame: b"\xff" * 8 + frame,
    ):
        sock, session = enter(served.address, served.secret, PURPOSE, LARGEST, WAIT_S)
        with sock:
            sock.sendall(spoil(session.seal(PLAIN)))
            assert is_ended(sock)
        assert not served.connect().check(keys.END)
    sock, session = enter(served.address, served.secret, PURPOSE, LARGEST, WAIT_S)
    frame = session.seal(write_request(Request(Op.ADD, (b"count", b"1"))))
    with sock:
        sock.sendall(frame)
        assert list(session.feed(sock.recv(4096)))
        sock.sendall(frame)
        assert is_ended(sock)
    assert served.connect().add("count", 0) == 1


@pytest.mark.parametrize(
    "request_", [b"", b"\xff" * 40, write_request(Request(Op.SET, (b"key",) * 3)), PLAIN[:-1], PLAIN + b"more"]
)
def test_a_malformed_request_ends_its_connection(served: Served, request_: bytes) -> None:
    sock, session = enter(served.address, served.secret, PURPOSE, LARGEST, WAIT_S)
    with sock:
        sock.sendall(session.seal(request_))
        assert is_ended(sock)
    assert served.connect().get("key", WAIT_S) == "value"


def test_two_requests_at_once_end_their_connection(served: Served) -> None:
    """So that nobody makes the server keep answers or requests for one connection."""
    sock, session = enter(served.address, served.secret, PURPOSE, LARGEST, WAIT_S)
    with sock:
        wait = write_request(Request(Op.WAIT, (b"never",), WAIT_S))
        sock.sendall(session.seal(wait) + session.seal(wait))
        assert is_ended(sock)


class _Doorkeeper:
    """A gate, looked at by hand."""

    def __init__(self) -> None:
        self.secret = fresh_secret()
        listener = reserve("127.0.0.1", 0)
        self.address = Address("127.0.0.1", listener.getsockname()[1])
        self.gate = Gate(listener, self.secret, "test", 100)


@pytest.fixture
def doorkeeper() -> Iterator[_Doorkeeper]:
    made = _Doorkeeper()
    yield made
    made.gate.close()


def test_who_does_not_answer_has_to_go(doorkeeper: _Doorkeeper) -> None:
    silent, slow = (socket.create_connection(doorkeeper.address, timeout=WAIT_S) for _ in range(2))
    with silent, slow:
        while doorkeeper.gate.unanswered < 2:
            assert doorkeeper.gate.look(0.0) == []
        slow.sendall(b"s")
        assert doorkeeper.gate.look(gate.ANSWER_S - 0.1) == [] and doorkeeper.gate.unanswered == 2
        assert doorkeeper.gate.look(gate.ANSWER_S + 0.1) == [] and doorkeeper.gate.unanswered == 0
        assert is_ended(silent) and is_ended(slow)


def test_few_wait_for_an_answer_however_many_come(doorkeeper: _Doorkeeper) -> None:
    crowd = [socket.create_connection(doorkeeper.address, timeout=WAIT_S) for _ in range(3 * gate.UNANSWERED)]
    for number in range(20):
        doorkeeper.gate.look(0.01 * number)
    assert doorkeeper.gate.unanswered == gate.UNANSWERED
    for sock in crowd:
        sock.close()


def test_all_nodes_of_a_large_job_may_come_at_once() -> None:
    """They may share an address, behind one that translates them."""
    secret, listener = fresh_secret(), reserve("127.0.0.1", 0)
    address, nodes = Address("127.0.0.1", listener.getsockname()[1]), 4 * gate.UNANSWERED
    watcher = NodeWatcher(listener, secret, JobSize(nodes, workers_per_node=1), 5.0, connect_by=100.0)
    crowd = [socket.create_connection(address, timeout=WAIT_S) for _ in range(1, nodes)]
    answers = [Answer(secret.key, "liveness", 64, node) for node in range(1, nodes)]
    deadline = time.monotonic() + WAIT_S
    while not all(_has_data(sock) for sock in crowd) and time.monotonic() < deadline:
        watcher.look(1.0)
    for sock, answer in zip(crowd, answers, strict=True):
        sock.sendall(answer.to(sock.recv(HELLO_BYTES)))
    while watcher.served != set(range(1, nodes)) and time.monotonic() < deadline:
        assert watcher.look(1.0) == []
    assert len(watcher.served) == nodes - 1
    watcher.close()
    for sock in crowd:
        sock.close()


def _has_data(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0.0)[0])


def test_who_is_turned_away_because_too_many_came_tries_again() -> None:
    secret, listener = fresh_secret(), socket.create_server(("127.0.0.1", 0))
    address = Address("127.0.0.1", listener.getsockname()[1])

    def serve() -> None:
        for _ in range(2):
            listener.accept()[0].close()
        server = Served(listener, secret)
        done.wait(WAIT_S)
        server.close()

    done = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    sock, _ = gate.enter_in_time(address, secret, PURPOSE, LARGEST, WAIT_S)
    sock.close()
    done.set()
    thread.join(WAIT_S)


def test_a_crowd_from_one_host_does_not_turn_another_away(doorkeeper: _Doorkeeper) -> None:
    own = socket.create_connection(doorkeeper.address, timeout=WAIT_S, source_address=("127.0.0.2", 0))
    while doorkeeper.gate.unanswered < 1:
        doorkeeper.gate.look(0.0)
    crowd = [socket.create_connection(doorkeeper.address, timeout=WAIT_S) for _ in range(2 * gate.UNANSWERED)]
    doorkeeper.gate.look(0.0)
    assert own.recv(HELLO_BYTES).startswith(VERSION)
    own.setblocking(False)
    with pytest.raises(BlockingIOError):
        own.recv(1)
    for sock in (own, *crowd):
        sock.close()


def test_the_store_serves_on_while_a_crowd_says_nothing(served: Served) -> None:
    crowd = [socket.create_connection(served.address, timeout=WAIT_S) for _ in range(500)]
    started = time.monotonic()
    assert served.connect().get("key", WAIT_S) == "value"
    assert time.monotonic() - started < 2.0
    for sock in crowd:
        sock.close()


def test_no_stranger_counts_as_a_node_and_no_node_can_be_taken_for_another() -> None:
    secret, listener = fresh_secret(), reserve("127.0.0.1", 0)
    address = Address("127.0.0.1", listener.getsockname()[1])
    watcher = NodeWatcher(listener, secret, JobSize(nodes=3, workers_per_node=1), 5.0, time.monotonic() + WAIT_S)

    def look_until(done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not done():
            assert watcher.look(time.monotonic()) == [] and time.monotonic() < deadline

    def node(number: int, own: Secret) -> None:
        found: list[object] = []

        def come() -> None:
            try:
                found.append(enter(address, own, "liveness", 64, WAIT_S, number))
            except StoreError as error:
                found.append(error)

        thread = threading.Thread(target=come)
        thread.start()
        look_until(lambda: not thread.is_alive())
        came.append(found[0])

    came: list[object] = []
    for number, own in ((1, STALE), (1, secret), (1, secret), (9, secret), (0, secret)):
        node(number, own)
    look_until(lambda: watcher.served == {1})
    assert isinstance(came[0], RefusedSecretError)
    (first, session), *later = [each for each in came[1:] if isinstance(each, tuple)]
    for sock, _ in later:
        assert is_ended(sock), "a second greeting of a node, or one of no node of the job"
    first.sendall(session.seal(b"."))
    assert watcher.look(time.monotonic()) == []
    first.sendall(b"not sealed, and longer than any seal that is expected")
    deadline = time.monotonic() + WAIT_S
    while not (losses := watcher.look(time.monotonic())):
        assert time.monotonic() < deadline
    assert [(loss.node, loss.cause) for loss in losses] == [(1, "connection lost")]
    watcher.close()


def test_records_are_taken_from_the_job_only() -> None:
    secret, listener = fresh_secret(), reserve("127.0.0.1", 0)
    address = Address("127.0.0.1", listener.getsockname()[1])
    taken: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    relay = Relay(secret, listener)
    relay.start(lambda message: taken.put(message) is None)
    with stranger(address) as sock:
        sock.sendall((LENGTH.pack(6) + b"forged").ljust(ANSWER_BYTES, b"\0"))
        assert is_ended(sock)
    with pytest.raises(RefusedSecretError):
        enter(address, STALE, RECORDS, 0, WAIT_S)
    sock, session = enter(address, secret, RECORDS, 0, WAIT_S)
    with sock:
        sock.sendall(session.seal(b"true"))
        assert taken.get(timeout=WAIT_S) == b"true"
        sock.sendall(LENGTH.pack(6) + b"forged" + bytes(16))
        assert is_ended(sock)
    relay.close(WAIT_S)
    assert taken.empty()
