# SPDX-License-Identifier: Apache-2.0
"""Small hold-ups are added up and told now and then, large ones at once."""

from __future__ import annotations

from megatron_resihp.detector.judging.held_up import HeldUp
from megatron_resihp.detector.notices import Notice, What


def test_small_ones_are_told_when_what_they_have_cost_has_grown_tenfold() -> None:
    held_up, told = HeldUp(), []
    for iteration in range(1, 20 * 60 * 24):  # 20 a minute for a day
        told += held_up.add(Notice(What.DATA, (iteration % 2,), 0.042, iteration))
    assert [event.iteration for event in told] == [24, 239, 2381, 23810]
    assert [event.workers for event in told] == [(0, 1)] * 4
    assert [round(event.total_s) for event in told] == [1, 10, 100, 1000]
    assert round(held_up.totals()["data"]) == round(0.042 * 28799)


def test_a_much_longer_one_is_told_at_once() -> None:
    held_up = HeldUp()
    for iteration in range(30):
        held_up.add(Notice(What.DATA, (1,), 0.042, iteration))
    (event,) = held_up.add(Notice(What.DATA, (3,), 4.0, 30))
    assert (event.seconds, event.iteration, event.times) == (4.0, 30, 31)
    assert held_up.add(Notice(What.DATA, (3,), 4.0, 31)) == []
    assert held_up.add(Notice(What.WORK_OF_A_STAGE, (3,), 2.0, 32)), "each kind by itself"
