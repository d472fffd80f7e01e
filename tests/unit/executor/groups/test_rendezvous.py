# SPDX-License-Identifier: Apache-2.0
"""The store through which groups meet: waits end with the epoch, and who was looked for is known."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_resihp.executor.groups.rendezvous import InterruptibleStore, RendezvousBroken

WAIT_S = 10.0


def test_a_wait_ends_when_the_epoch_breaks() -> None:
    broken = threading.Event()
    store = InterruptibleStore(dist.HashStore(), broken.is_set)
    threading.Timer(0.05, broken.set).start()
    with pytest.raises(RendezvousBroken):
        store.get("group/1")


def test_nobody_is_found_in_a_broken_epoch() -> None:
    """Who connects to a peer after the others have left waits for ever."""
    everything = dist.HashStore()
    everything.set("group/1", "here")
    store = InterruptibleStore(everything, lambda: True)
    with pytest.raises(RendezvousBroken):
        store.get("group/1")


def test_nobody_is_invited_in_a_broken_epoch() -> None:
    """The root of a communicator of NCCL's would wait for its peers in a call that nothing ends."""
    everything = dist.HashStore()
    interruptible = InterruptibleStore(everything, lambda: True)
    store = dist.PrefixStore("default", interruptible)  # as torch's C++ sees it
    with pytest.raises(RendezvousBroken):
        store.set("0", "unique id")
    assert everything.num_keys() == 0


def test_epochs_meet_apart() -> None:
    everything, broken = dist.HashStore(), threading.Event()
    first, second = (InterruptibleStore(everything, broken.is_set, prefix) for prefix in ("1", "2"))
    first.set("group/1", "of the first")
    assert first.get("group/1") == b"of the first" and not second.check(["group/1"])
    broken.set()
    with pytest.raises(RendezvousBroken):
        second.get("group/1")


def test_peers_that_were_sought_are_told_once() -> None:
    everything = dist.HashStore()
    InterruptibleStore(everything, lambda: False).set("group/1", b"there")
    store = InterruptibleStore(everything, lambda: False)
    store.set("group/0", b"here")
    store.set("other/0", b"elsewhere")
    assert store.get("group/1") == b"there"
    assert store.take_sought() == [(b"here", 1)]
    assert store.take_sought() == []


class Counting(dist.HashStore):
    """Counts the messages that would cross the network."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    def set(self, key: str, value: bytes) -> None:
        self.written.append(key)
        super().set(key, value)


def test_peers_hear_of_groups_that_are_made_together_at_the_end() -> None:
    everything = Counting()
    store = InterruptibleStore(everything, lambda: False, "epoch")
    with store.gathering():
        for group in ("first", "second"):
            store.set(f"{group}/0", b"here")
        assert everything.written == []
    assert everything.written == ["epoch/first/0", "epoch/second/0"]
    assert store.published == [b"here", b"here"]
    store.set("third/0", b"here")
    assert everything.check(["epoch/third/0"]), "nothing is kept back any more"


def test_peers_hear_of_groups_before_anything_is_asked_of_them() -> None:
    """They may do the same, and each would wait for the others."""
    everything = dist.HashStore()
    stores = [InterruptibleStore(everything, lambda: False, "epoch") for _ in range(2)]
    for store in stores:
        store.set_timeout(timedelta(seconds=WAIT_S))

    def meet(me: int) -> bytes:
        with stores[me].gathering():
            stores[me].set(f"group/{me}", f"of {me}".encode())
            return stores[me].get(f"group/{1 - me}")

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(meet, range(2))) == [b"of 1", b"of 0"]


def test_nobody_hears_of_groups_of_an_epoch_that_broke_while_they_were_made() -> None:
    everything, broken = dist.HashStore(), threading.Event()
    store = InterruptibleStore(everything, broken.is_set)
    with pytest.raises(RendezvousBroken), store.gathering():
        store.set("group/0", b"here")
        broken.set()
    assert everything.num_keys() == 0
