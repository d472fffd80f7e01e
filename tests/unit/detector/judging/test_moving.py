# SPDX-License-Identifier: Apache-2.0
"""What is remembered of workers and links without work, in jobs that change their plan often."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_resihp.detector.judging.moving import EPOCHS, Idle, sources
from megatron_resihp.detector.judging.unit_levels import Known
from megatron_resihp.detector.judging.units import Members

UNITS = 40


def tracker(units: list[Members], slow: Members | None = None) -> Any:
    """Knows that these are healthy, but for one."""
    known = [Known(0.0, np.zeros(2), each == slow, 0.0, 1) for each in units]
    return SimpleNamespace(levels=SimpleNamespace(known=lambda: known))


def of_epoch(number: int) -> list[Members]:
    """Pairs that no other epoch has."""
    return [(1000 * number + place, 1000 * number + place + 1) for place in range(UNITS)]


def moved(epochs: int, slow: Members | None = None) -> Idle:
    idle: Idle = {}
    for number in range(epochs):
        before = of_epoch(number)
        sources(before, of_epoch(number + 1), tracker(before, slow), idle)
    return idle


def test_what_no_plan_has_used_for_long_is_forgotten() -> None:
    idle = moved(100)
    assert len(idle) == EPOCHS * UNITS
    assert list(idle) == [each for number in range(100 - EPOCHS, 100) for each in of_epoch(number)]


def test_who_was_slow_is_not_forgotten() -> None:
    slow = of_epoch(0)[3]
    assert moved(100, slow)[slow].slow


def test_who_comes_back_in_time_is_known() -> None:
    idle, back = moved(EPOCHS + 50), of_epoch(50)
    now = of_epoch(EPOCHS + 50)
    _, returning = sources(now, back, tracker(now), idle)
    assert sorted(returning) == list(range(UNITS)) and not set(back) & idle.keys()


def test_an_epoch_without_links_forgets_none() -> None:
    links = [(0, 1), (2, 3)]
    idle: Idle = {}
    sources(links, [], tracker(links), idle)
    for _ in range(100):
        sources([], [], tracker([]), idle)
    assert list(idle) == links
