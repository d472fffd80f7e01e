# SPDX-License-Identifier: Apache-2.0
"""Groups that are made while another epoch's are in use, on real gloo with all members in this process."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from gloo_members import Member, close_what_is_kept_open

from megatron_resihp.executor.gloo import sockets as gloo_sockets
from megatron_resihp.executor.gloo.groups_ahead import GroupNeeds, GroupsAhead, WorldGroup
from megatron_resihp.executor.groups.communicators import Communicators
from megatron_resihp.executor.groups.rendezvous import RendezvousBroken

LIMIT_S = 10.0
BOTH = GroupNeeds((("both", (0, 1)),))


@pytest.fixture(autouse=True)
def connect_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")


class Worker(Member):
    """It goes on from epoch 1."""

    def make_ahead(self, change: int = 1) -> GroupsAhead:
        ahead = self.communicators.groups_ahead(change, "next plan")
        ahead.make(BOTH)
        return ahead

    def leave(self) -> None:
        self.group = None
        self.communicators.connections.abort()
        self.communicators.destroy()

    def enter(self, ahead: GroupsAhead | None) -> None:
        self.communicators.begin(2, "next plan", ahead)
        self.group = self.communicators.side_group("both", (0, 1))


@pytest.fixture
def members() -> list[Worker]:
    store = dist.HashStore()
    return [Worker(store, me) for me in (0, 1)]


def end(members: list[Worker]) -> None:
    for member in members:
        member.leave()
    close_what_is_kept_open(*members)
    for member in members:
        member.communicators.release()
        assert member.communicators.left_behind == 0


def sums(members: list[Worker]) -> list[float]:
    """What each gets when all sum 1, 2."""
    found = [torch.tensor([float(number)]) for number in range(1, len(members) + 1)]

    def add(member: Worker, value: torch.Tensor) -> None:
        assert member.group is not None
        member.group.sum(value)

    threads = [threading.Thread(target=add, args=each) for each in zip(members, found, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    return [float(value) for value in found]


def test_both_epochs_work_and_the_end_of_one_is_none_of_the_other(members: list[Worker]) -> None:
    ahead = [member.make_ahead() for member in members]
    assert sums(members) == [3.0, 3.0], "training goes on"
    for member in members:
        member.leave()
    close_what_is_kept_open(*members)
    for member, groups in zip(members, ahead, strict=True):
        member.enter(groups)
        member.communicators.release()
    assert sums(members) == [3.0, 3.0]
    end(members)


def test_an_abort_ends_what_has_been_made_ahead_like_any_other_group(members: list[Worker]) -> None:
    """Also where the peer was faster, and has connected before this worker has begun the epoch."""
    first, second = members
    ahead = [member.make_ahead() for member in members]
    for member in members:
        member.leave()
    first.enter(ahead[0])
    errors: list[BaseException] = []

    def wait_for_the_other() -> None:
        assert first.group is not None
        try:
            first.group.sum(torch.ones(1))
        except RuntimeError as error:
            errors.append(error.with_traceback(None))

    thread = threading.Thread(target=wait_for_the_other)
    thread.start()
    second.enter(ahead[1])
    for member in members:
        member.broken.set()
        member.communicators.connections.abort()
    thread.join(LIMIT_S)
    assert errors
    end(members)


def sockets_of(ahead: GroupsAhead) -> set[str]:
    """What listens at its ports, and what has connected to them."""
    return gloo_sockets.identities() - gloo_sockets.identities(ahead.ports())


def test_connections_of_a_faster_peer_are_the_groups_own(members: list[Worker]) -> None:
    """What exists when an epoch begins is nobody's business, such as the store's connection; these are."""
    worker = members[0]
    ahead = worker.make_ahead()
    worker.leave()
    [listener] = sockets_of(ahead)
    address = next(tcp.getsockname() for identity, tcp in gloo_sockets.tcp_sockets() if identity == listener)
    with socket.create_connection(address[:2], LIMIT_S):
        deadline = time.monotonic() + LIMIT_S
        while len(sockets_of(ahead)) < 2:
            assert time.monotonic() < deadline, "a listener, and what has connected to it"
        worker.communicators.begin(2, "next plan", ahead)
        assert not worker.communicators.connections._foreign & sockets_of(ahead)
    end(members)


def test_their_messages_wait_as_long_as_was_asked_for() -> None:
    """One member sends once, the other receives twice."""
    store, group = dist.HashStore(), WorldGroup((0, 1), timedelta(seconds=2))
    ahead = [Communicators(store, me, lambda: False).groups_ahead(1, "plan") for me in (0, 1)]
    for me in (0, 1):
        ahead[me].make(GroupNeeds((), me, (group,)))
    receiver, sender = (each.take_backend(group) for each in ahead)
    sending = threading.Thread(target=lambda: sender.send([torch.ones(1)], 0, 0).wait())
    sending.start()
    receiver.recv([torch.ones(1)], 1, 0).wait()
    sending.join(LIMIT_S)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
        receiver.recv([torch.ones(1)], 1, 0).wait()
    assert time.monotonic() - start < LIMIT_S


def test_what_no_epoch_uses_is_freed(members: list[Worker]) -> None:
    for member in members:
        ahead = member.make_ahead()
        own = sockets_of(ahead)
        member.communicators.discard(ahead)
        member.communicators.release()
        assert member.communicators.left_behind == 0
        assert own and not own & gloo_sockets.identities()
    assert sums(members) == [3.0, 3.0]
    end(members)


def test_none_are_made_in_a_broken_epoch(members: list[Worker]) -> None:
    worker = members[0]
    ahead = worker.communicators.groups_ahead(1, "next plan")
    worker.broken.set()
    with pytest.raises(RendezvousBroken):
        ahead.make(BOTH)
    worker.communicators.discard(ahead)
    end(members)


def test_torch_takes_them_for_its_world_and_its_groups(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that may wait as long, as many as were made; others, and all that are wanted later, are made as ever."""
    communicators = Communicators(dist.HashStore(), 5, lambda: False)
    ahead = communicators.groups_ahead(1, "plan")
    short, longer = WorldGroup((0,), timedelta(seconds=LIMIT_S)), WorldGroup((0,), timedelta(seconds=2 * LIMIT_S))
    ahead.make(GroupNeeds((), 0, (short, longer, longer, longer)))
    made = [ahead._backends[short][0], *list(ahead._backends[longer])[:2]]
    communicators.begin(1, "plan", ahead)
    communicators.join_world("gloo", (5,), short.timeout)
    try:
        groups = [dist.group.WORLD, *(dist.new_group([0], each) for each in (longer.timeout, longer.timeout))]
        assert [group._get_backend(torch.device("cpu")) for group in groups] == made
        dist.new_group([0], short.timeout)
        communicators.end_hand_over()
        assert "made 1 groups ahead that are not needed, and lacked 1\n" in capsys.readouterr().err
        groups.append(dist.new_group([0], longer.timeout))
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)
    finally:
        del made, groups, group
        communicators.destroy()
        communicators.release()
