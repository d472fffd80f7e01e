# SPDX-License-Identifier: Apache-2.0
"""An agent that relays for its workers: one connection to node 0, and no worker can hold up, or speak for, another.

That the store keeps its promises by this way, too, is in `test_store.py`, `test_lasting.py` and `test_leaders.py`.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from go_between import GoBetween
from served import CONNECT_S, HOST, Node, Served, relaying, serving

from megatron_resihp.control import keys
from megatron_resihp.control.transport import leaders
from megatron_resihp.control.transport.access.gate import OtherProtocolError, RefusedSecretError
from megatron_resihp.control.transport.access.secret import fresh_secret
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.frames import LENGTH, framed
from megatron_resihp.control.transport.leaders import Leaders
from megatron_resihp.control.transport.sockets import StoreError
from megatron_resihp.control.transport.store import client as store_client
from megatron_resihp.control.transport.store import relay as store_relay
from megatron_resihp.control.transport.store import server as store_server
from megatron_resihp.control.transport.store.by_agent import at_hatch
from megatron_resihp.control.transport.store.client import StoreClient, open_connection
from megatron_resihp.control.transport.store.relay import MOST_CONNECTIONS
from megatron_resihp.control.transport.store.wire import MAX_VALUE_BYTES, Op, Request, dropped, relayed, write_request
from megatron_resihp.protocol.messages import MESSAGES, NodeReport, ScriptEnded, SlowdownRequest, SurvivorReport
from megatron_resihp.protocol.records import IterationPhase, Record

SHORT_S = 0.05
WAIT_S = 30.0
SET = Request(Op.SET, (b"key", b"value"))


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture
def between(served: Served) -> Iterator[GoBetween]:
    between = GoBetween(served.address, served.secret)
    yield between
    between.close()


@pytest.fixture
def node(between: GoBetween) -> Iterator[Node]:
    with relaying(between.address, between.secret) as node:
        yield node


def handed_over(node: Node, worker: int) -> socket.socket:
    """A connection of a worker's, of which the relay knows nothing but that it is there."""
    node.way(worker)
    own, given = socket.socketpair()
    with given:
        at_hatch(node.hatches[worker])(given)
    own.settimeout(WAIT_S)
    return own


def is_ended(sock: socket.socket) -> bool:
    with suppress(ConnectionError):
        return not sock.recv(1)
    return True


def eventually(test: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not test():
        assert time.monotonic() < deadline
        time.sleep(SHORT_S)


def test_all_workers_of_a_node_share_one_connection(node: Node, between: GoBetween) -> None:
    stores = [node.connect(worker) for worker in range(8) for _ in range(3)]
    own = StoreClient(open_connection(node.relay.own_way(), CONNECT_S))
    for number, store in enumerate(stores):
        store.set(f"key {number}", f"{number}")
    assert all(own.get(f"key {number}", WAIT_S) == f"{number}" for number in range(len(stores)))
    assert between.came == 1


def test_a_wait_of_one_worker_holds_up_no_other(node: Node) -> None:
    waiting, heard = [node.connect(worker) for worker in range(8)], list[bool]()
    threads = [threading.Thread(target=lambda s=store: heard.append(s.wait("key", WAIT_S))) for store in waiting]
    for thread in threads:
        thread.start()
    node.connect(8).set("key", "value")
    for thread in threads:
        thread.join(WAIT_S)
    assert heard == [True] * 8


def test_a_worker_that_takes_no_answers_holds_up_no_other(node: Node) -> None:
    """As one that is stopped. The relay keeps one answer for it."""
    store = node.connect(1)
    store.set("large", "x" * MAX_VALUE_BYTES)
    stopped = node.connect(0)
    stopped.connection._sock.sendall(framed(write_request(Request(Op.GET, (b"large",)))))
    started = time.monotonic()
    assert len(store.get("large", WAIT_S)) == MAX_VALUE_BYTES and time.monotonic() - started < WAIT_S
    stopped.connection._sock.sendall(framed(write_request(SET)))
    assert store.get("large", WAIT_S) and not store.check("key"), "nothing more is taken from it meanwhile"


def test_a_worker_that_says_half_a_word_holds_up_no_other(node: Node) -> None:
    half = handed_over(node, 0)
    half.sendall(LENGTH.pack(100) + b"half")
    node.connect(0).set("key", "value")
    assert node.connect(1).get("key", WAIT_S) == "value"


def test_what_a_dead_worker_waited_for_is_there_for_others(node: Node) -> None:
    dead = node.connect(0)
    dead.connection._sock.sendall(framed(write_request(Request(Op.TAKE, (b"queue",), WAIT_S))))
    dead.close()
    store = node.connect(1)
    assert store.take("queue", SHORT_S) == []
    store.push("queue", "value")
    assert store.take("queue", WAIT_S) == ["value"]


def test_a_worker_speaks_for_itself_only(node: Node, served: Served) -> None:
    own, other = (MESSAGES.write(ScriptEnded(worker), f"worker {worker}") for worker in (1, 2))
    pretended = MESSAGES.write(ScriptEnded(2), "worker 1")
    damaged = other.replace('"sender"', '"\udcff": 1, "sender"').encode(errors="surrogateescape")
    agents = MESSAGES.write(SlowdownRequest((), 1.0), "agent 0")
    store = node.connect(1)
    of_several = MESSAGES.write(NodeReport(0, Record(5, IterationPhase.COMPUTE), ()), "worker 1")
    for text in (other, pretended, agents, of_several):
        with pytest.raises(ValueError, match="speaks for itself only"):
            store.push(keys.INBOX, text)
    with pytest.raises(ValueError, match="speaks for itself only"):
        store.connection.ask(Op.PUSH, keys.INBOX.encode(), damaged)
    store.push(keys.INBOX, own)
    store.push(keys.INBOX, MESSAGES.write(SlowdownRequest((2,), 0.5), "worker 1"))
    store.push(keys.INBOX, "no message, of which the coordinator tells")
    store.push("another queue", other)
    assert [text[:1] for text in served.connect().take(keys.INBOX, 0.0)] == ["{", "{", "n"]


def test_reports_of_a_node_reach_the_store_together(node: Node, served: Served, between: GoBetween) -> None:
    """In a large job the store is busy with those of other nodes meanwhile."""
    stores = [node.connect(worker) for worker in range(4)]
    record = Record(5, IterationPhase.COMPUTE)
    between.open.clear()
    threads = [
        threading.Thread(target=store.push, args=(
            keys.INBOX, MESSAGES.write(SurvivorReport(worker, 0, record, ()), f"worker {worker}", f"{worker}.1"),
        ))
        for worker, store in enumerate(stores)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    eventually(lambda: len(node.relay._line._questions._waiting) == 3)  # type: ignore[union-attr]
    between.open.set()
    for thread in threads:
        thread.join(WAIT_S)
    first, others = (MESSAGES.read(text).body for text in served.connect().take(keys.INBOX, WAIT_S))
    assert isinstance(first, SurvivorReport) and isinstance(others, NodeReport)
    assert {first.worker, *(each.worker for each in others.survivors)} == set(range(4))


def test_an_agent_speaks_for_all(node: Node, served: Served) -> None:
    store = StoreClient(open_connection(node.relay.own_way(), CONNECT_S))
    store.push(keys.INBOX, MESSAGES.write(ScriptEnded(2), "agent 0"))
    assert served.connect().take(keys.INBOX, 0.0)


def test_nothing_is_heard_of_a_worker_that_was_cut_off(node: Node) -> None:
    given_up, other = node.connect(0), node.connect(1)
    node.relay.cut(0)
    other.set("seen", "1")
    with pytest.raises(StoreError, match="is lost"):
        given_up.set("key", "value")
    with pytest.raises(StoreError):
        open_connection(node.way(0), SHORT_S)
    assert not other.check("key")


def test_a_worker_has_so_many_connections_and_no_more(node: Node) -> None:
    first = node.connect(0)
    more = [handed_over(node, 0) for _ in range(2 * MOST_CONNECTIONS)]
    assert is_ended(more[-1])
    first.set("key", "value")
    assert node.connect(1).get("key", WAIT_S) == "value"


def test_what_is_handed_over_and_is_no_connection_is_let_go(node: Node) -> None:
    hand_over = at_hatch(node.hatches[0]) if node.way(0) else None
    assert hand_over is not None
    reader, writer = os.pipe()
    with open(reader, "rb") as pipe, open(writer, "wb") as other:
        hand_over(pipe)  # type: ignore[arg-type]
        hand_over(other)  # type: ignore[arg-type]
    with socket.socket() as outside:
        hand_over(outside)
    node.connect(0).set("key", "value")


@pytest.mark.parametrize(
    "said",
    [SET, Request(Op.GET, (b"key",)), relayed(1, SET), dropped(1), b"garbage", b""],
    ids=["before it is known whether the store is there", "likewise", "relayed", "dropped", "garbage", "nothing"],
)
def test_a_malformed_request_ends_its_connection_only(node: Node, said: Request | bytes) -> None:
    other, sock = node.connect(0), handed_over(node, 0)
    sock.sendall(framed(said if isinstance(said, bytes) else write_request(said)))
    assert is_ended(sock)
    assert not other.check("key")


def test_two_requests_at_once_end_their_connection_only(node: Node) -> None:
    other, mad = node.connect(0), node.connect(0)
    wait = framed(write_request(Request(Op.WAIT, (b"never",), WAIT_S)))
    mad.connection._sock.sendall(2 * wait)
    assert is_ended(mad.connection._sock)
    other.set("key", "value")


def test_a_worker_that_asks_for_much_at_once_gets_it_and_holds_up_no_other(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_server, "MOST_UNSENT", 1)
    waiting, store = node.connect(1), node.connect(0)
    store.set("large", "x" * MAX_VALUE_BYTES)
    mad = [node.connect(0) for _ in range(12)]
    for each in mad:
        each.connection._sock.sendall(framed(write_request(Request(Op.GET, (b"large",)))))
    heard = list[bool]()
    thread = threading.Thread(target=lambda: heard.append(waiting.wait("key", WAIT_S)))
    thread.start()
    for each in mad:
        each.connection._sock.settimeout(WAIT_S)
        read = 0
        while read < MAX_VALUE_BYTES:
            read += len(each.connection._sock.recv(1 << 20))
    store.set("key", "value")
    thread.join(WAIT_S)
    assert heard == [True]


def test_what_is_too_large_ends_its_connection_only(node: Node) -> None:
    other, mad = node.connect(0), node.connect(0)
    with pytest.raises(StoreError):
        mad.connection.ask(Op.SET, b"k" * 200_000, b"v" * MAX_VALUE_BYTES)
    other.set("key", "value")


def test_a_job_that_has_another_secret_is_told_from_none(served: Served) -> None:
    with relaying(served.address, fresh_secret()) as node, pytest.raises(RefusedSecretError, match="is not the one"):
        node.connect()
    with socket.create_server((HOST, 0)) as free:
        address = Address(HOST, free.getsockname()[1])
    with relaying(address, served.secret) as node:
        with pytest.raises(StoreError, match=rf"nothing answers at {HOST}:\d+ \(Connection refused\)$") as error:
            open_connection(node.way(), SHORT_S)
        with pytest.raises(ConnectionRefusedError):
            node.way().enter(WAIT_S)
    assert not isinstance(error.value, RefusedSecretError | OtherProtocolError)


def test_a_store_that_says_nothing_is_not_reached_and_is_lost(
    served: Served, tmp_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another coordinator may come: those that wait have to look for it."""
    monkeypatch.setattr(store_client, "LED_ANSWER_S", 1.0)
    between = GoBetween(served.address, served.secret)
    with relaying(between.address, between.secret, Leaders(tmp_path)) as node:  # type: ignore[arg-type]
        store = node.connect()
        between.open.clear()
        with pytest.raises(OSError, match="timed out"):
            node.way().enter(SHORT_S)
        with pytest.raises(StoreError, match="is lost"):
            store.wait("key", SHORT_S)
    between.close()


def test_a_worker_that_waits_long_for_a_lost_store_keeps_no_other_from_the_next(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_relay, "LED_ATTEMPT_S", 1.0)
    with socket.create_server((HOST, 0)) as silent:
        lost = Address(HOST, silent.getsockname()[1])
        with relaying(lost, served.secret, Leaders(tmp_path)) as node:
            patient = handed_over(node, 0)
            patient.sendall(framed(write_request(Request(Op.REACH, (), WAIT_S))))
            with silent.accept()[0]:
                (tmp_path / leaders.FILE_NAME).write_text(json.dumps({"store": str(served.address)}))
                started = time.monotonic()
                assert open_connection(node.way(1), WAIT_S).address == served.address
                assert time.monotonic() - started < WAIT_S / 2


def test_a_machine_without_room_for_a_thread_is_no_end_of_the_relay(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match="can't start new thread"):
            node.way().enter(CONNECT_S)
    node.connect().set("key", "value")


def test_a_connection_that_a_forked_process_has_too_is_ended_all_the_same(node: Node, between: GoBetween) -> None:
    """As the data loader that a worker forked while another thread of it connected."""
    node.connect(0)
    own, given = socket.socketpair()
    kept_by_another = given.dup()
    with given:
        at_hatch(node.hatches[0])(given)
    own.settimeout(WAIT_S)
    own.sendall(b"garbage" * 10)
    assert is_ended(own)
    kept_by_another.close()


def test_a_store_that_is_stopped_for_a_while_answers_late(node: Node, between: GoBetween, served: Served) -> None:
    store, told = node.connect(), list[bool]()
    between.open.clear()
    thread = threading.Thread(target=lambda: told.append(store.wait("key", SHORT_S)))
    thread.start()
    thread.join(10 * SHORT_S)
    assert not told
    between.open.set()
    thread.join(WAIT_S)
    assert told == [False] and between.came == 1


def test_who_asks_when_it_has_ended_is_told_so(node: Node) -> None:
    store, own = node.connect(), node.relay.own_way()
    node.relay.close(CONNECT_S)
    with pytest.raises(StoreError, match="is lost"):
        store.check("key")
    for way in (node.way(), own):
        with pytest.raises(StoreError):
            open_connection(way, SHORT_S)
