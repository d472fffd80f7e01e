# SPDX-License-Identifier: Apache-2.0
"""The first operations of NCCL's groups, on what stands for its groups: they hang, refuse and run out of memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_resihp.executor.groups.communicators import Communicators
from megatron_resihp.executor.groups.errors import is_communicator_error, is_out_of_memory
from megatron_resihp.executor.groups.waiting import WaitAbandoned
from megatron_resihp.executor.nccl import meetings as nccl_meetings
from megatron_resihp.executor.nccl.meetings import ROOM, NcclMeetings

LIMIT_S = 10.0


class Backend:
    """What carries a group: notes what is asked of it.

    Args:
        before: what happens where the communicator is made.
    """

    def __init__(self, asked: list[str], before: Any = None) -> None:
        self.asked, self._before = asked, before

    def _note(self, what: str) -> None:
        if self._before is not None:
            self._before()
        self.asked.append(what)

    def allreduce(self, tensors: list[torch.Tensor]) -> None:
        self._note("meet all")

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._note(f"greet {peer}")

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._note(f"be greeted by {peer}")

    def abort(self) -> None:
        self.asked.append("abort")


@pytest.fixture
def group_class() -> type:
    """A class for each test: what is installed in it stays there."""

    class Group:
        def __init__(self, backend: Backend, name: str = "1", rank: int = 1) -> None:
            self.backend, self.group_name, self._rank = backend, name, rank

        def rank(self) -> int:
            return self._rank

        def size(self) -> int:
            return 3

        def _get_backend(self, device: torch.device) -> Backend:
            return self.backend

        def broadcast(self, tensors: Any, options: Any = None) -> str:
            self.backend.asked.append("broadcast")
            return "work"

        allreduce = barrier = broadcast

        def send(self, tensors: Any, peer: int, tag: int) -> None:
            self.backend.asked.append(f"send {peer}")

        def recv(self, tensors: Any, peer: int, tag: int) -> None:
            self.backend.asked.append(f"recv {peer}")

        def _start_coalescing(self, device: Any) -> None:
            self.backend.asked.append("start")

        def _end_coalescing(self, device: Any) -> None:
            self.backend.asked.append("end")

    return Group


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def own_number(device: int) -> Iterator[torch.Tensor]:
        yield torch.zeros(1)

    monkeypatch.setattr(nccl_meetings, "_own_number", own_number)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (ROOM, 80 << 30))


def made(monkeypatch: pytest.MonkeyPatch, group_class: type, backend: Backend, kind: str = "nccl", **of: Any) -> Any:
    group = group_class(backend, **of)
    monkeypatch.setitem(dist.distributed_c10d._world.pg_map, group, (kind, None))
    return group


def test_all_meet_once_before_the_first_operation(monkeypatch: pytest.MonkeyPatch, group_class: type) -> None:
    meetings = NcclMeetings(lambda: False, lambda group: None)
    meetings.install(group_class)
    group = made(monkeypatch, group_class, Backend([]))
    assert group.broadcast(["tensor"]) == "work"
    group.allreduce(["tensor"])
    assert group.backend.asked == ["meet all", "broadcast", "broadcast"]
    meetings.forget()  # the next epoch's group of this name is another one
    group.barrier(None)
    assert group.backend.asked[3:] == ["meet all", "broadcast"]


def test_two_meet_for_what_only_two_do(monkeypatch: pytest.MonkeyPatch, group_class: type) -> None:
    """torch has a communicator for each pair, but a batch uses the group's."""
    NcclMeetings(lambda: False, lambda group: None).install(group_class)
    group = made(monkeypatch, group_class, Backend([]))
    for peer in (2, 0, 2):
        group.send(["tensor"], peer, 0)
    assert group.backend.asked == ["greet 2", "send 2", "be greeted by 0", "send 0", "send 2"]
    batched = made(monkeypatch, group_class, Backend([]), name="2")
    batched._start_coalescing("cuda")
    batched.recv(["tensor"], 0, 0)
    batched._end_coalescing("cuda")
    assert batched.backend.asked == ["meet all", "start", "recv 0", "end"]
    batched.recv(["tensor"], 0, 0)
    assert batched.backend.asked[4:] == ["be greeted by 0", "recv 0"]


@pytest.mark.parametrize(("free", "frees"), [(ROOM - 1, True), (ROOM, False)])
def test_what_torch_has_cached_makes_room_for_a_communicator(
    monkeypatch: pytest.MonkeyPatch, group_class: type, free: int, frees: bool
) -> None:
    """On the thread that may hang, since that waits for the device."""
    backend, here = Backend([]), threading.current_thread()

    def empty_cache() -> None:
        assert threading.current_thread() is not here
        backend.asked.append("empty")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 << 30))
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    NcclMeetings(lambda: False, lambda group: None).install(group_class)
    group = made(monkeypatch, group_class, backend)
    for _ in range(2):
        group.allreduce(["tensor"])
    assert backend.asked == ["empty"] * frees + ["meet all", "broadcast", "broadcast"]


def test_groups_of_gloo_need_no_meeting(monkeypatch: pytest.MonkeyPatch, group_class: type) -> None:
    NcclMeetings(lambda: False, lambda group: None).install(group_class)
    group = made(monkeypatch, group_class, Backend([]), kind="gloo")
    group.broadcast(["tensor"])
    assert group.backend.asked == ["broadcast"]


def test_a_communicator_whose_making_hangs(monkeypatch: pytest.MonkeyPatch, group_class: type) -> None:
    """A peer has died before it came. Who waits is woken when the epoch breaks; what comes of the call is aborted."""
    broken, begun, ends = threading.Event(), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        assert ends.wait(LIMIT_S)

    threading.Thread(target=lambda: begun.wait(LIMIT_S) and broken.set()).start()
    late: list[Any] = []
    meetings = NcclMeetings(broken.is_set, late.append)
    meetings.install(group_class)
    group = made(monkeypatch, group_class, Backend([], hang))
    with pytest.raises(WaitAbandoned) as raised:
        group.broadcast(["tensor"])
    assert is_communicator_error(raised.value)
    assert group.backend.asked == [] and late == [group]
    assert meetings.left_behind == 1
    left = meetings._left[0]
    ends.set()
    assert left.over.wait(LIMIT_S)
    assert group.backend.asked == ["meet all", "abort"]
    assert meetings.left_behind == 0


def test_a_communicator_that_is_made_while_its_group_is_aborted(
    monkeypatch: pytest.MonkeyPatch, group_class: type
) -> None:
    """The abort came too early for it: the next one has to take this group again."""
    broken = threading.Event()
    communicators = Communicators(dist.HashStore(), 0, broken.is_set)
    communicators._meetings.install(group_class)

    def break_epoch() -> None:
        broken.set()
        communicators.connections.abort_if_interrupted()

    group = made(monkeypatch, group_class, Backend([], break_epoch))
    with pytest.raises(WaitAbandoned):
        group.broadcast(["tensor"])
    assert group.backend.asked[:1] == ["abort"] and "broadcast" not in group.backend.asked
    communicators._meetings._left[0].over.wait(LIMIT_S)
    communicators.connections.abort()  # as every recovery does
    assert group.backend.asked[-1] == "abort" and "meet all" in group.backend.asked


@pytest.mark.parametrize(
    ("error", "memory"),
    (
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), False),
        (dist.DistBackendError("Failed to CUDA calloc async 4194304 bytes"), True),
    ),
    ids=("refused", "out of memory"),
)
def test_a_communicator_that_can_not_be_made(
    monkeypatch: pytest.MonkeyPatch, group_class: type, error: Exception, memory: bool
) -> None:
    def refuse() -> None:
        raise error

    meetings = NcclMeetings(lambda: False, lambda group: None)
    meetings.install(group_class)
    group = made(monkeypatch, group_class, Backend([], refuse))
    for _ in range(2):  # it counts as not met
        with pytest.raises(dist.DistBackendError) as raised:
            group.allreduce(["tensor"])
        assert is_out_of_memory(raised.value) is memory
        assert is_communicator_error(raised.value) is not memory
    assert group.backend.asked == [] and meetings.left_behind == 0


def test_no_operation_of_torchs_groups_is_forgotten() -> None:
    """Newer releases give operations new names."""
    words = ("reduce", "gather", "scatter", "broadcast", "all_to_all", "alltoall", "send", "recv", "barrier")
    operations = {name for name in vars(dist.ProcessGroup) if any(word in name for word in words)}
    not_of_nccl = {"recv_anysource", "monitored_barrier"}
    assert operations - not_of_nccl == {*nccl_meetings.COLLECTIVES, *nccl_meetings.PEER_TO_PEER}


def test_torchs_own_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of torch comes by here."""
    for name in (*nccl_meetings.COLLECTIVES, *nccl_meetings.PEER_TO_PEER, "_start_coalescing", "_end_coalescing"):
        monkeypatch.setattr(dist.ProcessGroup, name, vars(dist.ProcessGroup)[name])  # so that it is put back
    meetings = NcclMeetings(lambda: False, lambda group: None)
    met: list[int | None] = []
    monkeypatch.setattr(meetings, "meet", lambda group, peer=None: met.append(peer))
    meetings.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=LIMIT_S))
    try:
        dist.all_reduce(torch.ones(1))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    assert met == [None, None]
