# SPDX-License-Identifier: Apache-2.0
"""When a worker has its groups for a change, and what becomes of those that are not used."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_resihp.control.worker.heard import NO_EPOCH, Heard
from megatron_resihp.integration.loop import preparing
from megatron_resihp.integration.loop.preparing import Preparation
from megatron_resihp.plan import ParallelPlan, Replica
from megatron_resihp.protocol.messages import GroupsPrepared, Message
from megatron_resihp.protocol.notices import PlanChange
from megatron_resihp.protocol.published import EpochPlan

LIMIT_S = 10.0
PLAN = ParallelPlan((Replica(((0, 1),), (0, 1)),))


class Worker:
    """A worker in epoch 3; its communicators are made of words.

    Attributes:
        may_go_on: groups are finished only then.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int = 0, epoch: int = 3) -> None:
        self.said: list[Message] = []
        self.discarded: list[int] = []
        self.may_go_on = threading.Event()
        self.error: Exception | None = None
        self.control: Any = SimpleNamespace(worker=number, epoch=epoch, tell=self.said.append)
        self.control.heard = Heard(number, lambda: None, epoch)
        communicators: Any = self
        needs: Any = "needs"
        self.preparation = Preparation(self.control, communicators, lambda plan: needs)

    def groups_ahead(self, change: int, plan_digest: str) -> Groups:
        assert plan_digest == PLAN.digest
        return Groups(self, change)

    def discard(self, groups: Groups) -> None:
        self.discarded.append(groups.change)

    def hear(self, number: int = 1, epoch: int = 3) -> None:
        self.preparation.begin(PlanChange(number, epoch, PLAN))

    def finish(self) -> None:
        self.may_go_on.set()
        if self.preparation._thread is not None:
            self.preparation._thread.join(LIMIT_S)
        assert self.preparation.is_over()

    def take(self, change: int | None) -> int | None:
        """The change whose groups are used."""
        groups: Any = self.preparation.take(EpochPlan(4, PLAN, None, {}, change))
        return None if groups is None else groups.change


class Groups:
    """Those of a change."""

    def __init__(self, worker: Worker, change: int) -> None:
        self.change = change
        self._worker = worker

    def make(self, needs: Any) -> None:
        assert needs == "needs" and self._worker.may_go_on.wait(LIMIT_S)
        if self._worker.error is not None:
            raise self._worker.error


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(monkeypatch)


def test_it_says_so_once_they_are_there(worker: Worker) -> None:
    assert worker.preparation.is_over(), "there is nothing to wait for"
    worker.hear()
    assert not worker.preparation.is_over() and not worker.said
    worker.finish()
    assert worker.said == [GroupsPrepared(0, 1)]
    assert worker.take(1) == 1 and not worker.discarded
    assert worker.take(1) is None, "once"


@pytest.mark.parametrize("published", [None, 2])
def test_unless_all_have_theirs_nobody_uses_them(worker: Worker, published: int | None) -> None:
    worker.hear()
    worker.finish()
    assert worker.take(published) is None
    assert worker.discarded == [1]


def test_the_next_epoch_waits_for_the_end_of_it(worker: Worker) -> None:
    """Or groups would come into being beside its own."""
    worker.hear()
    threading.Timer(0.05, worker.may_go_on.set).start()
    assert worker.take(None) is None
    assert worker.preparation.is_over() and worker.discarded == [1]


def test_who_can_not_make_them_holds_up_nobody(worker: Worker, capsys: pytest.CaptureFixture[str]) -> None:
    worker.error = OSError("too many open files")
    worker.hear()
    worker.finish()
    assert not worker.said and worker.take(None) is None
    assert worker.discarded == [1], "some may be there"
    assert capsys.readouterr().err == "resihp: worker 0 can't make groups ahead (OSError: too many open files)\n"


def test_a_change_of_another_epoch_is_none_of_ours(worker: Worker) -> None:
    worker.hear(epoch=2)
    assert worker.preparation._thread is None


def test_who_is_not_in_the_plan_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A joining worker hears of every change."""
    worker = Worker(monkeypatch, number=9, epoch=NO_EPOCH)
    worker.hear()
    worker.finish()
    assert not worker.said


def test_a_joining_worker_that_was_not_taken_in_makes_others_for_the_next_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker(monkeypatch, number=1, epoch=NO_EPOCH)
    worker.hear(1)
    worker.finish()
    worker.hear(2)
    worker.finish()
    assert worker.said == [GroupsPrepared(1, 1), GroupsPrepared(1, 2)] and worker.discarded == [1]
    assert worker.take(2) == 2


def test_a_change_does_not_wait_for_ever(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the next epoch; what comes later is of no use, and is given up in the end."""
    monkeypatch.setattr(preparing, "LONGEST_S", 0.0)
    worker.hear()
    assert worker.preparation.is_over() and worker.take(None) is None and not worker.discarded
    worker.finish()
    assert worker.take(None) is None and worker.discarded == [1]
