"""Aborting gloo, on real groups whose members are all in this process, and NCCL, on what stands for its groups."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_members import Member, close_what_is_kept_open

from megatron_resihp.executor.communicators import Communicators
from megatron_resihp.executor.rendezvous import RendezvousBroken

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
    waiting.communicators.abort()
    thread.join(LIMIT_S)
    waiting.communicators.abort()  # by the thread that has waited, as every recovery does
    assert waiting.error is not None
    assert waiting.leave() == 0


def test_who_begins_after_the_end(members: list[Summing]) -> None:
    """An operation that is posted after the abort looks for nobody."""
    late = members[0]
    late.broken.set()
    late.communicators.abort()
    late.sum()
    assert late.error is not None
    assert late.leave() == 0


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
    communicators.abort()
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
        member.communicators.abort()
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
        member.communicators.abort()
    close_what_is_kept_open(*members)
    assert [member.leave() for member in members] == [0, 0]


class NcclGroup:
    """What the plugin asks of torch's group of NCCL's."""

    def __init__(self, name: str, aborted: list[str], error: str = "SUCCESS", stuck: bool = False) -> None:
        self.group_name = name
        self._aborted, self._error, self._stuck = aborted, error, stuck

    def _get_backend(self, device: torch.device) -> NcclGroup:
        assert device.type == "cuda"
        return self

    def get_error(self) -> Any:
        return SimpleNamespace(name=self._error)

    def abort(self) -> None:
        if self._stuck:
            raise dist.DistBackendError("ProcessGroup abort timed out")
        self._aborted.append(self.group_name)


def register(monkeypatch: pytest.MonkeyPatch, *groups: NcclGroup) -> None:
    for group in groups:
        monkeypatch.setitem(dist.distributed_c10d._world.pg_map, group, ("nccl", None))
    monkeypatch.setitem(dist.distributed_c10d._world.pg_map, GlooGroup(), ("gloo", None))


class GlooGroup:
    """Of gloo: has nothing that could be asked for."""


def test_one_group_that_can_not_be_aborted_keeps_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one order, whatever they were made in."""
    aborted: list[str] = []
    register(monkeypatch, NcclGroup("c", aborted), NcclGroup("b", aborted, stuck=True), NcclGroup("a", aborted))
    Communicators(dist.HashStore(), 3, lambda: True).abort()
    assert aborted == ["a", "c"]
    assert "worker 3 could not abort group b" in capsys.readouterr().err


def test_groups_of_an_epoch_that_holds_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The notice of an earlier one may be late; who builds epochs leaves them by choice too."""
    aborted: list[str] = []
    register(monkeypatch, NcclGroup("a", aborted))
    broken = threading.Event()
    communicators = Communicators(dist.HashStore(), 0, broken.is_set)
    communicators.abort_if_interrupted()
    assert aborted == []
    broken.set()
    communicators.abort_if_interrupted()
    assert aborted == ["a"]
    broken.clear()
    communicators.abort()
    assert aborted == ["a", "a"]


def test_what_nccl_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    communicators = Communicators(dist.HashStore(), 0, lambda: False)
    assert communicators.failure() is None
    register(monkeypatch, NcclGroup("a", []))
    assert communicators.failure() is None
    register(monkeypatch, NcclGroup("c", [], error="REMOTE_ERROR"), NcclGroup("b", [], error="TIMEOUT"))
    assert communicators.failure() == "NCCL group b: TIMEOUT"


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
    communicators = Communicators(dist.HashStore(), 0, lambda: False)
    for epoch in (1, 2):
        communicators.begin(epoch, "plan")
        communicators.join_world("nccl", (1, 0), timedelta(seconds=1))
    dist.barrier(device_ids=given)
    assert seen == [(None, False, device_ids)]


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
    store = member.communicators._epoch_store
    assert store is not None
    deadline = time.monotonic() + LIMIT_S
    while not store._sought:
        assert time.monotonic() < deadline
        time.sleep(0.001)
