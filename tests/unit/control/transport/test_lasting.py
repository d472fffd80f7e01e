# SPDX-License-Identifier: Apache-2.0
"""Connections to the store, a process's own or its agent's, that are lost on the way: a go-between cuts them."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from go_between import GoBetween
from served import Served, relaying, serving

from megatron_resihp.control import keys
from megatron_resihp.control.transport.sockets import SILENT_S, StoreError
from megatron_resihp.control.transport.store.client import StoreClient, connect
from megatron_resihp.control.transport.store.lasting import LastingStore
from megatron_resihp.control.worker.client import WorkerControl
from megatron_resihp.protocol.messages import MESSAGES, TrainingFinished
from megatron_resihp.protocol.notices import NOTICES, EpochIsBroken

SHORT_S = 0.05
HEARD_S = 30.0


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as served:
        served.connect().set(keys.RUN, "this run")
        yield served


@pytest.fixture
def direct(served: Served) -> StoreClient:
    return served.connect()


@pytest.fixture
def between(served: Served) -> Iterator[GoBetween]:
    between = GoBetween(served.address, served.secret)
    yield between
    between.close()


@pytest.fixture(params=["direct", "relayed"])
def store(between: GoBetween, request: pytest.FixtureRequest) -> Iterator[LastingStore]:
    if request.param == "direct":
        yield LastingStore(connect(between.address, between.secret, HEARD_S))
        return
    with relaying(between.address, between.secret) as node:
        yield LastingStore(node.connect(1))


def test_the_kernel_watches_both_ends(served: Served) -> None:
    client = served.connect()
    ends = [socket.socket(fileno=fd) for fd in _connections_at(client.address.port)]
    assert len(ends) == 2, "its own end, and the server's"
    for end in ends:
        with end:
            assert _watched(end)


def _watched(end: socket.socket) -> bool:
    within_ms = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    return end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1 and within_ms == 1000 * SILENT_S


def _connections_at(port: int) -> list[int]:
    """Duplicates of this process's ends of connections to a port of its own."""
    found = []
    for number in (int(entry.name) for entry in Path("/proc/self/fd").iterdir()):
        try:
            with socket.socket(fileno=os.dup(number)) as sock:
                if sock.family == socket.AF_INET and port in (sock.getsockname()[1], sock.getpeername()[1]):
                    found.append(os.dup(sock.fileno()))
        except OSError:
            continue
    return found


def test_calls_outlive_a_lost_connection(store: LastingStore, between: GoBetween, direct: StoreClient) -> None:
    for call in (
        lambda: store.set("key", "value"), lambda: store.get("key", HEARD_S), lambda: store.check("key"),
        lambda: store.push("queue", "item"), lambda: store.clone().check("key"),
    ):  # fmt: skip
        between.cut()
        call()
    between.cut()
    assert direct.get("key", SHORT_S) == "value" and store.take("queue", HEARD_S) == ["item"]


def test_who_waits_goes_on_waiting(store: LastingStore, between: GoBetween, direct: StoreClient) -> None:
    threading.Timer(SHORT_S, between.cut).start()
    threading.Timer(4 * SHORT_S, direct.clone().set, ["key", "v"]).start()
    assert store.get("key", HEARD_S) == "v"


def test_a_counter_is_not_counted_twice(store: LastingStore, between: GoBetween) -> None:
    assert store.add("count", 1) == 1
    between.cut()
    with pytest.raises(StoreError):
        store.add("count", 1)


def test_a_store_that_is_gone_stays_so(store: LastingStore, between: GoBetween) -> None:
    between.close()
    started = time.monotonic()
    with pytest.raises(StoreError, match="is lost"):
        store.check("key")
    assert time.monotonic() - started < 5.0


def test_another_jobs_store_is_none(store: LastingStore, between: GoBetween, direct: StoreClient) -> None:
    direct.set(keys.RUN, "another run")
    between.cut()
    with pytest.raises(StoreError, match="another job has the port by now"):
        store.check("key")


def test_a_worker_hears_and_is_heard_again(store: LastingStore, between: GoBetween, direct: StoreClient) -> None:
    broken = threading.Event()
    control = WorkerControl(store, 1, broken.set)
    between.cut()
    direct.set(keys.notice_key(0), NOTICES.write(EpochIsBroken(0, "worker 0: exit signal 9"), "the coordinator"))
    assert broken.wait(HEARD_S)
    control.tell(TrainingFinished(1, 3))
    [text] = direct.take(keys.INBOX, HEARD_S)
    letter = MESSAGES.read(text)
    assert letter.body == TrainingFinished(1, 3) and letter.id
