# SPDX-License-Identifier: Apache-2.0
"""Validations under way: whom to ask, when, and what follows from the answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_resihp.detector.input.observations import Layout
from megatron_resihp.detector.inquiry import PAUSE, Inquiries
from megatron_resihp.detector.relapses import PROVEN
from megatron_resihp.detector.validation import Suspicion
from megatron_resihp.protocol.notices import MatrixProduct, ValidationOrder

EPOCH = 3
LAYOUT = Layout(
    EPOCH, np.arange(4), np.zeros(4, np.int64), np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]), np.zeros(4, np.int64),
    np.array([[0, 2], [1, 3]]),
)  # fmt: skip
PAIR = Suspicion((0, 1), 0.4, 90, 100)
FAST, SLOW = [0.01] * 5, [0.02] * 5


@pytest.fixture
def inquiries() -> Inquiries:
    return Inquiries((128, 64, 32))


def test_suspects_multiply_and_nobody_sends(inquiries: Inquiries) -> None:
    """A worker whose device has no room for a message would end with it."""
    order = inquiries.ask([PAIR], EPOCH, 100)
    assert order == ValidationOrder(1, EPOCH, (MatrixProduct((0, 1), 128, 64, 32),))


def test_when_all_suspects_have_answered_the_culprit_is_known(inquiries: Inquiries) -> None:
    inquiries.ask([PAIR], EPOCH, 100)
    assert inquiries.answer(1, 0, FAST) == []
    assert inquiries.answer(1, 2, []) == [], "it only took part"
    ((suspicion, found),) = inquiries.answer(1, 1, SLOW)
    assert suspicion is PAIR and found == {1: pytest.approx(0.5)}


def test_nothing_else_is_asked_meanwhile_and_the_same_not_soon_again(inquiries: Inquiries) -> None:
    inquiries.ask([PAIR], EPOCH, 100)
    other = Suspicion((2, 3), 0.4, 95, 101)
    assert inquiries.ask([PAIR, other], EPOCH, 101) is None
    inquiries.answer(1, 0, FAST)
    inquiries.answer(1, 1, FAST)
    order = inquiries.ask([PAIR, other], EPOCH, 102)
    assert order is not None and order.gemms[0].workers == (2, 3)
    inquiries.drop()
    assert inquiries.ask([PAIR], EPOCH, 100 + PAUSE) is not None


def test_suspects_of_whom_nobody_is_named_are_asked_less_and_less_often(inquiries: Inquiries) -> None:
    asked = []
    for iteration in range(1000):
        if order := inquiries.ask([PAIR], EPOCH, iteration):
            asked.append(iteration)
            assert [inquiries.answer(order.number, worker, FAST) for worker in (0, 1)][-1] == [(PAIR, {})]
    assert np.diff(asked).tolist() == [PAUSE, 2 * PAUSE, 4 * PAUSE, 8 * PAUSE]
    worse = replace(PAIR, slowdown=0.6, since=900)
    assert inquiries.ask([worse], EPOCH, 1000) is not None, "it is asked about a change soon"


def test_answers_to_what_is_over_mean_nothing(inquiries: Inquiries) -> None:
    assert inquiries.answer(0, 0, FAST) == []
    inquiries.ask([PAIR], EPOCH, 100)
    inquiries.answer(1, 0, FAST)
    inquiries.drop()
    assert inquiries.answer(1, 1, SLOW) == []


def test_a_lost_answer_does_not_end_validation(inquiries: Inquiries) -> None:
    other = Suspicion((2, 3), 0.4, 95, 101)
    inquiries.ask([PAIR], EPOCH, 100)
    inquiries.answer(1, 0, FAST)
    assert inquiries.ask([PAIR, other], EPOCH, 100 + PAUSE - 1) is None
    order = inquiries.ask([PAIR, other], EPOCH, 100 + PAUSE)
    assert order is not None and order.gemms[0].workers == (0, 1, 2, 3)
    assert inquiries.answer(1, 1, SLOW) == [], "it answers what is over"


def test_a_worker_without_work_waits_whoever_is_asked_beside_it(inquiries: Inquiries) -> None:
    inquiries.ask([Suspicion((3, 0), 0.4, 90, 100, idle=True)], EPOCH, 100)
    inquiries.drop()
    assert inquiries.ask([Suspicion((3, 1), 0.4, 90, 101, idle=True)], EPOCH, 101) is None


def test_each_time_that_a_worker_only_looks_well_it_is_asked_later(inquiries: Inquiries) -> None:
    idle, pauses = Suspicion((3, 0), 0.4, 90, 100, idle=True), []
    for _ in range(3):
        inquiries.relapses.believe(3)
        inquiries.relapses.worked(LAYOUT)
        inquiries.relapsed(3, 1000)
        pauses.append(next(n for n in range(1000) if inquiries.ask([idle], EPOCH, 1000 + n)))
        inquiries.drop()
    assert pauses == [2 * PAUSE, 4 * PAUSE, 8 * PAUSE]


def test_who_has_worked_well_for_long_was_well(inquiries: Inquiries) -> None:
    for _ in range(2):
        inquiries.relapses.believe(3)
        for _ in range(PROVEN + 1):
            inquiries.relapses.worked(LAYOUT)
        assert inquiries.relapsed(3, 1000) == 0
    assert inquiries.relapsed(2, 1000) == 0, "it has never been without work"
