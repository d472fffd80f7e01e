# SPDX-License-Identifier: Apache-2.0
"""The store through which groups meet: waits end with the epoch, and who was looked for is known."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from megatron_resihp.executor.groups.rendezvous import InterruptibleStore, RendezvousBroken


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
