# SPDX-License-Identifier: Apache-2.0
"""What the store promises, over real connections: a process's own, or by way of its node's agent."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from served import Served, relaying, serving

from megatron_resihp.control.transport.access.secret import fresh_secret
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.sockets import StoreError, TakenError, reserve, wait_until_reachable
from megatron_resihp.control.transport.store.client import StoreClient, connect
from megatron_resihp.control.transport.store.wire import MAX_VALUE_BYTES

SHORT_S = 0.05
LONG_S = 10.0


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture(params=["direct", "relayed"])
def store(served: Served, request: pytest.FixtureRequest) -> Iterator[StoreClient]:
    if request.param == "direct":
        yield served.connect()
        return
    with relaying(served.address, served.secret) as node:
        yield node.connect()


def test_values_are_seen_by_other_connections(store: StoreClient) -> None:
    other = store.clone()
    store.set("key", "Größe")
    assert other.get("key", SHORT_S) == "Größe"
    assert other.check("key") and not other.check("other")
    assert other.delete("key") and not store.check("key") and not store.delete("key")


def test_all_keys_that_begin_alike_are_deleted(store: StoreClient) -> None:
    for key in ("epoch/1/a", "epoch/1/b", "epoch/10/a", "other"):
        store.set(key, "value")
    store.push("epoch/1/queue", "stays")
    store.clone().delete_all("epoch/1/")
    assert [store.check(key) for key in ("epoch/1/a", "epoch/1/b", "epoch/10/a", "other")] == [False, False, True, True]
    assert store.take("epoch/1/queue", SHORT_S) == ["stays"]


def test_what_does_not_come_in_time(store: StoreClient) -> None:
    started = time.monotonic()
    assert not store.wait("key", SHORT_S)
    assert store.take("queue", SHORT_S) == []
    with pytest.raises(TimeoutError, match="no 'key' after"):
        store.get("key", SHORT_S)
    assert time.monotonic() - started < 2.0


def test_a_wait_ends_when_the_key_comes(store: StoreClient) -> None:
    other = store.clone()
    writer = threading.Timer(SHORT_S, lambda: other.set("key", "value"))
    writer.start()
    started = time.monotonic()
    assert store.get("key", LONG_S) == "value"
    assert time.monotonic() - started < 2.0
    writer.join(LONG_S)


def test_the_first_writer_wins(store: StoreClient) -> None:
    assert store.set_once("key", "first") == "first"
    assert store.clone().set_once("key", "second") == "first"
    with pytest.raises(ValueError, match="empty"):
        store.set_once("other", "")


def test_compare_and_set(store: StoreClient) -> None:
    assert store.compare_set("key", "expected", "new") is None
    assert not store.check("key")
    assert store.compare_set("key", "", "first") == "first"
    assert store.compare_set("key", "wrong", "second") == "first"
    assert store.compare_set("key", "first", "second") == "second"


def test_a_counter_counts_for_all(store: StoreClient) -> None:
    assert [store.add("count", 1), store.clone().add("count", 2), store.add("count", -3)] == [1, 3, 0]


def test_a_queue_keeps_the_order(store: StoreClient) -> None:
    for number in range(5):
        store.push("queue", str(number))
    assert [store.take("queue", 0.0) for _ in range(2)] == [["0", "1", "2", "3", "4"], []]


def test_what_fits_into_no_answer_stays_in_the_queue(store: StoreClient) -> None:
    large = "x" * (MAX_VALUE_BYTES // 2)
    items = ["first", large, large, "", "last", "x" * MAX_VALUE_BYTES]
    for item in items:
        store.push("queue", item)
    taken = list(iter(lambda: store.take("queue", 0.0), []))
    assert [item for some in taken for item in some] == items and len(taken) > 1


def test_each_item_of_a_queue_has_one_taker(store: StoreClient) -> None:
    taken: list[str] = []
    deadline = time.monotonic() + LONG_S

    def take(connection: StoreClient) -> None:
        while len(taken) < 100 and time.monotonic() < deadline:
            taken.extend(connection.take("queue", SHORT_S))

    threads = [threading.Thread(target=take, args=(store.clone(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(100):
        store.push("queue", str(number))
    for thread in threads:
        thread.join(LONG_S)
    assert sorted(map(int, taken)) == list(range(100))


def test_values_that_the_server_would_not_take(store: StoreClient) -> None:
    store.set("key", "x" * MAX_VALUE_BYTES)
    for write in (store.set, store.push, store.set_once):
        with pytest.raises(ValueError, match="takes values up to"):
            write("other", "ä" * (MAX_VALUE_BYTES // 2 + 1))
    assert len(store.get("key", SHORT_S)) == MAX_VALUE_BYTES


def test_a_server_that_is_gone(served: Served, store: StoreClient) -> None:
    other = store.clone()
    served.close()
    for call in (lambda: other.set("key", "value"), lambda: other.push("queue", "value"), lambda: other.check("key")):
        with pytest.raises(StoreError, match=r"127\.0\.0\.1:\d+ is lost") as loss:
            call()
        assert "\n" not in str(loss.value)


def test_waiting_ends_with_the_server(served: Served, store: StoreClient) -> None:
    other = store.clone()
    threading.Timer(SHORT_S, served.close).start()
    started = time.monotonic()
    with pytest.raises(StoreError):
        other.wait("key", LONG_S)
    assert time.monotonic() - started < 5.0


def test_a_closed_connection_says_so(store: StoreClient) -> None:
    other = store.clone()
    other.close()
    with pytest.raises(StoreError, match="is closed"):
        other.check("key")


def test_a_reserved_port_is_served_later() -> None:
    listener = reserve("127.0.0.1", 0)
    port = listener.getsockname()[1]
    secret, served = fresh_secret(), list[Served]()
    server = threading.Timer(SHORT_S, lambda: served.append(Served(listener, secret)))
    server.start()
    connect(Address("127.0.0.1", port), secret, LONG_S).set("key", "value")
    server.join(LONG_S)
    assert served[0].connect().get("key", SHORT_S) == "value"
    served[0].close()


def test_a_port_that_is_reserved_is_nobody_elses() -> None:
    """A standby serves it days later."""
    with reserve("127.0.0.1", 0) as listener, pytest.raises(TakenError):
        reserve("127.0.0.1", listener.getsockname()[1])


def test_a_port_is_free_again_when_the_store_is_closed(served: Served, store: StoreClient) -> None:
    store.clone().set("key", "value")
    served.close()
    reserve("127.0.0.1", store.address.port).close()


def test_what_cannot_be_served_or_reached_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(StoreError, match=r"cannot serve the store on port \d+ \(Address already in use\)$"):
            reserve("127.0.0.1", taken.getsockname()[1])
        free = taken.getsockname()[1]
    for attempt in (lambda address, s: connect(address, fresh_secret(), s), wait_until_reachable):
        started = time.monotonic()
        with pytest.raises(StoreError, match=r"nothing answers at .*127\.0\.0\.1.* \(Connection refused\)$"):
            attempt(Address("127.0.0.1", free), 0.2)
        assert time.monotonic() - started < 1.0
    with pytest.raises(StoreError, match="the host 'no host' is unknown"):
        reserve("no host", 0)


def test_taking_from_what_is_no_queue_ends(store: StoreClient) -> None:
    store.set("queue", "no queue")
    assert store.take("queue", 0.0) == []
    assert store.take("queue", SHORT_S) == []


def test_a_store_is_served_at_the_address_given_only() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but loopback's")
        own = probe.getsockname()[0]
    with reserve(own, 0) as listener:
        listener.listen()
        assert listener.getsockname()[0] == own
        # Something else may listen at this port of the other address.
        with suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=LONG_S).close()
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    with pytest.raises(StoreError, match=r"192\.0\.2\.1 is not an address of this machine; give one that is"):
        reserve("192.0.2.1", 0)
