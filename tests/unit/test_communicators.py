"""Aborting gloo, on real groups whose members are all in this process."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from megatron_resihp.executor.communicators import Communicators, SideGroup

LIMIT_S = 10.0


class Member:
    """One member of a group of two."""

    def __init__(self, store: dist.Store, me: int) -> None:
        self.broken = threading.Event()
        self.communicators = Communicators(store, me, self.broken.is_set)
        self.communicators.begin(1, "plan")
        self.group: SideGroup | None = self.communicators.side_group("both", (0, 1))
        self.error: Exception | None = None

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
def members(monkeypatch: pytest.MonkeyPatch) -> list[Member]:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    store = dist.HashStore()
    return [Member(store, me) for me in (0, 1)]


@pytest.mark.parametrize("me", (0, 1), ids=("first", "second"))
def test_who_waits_for_a_peer_that_does_not_come(members: list[Member], me: int) -> None:
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


def test_who_begins_after_the_end(members: list[Member]) -> None:
    """An operation that is posted after the abort looks for nobody."""
    late = members[0]
    late.broken.set()
    late.communicators.abort()
    late.sum()
    assert late.error is not None
    assert late.leave() == 0


def test_groups_that_have_worked_are_freed(members: list[Member]) -> None:
    sum_together(members)
    for member in members:
        member.broken.set()
        member.communicators.abort()
    assert [member.leave() for member in members] == [0, 0]


def test_a_message_that_nobody_takes(members: list[Member]) -> None:
    """A receive is given up before the message comes, as where an error strikes in between: the group is freed."""
    first, second = members
    assert first.group is not None and second.group is not None
    sum_together(members)
    first.group._group.recv([torch.ones(1)], 1, 0)
    second.group.send(torch.ones(1), 0)
    for member in members:
        member.broken.set()
        member.communicators.abort()
    assert [member.leave() for member in members] == [0, 0]


def sum_together(members: list[Member]) -> None:
    """Let the group connect and work."""
    threads = [threading.Thread(target=member.sum) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert [member.error for member in members] == [None, None]


def await_search(member: Member) -> None:
    """Wait until gloo has asked the store where the peer is."""
    store = member.communicators._epoch_store
    assert store is not None
    deadline = time.monotonic() + LIMIT_S
    while not store._sought:
        assert time.monotonic() < deadline
        time.sleep(0.001)
