# SPDX-License-Identifier: Apache-2.0
"""Aborting gloo, on real groups whose members are all in this process, and NCCL, on what stands for its groups."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_members import Member, close_what_is_kept_open

from megatron_resihp.executor.groups.communicators import Communicators
from megatron_resihp.executor.groups.rendezvous import RendezvousBroken
from megatron_resihp.executor.groups.waiting import WaitAbandoned
from megatron_resihp.executor.nccl.aborts import DeviceLost, group_error

LIMIT_S = 10.0


class Summing(Member):
    """Sums with the other, and notes what goes wrong."""

    error: Exception | None = None

    def sum(self) -> None:
        assert self.group is not None
        try:
            self.group.sum(torch.ones(1))
        except RuntimeError as error:
            self.error = error.with_traceback(None)  # its frames would keep the group

    def leave(self) -> int:
        """Free the group of the broken epoch; returns what was left behind."""
        self.group = None
        self.communicators.destroy()
        self.communicators.release()
        return self.communicators.left_behind


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> list[Summing]:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    store = dist.HashStore()
    return [Summing(store, me) for me in (0, 1)]


@pytest.mark.parametrize("me", (0, 1), ids=("first", "second"))
def test_who_waits_for_a_peer_that_does_not_come(members: list[Summing], me: int) -> None:
    """One of both connects, the other is connected to: either wait ends, and nothing is left of it."""
    waiting = members[me]
    thread = threading.Thread(target=waiting.sum)
    thread.start()
    await_search(waiting)
    waiting.broken.set()
    waiting.communicators.connections.abort()
    thread.join(LIMIT_S)
    waiting.communicators.connections.abort()  # by the thread that has waited, as every recovery does
    assert waiting.error is not None
    assert waiting.leave() == 0


def test_who_begins_after_the_end(members: list[Summing]) -> None:
    """An operation that is posted after the abort looks for nobody."""
    late = members[0]
    late.broken.set()
    late.communicators.connections.abort()
    late.sum()
    assert late.error is not None
    assert late.leave() == 0


def test_only_gloos_connections_are_cut(members: list[Summing]) -> None:
    """NCCL's proxies free memory that kernels still use, if their connections end while their flags are up."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as proxy,
        listener.accept()[0] as other_end,
    ):
        threads = [threading.Thread(target=member.sum) for member in members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        for member in members:
            assert listener.getsockname()[1] not in member.communicators.connections.ports()
            member.broken.set()
            member.communicators.connections.abort()
        for end in (proxy, other_end):
            end.setblocking(False)
            with pytest.raises(BlockingIOError):  # it would receive the end of what there is
                end.recv(1)
    for member in members:
        with pytest.raises(RuntimeError):
            assert member.group is not None
            member.group.sum(torch.ones(1))
    close_what_is_kept_open(*members)
    assert [member.leave() for member in members] == [0, 0]


def test_no_group_is_made_in_a_broken_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of what was begun is left, and the next epoch's groups are made as ever."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    broken = threading.Event()
    broken.set()
    communicators = Communicators(dist.HashStore(), 0, broken.is_set)
    communicators.begin(1, "plan")
    with pytest.raises(RendezvousBroken):
        communicators.side_group("alone", (0,))
    with pytest.raises(RendezvousBroken):
        communicators.join_world("cuda:gloo", (0,), timedelta(seconds=LIMIT_S))
    communicators.connections.abort()
    communicators.destroy()
    broken.clear()
    communicators.begin(2, "plan")
    communicators.side_group("alone", (0,)).sum(torch.ones(1))
    communicators.join_world("cuda:gloo", (0,), timedelta(seconds=LIMIT_S))
    # Others may have come less far in the broken epoch, and meet under the name that torch gives the first group.
    assert dist.group.WORLD.group_name == "0"
    communicators.destroy()
    communicators.release()
    assert communicators.left_behind == 0


def test_groups_that_have_worked_are_freed(members: list[Summing]) -> None:
    sum_together(members)
    for member in members:
        member.broken.set()
        member.communicators.connections.abort()
    close_what_is_kept_open(*members)
    assert [member.leave() for member in members] == [0, 0]


def test_a_message_that_nobody_takes(members: list[Summing]) -> None:
    """A receive is given up before the message comes, as where an error strikes in between: the group is freed."""
    first, second = members
    assert first.group is not None and second.group is not None
    sum_together(members)
    first.group._group.recv([torch.ones(1)], 1, 0)
    second.group.send(torch.ones(1), 0)
    for member in members:
        member.broken.set()
        member.communicators.connections.abort()
    close_what_is_kept_open(*members)
    assert [member.leave() for member in members] == [0, 0]


class NcclGroup:
    """What the plugin asks of torch's group of NCCL's.

    Args:
        refuses: why it can't be aborted; "": it can.
        device: which kernels of other groups hold up; None: none does.
    """

    def __init__(
        self, name: str, aborted: list[str], error: str = "SUCCESS", refuses: str = "", device: Device | None = None
    ) -> None:
        self.group_name = name
        self._aborted, self._error, self._refuses, self._device = aborted, error, refuses, device

    def _get_backend(self, device: torch.device) -> NcclGroup:
        assert device.type == "cuda"
        return self

    def get_error(self) -> Any:
        return SimpleNamespace(name=self._error)

    def abort(self) -> None:
        if self._refuses:
            raise dist.DistBackendError(self._refuses)
        if self._device is not None:
            self._device.let_go(self.group_name)
        self._aborted.append(self.group_name)


class Device:
    """A device on which kernels of some groups spin: an abort of any group waits until all of these are told to end."""

    def __init__(self, *spinning: str) -> None:
        self._spinning = set(spinning)
        self._idle = threading.Condition()

    def let_go(self, group: str) -> None:
        with self._idle:
            self._spinning.discard(group)
            self._idle.notify_all()
            assert self._idle.wait_for(lambda: not self._spinning, 10 * LIMIT_S)


def register(monkeypatch: pytest.MonkeyPatch, *groups: NcclGroup) -> None:
    for group in groups:
        monkeypatch.setitem(dist.distributed_c10d._world.pg_map, group, ("nccl", None))
    monkeypatch.setitem(dist.distributed_c10d._world.pg_map, GlooGroup(), ("gloo", None))


class GlooGroup:
    """Of gloo: has nothing that could be asked for."""


def test_one_group_that_can_not_be_aborted_keeps_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    aborted: list[str] = []
    register(
        monkeypatch, NcclGroup("c", aborted), NcclGroup("b", aborted, refuses="timed out"), NcclGroup("a", aborted)
    )
    Communicators(dist.HashStore(), 3, lambda: True).connections.abort()
    assert sorted(aborted) == ["a", "c"]
    assert "worker 3 could not abort group b" in capsys.readouterr().err


def test_a_device_that_has_faulted_when_its_groups_are_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as it is asked for: the device stays lost, and whoever aborts must die."""
    fault = "NCCL error in: ...\nLast error:\nCuda failure 719 'unspecified launch failure'"
    register(monkeypatch, NcclGroup("a", []), NcclGroup("b", [], refuses=fault))
    communicators = Communicators(dist.HashStore(), 0, lambda: True)
    for abort in (communicators.connections.abort, communicators.connections.abort_if_interrupted):
        with pytest.raises(DeviceLost, match="the device faulted"):
            abort()


def test_no_abort_waits_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever group's kernels spin: the first, the last, or several."""
    for spinning in (("a",), ("c",), ("a", "c")):
        aborted: list[str] = []
        device = Device(*spinning)
        with monkeypatch.context() as epoch:
            register(epoch, *(NcclGroup(name, aborted, device=device) for name in ("b", "c", "a")))
            Communicators(dist.HashStore(), 0, lambda: True).connections.abort()
        assert sorted(aborted) == ["a", "b", "c"]


def test_a_device_that_does_not_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is bounded, and so is that of whoever aborts again. Meanwhile nobody is kept from anything."""
    device = Device("a", "no group of ours")
    register(monkeypatch, NcclGroup("a", [], device=device), NcclGroup("b", []))
    communicators = Communicators(dist.HashStore(), 0, lambda: True, abort_s=0.01)
    for abort in (communicators.connections.abort, communicators.connections.abort_if_interrupted):
        with pytest.raises(DeviceLost, match=r"NCCL groups a could not be aborted within 0.01 s"):
            abort()
        assert not communicators.connections._lock.locked()
    device.let_go("no group of ours")


def test_groups_of_an_epoch_that_holds_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The notice of an earlier one may be late; who builds epochs leaves them by choice too."""
    aborted: list[str] = []
    register(monkeypatch, NcclGroup("a", aborted))
    broken = threading.Event()
    communicators = Communicators(dist.HashStore(), 0, broken.is_set)
    communicators.connections.abort_if_interrupted()
    assert aborted == []
    broken.set()
    communicators.connections.abort_if_interrupted()
    communicators.connections.abort()  # by the thread that builds epochs, as in every recovery
    assert aborted == ["a"]


def test_groups_are_left_by_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[str] = []
    register(monkeypatch, NcclGroup("a", aborted))
    Communicators(dist.HashStore(), 0, lambda: False).connections.abort()
    assert aborted == ["a"]


def test_what_nccl_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert group_error() is None
    register(monkeypatch, NcclGroup("a", []))
    assert group_error() is None
    register(monkeypatch, NcclGroup("c", [], error="REMOTE_ERROR"), NcclGroup("b", [], error="TIMEOUT"))
    assert group_error() == "NCCL group b: TIMEOUT"
    with pytest.raises(dist.DistError, match="group b: TIMEOUT"):
        Communicators(dist.HashStore(), 0, lambda: False).connections.check()


@pytest.mark.parametrize(
    ("backend", "given", "device_ids"),
    (("nccl", None, [3]), ("nccl", [5], [5]), ("gloo", None, None)),
    ids=("its own", "said", "no device"),
)
def test_the_device_of_a_barrier(
    monkeypatch: pytest.MonkeyPatch, backend: str, given: list[int] | None, device_ids: list[int] | None
) -> None:
    """Whatever this worker's rank is by now."""
    seen: list[Any] = []
    monkeypatch.setattr(dist, "barrier", lambda group, async_op, device_ids: seen.append((group, async_op, device_ids)))
    monkeypatch.setattr(dist, "init_process_group", lambda *positional, **options: None)
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    emptied: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(None))
    communicators = Communicators(dist.HashStore(), 0, lambda: False)
    for epoch in (1, 2):
        communicators.begin(epoch, "plan")
        communicators.join_world("nccl", (1, 0), timedelta(seconds=1))
    assert len(emptied) == 2  # what torch keeps for later is NCCL's before its communicators are made
    dist.barrier(device_ids=given)
    assert seen == [(None, False, device_ids)]


@pytest.mark.parametrize(("backend", "async_op"), [("nccl", False), ("nccl", True), ("gloo", False)])
def test_a_barrier_of_nccls_that_was_aborted_is_none(
    monkeypatch: pytest.MonkeyPatch, backend: str, async_op: bool
) -> None:
    """It returns as if all had come. Gloo's raises by itself."""
    broken: list[bool] = []
    monkeypatch.setattr(dist, "barrier", lambda group, async_op, device_ids: broken.append(True))
    monkeypatch.setattr(dist, "init_process_group", lambda *positional, **options: None)
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    communicators = Communicators(dist.HashStore(), 0, lambda: bool(broken))
    communicators.begin(1, "plan")
    communicators.join_world("nccl", (1, 0), timedelta(seconds=1))
    if backend == "nccl" and not async_op:
        with pytest.raises(WaitAbandoned):
            dist.barrier()
    else:
        dist.barrier(async_op=async_op)
    assert broken


def sum_together(members: list[Summing]) -> None:
    """Let the group connect and work."""
    threads = [threading.Thread(target=member.sum) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert [member.error for member in members] == [None, None]


def await_search(member: Summing) -> None:
    """Wait until gloo has asked the store where the peer is."""
    store = member.communicators.connections.store
    assert store is not None
    deadline = time.monotonic() + LIMIT_S
    while not store._sought:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_an_epoch_begins_on_a_connection_that_works() -> None:
    class Lost(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("Connection reset by peer")

    opened = dist.HashStore()
    communicators = Communicators(Lost(), 0, lambda: False, reopen=lambda: opened)
    communicators.begin(1, "plan")
    assert communicators.connections.store is not None
    communicators.connections.store.set("key", "value")
    assert opened.check(["resihp/groups/1/plan/key"])


class Leaving:
    """One of two workers, which waits for the other before it leaves an epoch by choice."""

    def __init__(self, store: dist.Store, me: int) -> None:
        self.broken = threading.Event()
        self.communicators = Communicators(store, me, self.broken.is_set)
        self.left = threading.Event()
        self.thread = threading.Thread(target=self._leave, daemon=True)

    def _leave(self) -> None:
        self.communicators.await_all_idle(epoch=1, workers=2, timeout_s=LIMIT_S)
        self.left.set()


@pytest.fixture
def leaving(monkeypatch: pytest.MonkeyPatch) -> tuple[dist.Store, list[Leaving], threading.Event]:
    """Two workers; the device of the second has work until the event is set."""
    store, done = dist.HashStore(), threading.Event()
    members = [Leaving(store, me) for me in (0, 1)]

    def synchronize() -> None:
        if threading.current_thread() is members[1].thread:
            assert done.wait(LIMIT_S)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    for member in members:
        member.thread.start()
    return store, members, done


def test_nobody_leaves_by_choice_while_a_device_has_work(
    leaving: tuple[dist.Store, list[Leaving], threading.Event],
) -> None:
    """An abort would take from it what is still on its way."""
    store, (first, second), done = leaving
    store.wait(["resihp/groups/1/leaving/idle"], timedelta(seconds=LIMIT_S))
    assert not first.left.wait(0.2)
    done.set()
    assert first.left.wait(LIMIT_S)
    assert second.left.wait(LIMIT_S)


def test_an_end_of_the_epoch_ends_the_wait_for_others_that_leave(
    leaving: tuple[dist.Store, list[Leaving], threading.Event],
) -> None:
    _, (first, second), done = leaving
    first.broken.set()
    assert first.left.wait(LIMIT_S)
    assert not second.left.is_set()
    done.set()


@pytest.mark.parametrize("fault", ("late", "lost"))
def test_a_change_is_not_given_up_for_one_who_does_not_come(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Nor for a store that is lost."""

    class Store(dist.HashStore):
        def add(self, key: str, amount: int) -> int:
            if fault == "lost":
                raise dist.DistNetworkError("Connection reset by peer")
            return super().add(key, amount)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    Communicators(Store(), 0, lambda: False).await_all_idle(epoch=1, workers=2, timeout_s=0.01)
