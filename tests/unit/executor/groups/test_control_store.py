# SPDX-License-Identifier: Apache-2.0
"""torch's groups meet over the control plane's connection, and no TCPStore is made for it."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from served import Served, relaying, serving

from megatron_resihp.control.transport.store.client import StoreClient
from megatron_resihp.control.transport.store.wire import Op, Reply
from megatron_resihp.executor.groups.control_store import ControlStore, meet_in
from megatron_resihp.executor.groups.rendezvous import InterruptibleStore

LIMIT = timedelta(seconds=30)
LIMIT_S = LIMIT.total_seconds()
SHORT = timedelta(seconds=0.05)


class Reached:
    """A store that is served, and how workers open connections to it."""

    def __init__(self, served: Served, connect: Callable[[], StoreClient]) -> None:
        self.close, self.connect = served.close, connect


@pytest.fixture(params=["direct", "relayed"])
def served(request: pytest.FixtureRequest) -> Iterator[Reached]:
    with serving() as served:
        if request.param == "direct":
            yield Reached(served, served.connect)
            return
        with relaying(served.address, served.secret) as node:
            yield Reached(served, node.connect)


def opened(served: Reached) -> ControlStore:
    return ControlStore(served.connect().connection)


def at_once(calls: list[Callable[[], Any]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_it_does_what_a_c10d_store_does(served: Reached) -> None:
    inner = opened(served), opened(served)
    store, other = (dist.PrefixStore("prefix", each) for each in inner)
    store.set("key", b"\x00\xff")
    assert other.get("key") == b"\x00\xff" and other.check(["key"]) and not other.check(["key", "other"])
    assert [store.add("count", 2), other.add("count", 3)] == [2, 5]
    assert store.compare_set("new", "", "first") == b"first" and other.compare_set("new", "", "second") == b"first"
    assert other.compare_set("none", "expected", "new") == b"expected" and not other.check(["none"])
    inner[0].set_all({"prefix/one": "1", "prefix/two": b"2"})
    assert [other.get("one"), other.get("two")] == [b"1", b"2"]
    assert other.delete_key("key") and not store.check(["key"])
    with pytest.raises(dist.DistStoreError, match="in time"):
        other.wait(["key"], SHORT)


def test_a_wait_of_one_thread_holds_up_no_other(served: Reached) -> None:
    store = opened(served)
    waiting = threading.Thread(target=store.wait, args=(["late"], LIMIT))
    waiting.start()
    store.set("late", "value")
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()


def test_gloo_groups_meet_there(served: Reached) -> None:
    sums = [torch.tensor([float(rank)]) for rank in range(3)]

    def take_part(rank: int) -> None:
        inner = opened(served)
        store = InterruptibleStore(inner, lambda: False, "epoch")
        group = dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, 3, LIMIT)
        group.allreduce([sums[rank]]).wait()

    at_once([lambda rank=rank: take_part(rank) for rank in range(3)])  # type: ignore[misc]
    assert [each.item() for each in sums] == [3.0, 3.0, 3.0]


def test_what_a_peer_has_published_takes_one_question(served: Reached, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, inner = opened(served), opened(served)
    InterruptibleStore(peer, lambda: False, "epoch").set("group/1", b"here")
    asked: list[Op] = []

    def ask(op: Op, *fields: bytes, within_s: float = 0.0) -> Reply:
        asked.append(op)
        return connection(op, *fields, within_s=within_s)

    connection = inner._connection.ask
    monkeypatch.setattr(inner._connection, "ask", ask)
    assert InterruptibleStore(inner, lambda: False, "epoch").get("group/1") == b"here"
    assert asked == [Op.GET]


def test_a_lost_connection_is_told_as_torch_tells_it(served: Reached) -> None:
    inner = opened(served)
    store = dist.PrefixStore("prefix", inner)
    served.close()
    started = time.monotonic()
    with pytest.raises(dist.DistNetworkError, match="is lost"):
        store.get("key")
    assert time.monotonic() - started < LIMIT_S


def test_a_world_without_a_store_of_its_own_meets_there(served: Reached, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    monkeypatch.setitem(handlers, "env", handlers["env"])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    meet_in(lambda: served.connect().connection)
    dist.init_process_group("gloo", timeout=LIMIT)
    try:
        assert dist.get_world_size() == 1
        assert opened(served).num_keys() > 0, "what torch has written there"
    finally:
        dist.destroy_process_group()
