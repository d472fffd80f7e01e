# SPDX-License-Identifier: Apache-2.0
"""What the coordinator has published is deleted in time, and nobody misses it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from protocol_examples import PLAN
from served import serving

from megatron_resihp.control import keys
from megatron_resihp.control.coordination.bulletin import ANSWERS_KEPT, Bulletin
from megatron_resihp.control.transport.store.client import StoreClient
from megatron_resihp.control.transport.store.reader import LOOK_BACK_S, NoticeReader
from megatron_resihp.control.transport.store.wire import Op
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.protocol.answers import Accepted
from megatron_resihp.protocol.notices import (
    EpochIsBroken,
    JobEnds,
    Notice,
    PlanChange,
    SlownessChanged,
    WorkersGivenUp,
)
from megatron_resihp.protocol.published import EpochPlan, Go

READ_S = 10.0
FOUR_STAGES = ParallelPlan.from_dict(PLAN)
GIVEN_UP = WorkersGivenUp((7,), "silent")


@pytest.fixture
def store() -> Iterator[StoreClient]:
    with serving() as served:
        yield served.connect()


class Job:
    """Epochs one after the other, as far as the store sees them: every second one after a change by choice."""

    def __init__(self, store: StoreClient) -> None:
        self.store = store
        self.bulletin = Bulletin(store)
        self.epoch = 0
        self._begin()

    def next_epoch(self, *notices: Notice) -> None:
        for notice in notices:
            self.bulletin.notify(notice)
        if self.epoch % 2:
            self.bulletin.notify(PlanChange(self.epoch, self.epoch, FOUR_STAGES))
            self._meet(keys.groups_of_change(self.epoch))
        else:
            self.bulletin.notify(EpochIsBroken(self.epoch, "a death"))
        self.epoch += 1
        self._begin()

    def keys(self) -> int:
        return int(self.store.connection.ask(Op.COUNT).value)

    def _begin(self) -> None:
        self.bulletin.decide(EpochPlan(self.epoch, FOUR_STAGES, None))
        self._meet(keys.groups_of_epoch(self.epoch))
        self.bulletin.go(Go(self.epoch, ()))

    def _meet(self, groups: str) -> None:
        for rank in range(4):
            self.store.set(f"{keys.TORCH}{groups}digest/world/{rank}", "where it listens")


def heard(reader: NoticeReader, until: Notice) -> list[Notice]:
    """What a reader hears, up to that notice."""
    found: list[Notice] = []
    for _ in range(100):
        if (notice := reader.next(0.0)) is not None:
            found.append(notice)
        if notice == until:
            return found
    raise AssertionError(f"{until} is not among {found}")


LAST = JobEnds(0, "finished")


def test_a_hundred_epochs_take_no_more_keys_than_a_few(store: StoreClient) -> None:
    job = Job(store)
    job.bulletin.notify(GIVEN_UP)
    counts = []
    for _ in range(100):
        job.next_epoch()
        counts.append(job.keys())
    assert max(counts[10:]) == max(counts[:10]) < 30


def test_members_find_what_they_may_still_look_for(store: StoreClient) -> None:
    job = Job(store)
    for _ in range(11):
        job.next_epoch()
    member = f"{keys.TORCH}{keys.groups_of_epoch(11)}digest/world/0"
    assert store.check(keys.plan_key(11)) and store.check(keys.go_key(11)) and store.check(member)
    assert store.check(keys.plan_key(0)), "joining workers start in it"
    assert not store.check(keys.plan_key(10)) and not store.check(keys.go_key(10)), "they have all left epoch 10"


def test_groups_that_a_plan_runs_in_stay_as_long_as_it_runs(store: StoreClient) -> None:
    job = Job(store)
    for _ in range(2):
        job.next_epoch()
    group = f"{keys.TORCH}{keys.groups_of_change(1)}digest/world/0"
    assert store.check(group), "epoch 2 runs in it"
    job.next_epoch()
    assert not store.check(group)


def test_who_comes_late_hears_what_still_holds(store: StoreClient) -> None:
    job = Job(store)
    job.next_epoch(GIVEN_UP, SlownessChanged(True, ((1, 0.5),)))
    for _ in range(9):
        job.next_epoch(SlownessChanged(True, ((2, 0.5),)))
    job.bulletin.notify(LAST)
    found = heard(NoticeReader(store.clone(), "agent 9", READ_S), LAST)
    assert GIVEN_UP in found and SlownessChanged(True, ((2, 0.5),)) in found
    assert SlownessChanged(True, ((1, 0.5),)) not in found
    changes = [notice for notice in found if isinstance(notice, EpochIsBroken | PlanChange)]
    assert [notice.epoch for notice in changes] == [9], "of the last epoch that ended"


def test_who_was_away_for_some_epochs_goes_on_hearing(store: StoreClient) -> None:
    job = Job(store)
    reader = NoticeReader(store.clone(), "agent 0", READ_S)
    job.next_epoch()
    heard(reader, EpochIsBroken(0, "a death"))
    for _ in range(7):
        job.next_epoch()
    job.next_epoch(GIVEN_UP)
    job.next_epoch()
    job.bulletin.notify(LAST)
    assert not store.check(keys.notice_key(1)), "the next one for it is gone"
    assert reader.next(0.0) is None
    reader._silent_s = LOOK_BACK_S
    assert reader.next(0.0) is None
    assert GIVEN_UP in heard(reader, LAST)


def test_answers_that_nobody_fetches_do_not_pile_up(store: StoreClient) -> None:
    bulletin = Bulletin(store)
    for number in range(2 * ANSWERS_KEPT):
        bulletin.answer(f"{keys.ANSWERS}{number}", Accepted("it is done"))
    assert int(store.connection.ask(Op.COUNT).value) == ANSWERS_KEPT
    assert store.check(f"{keys.ANSWERS}{2 * ANSWERS_KEPT - 1}")
    bulletin.answer("end", Accepted("a forged end"))
    assert not store.check("end")
