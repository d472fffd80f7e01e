# SPDX-License-Identifier: Apache-2.0
"""Bursts count as slowness where they are new, and hiccups that a unit has always had do not."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_resihp.detector.judging.bursts import ITERATIONS, WINDOWS, Bursts

WARM_UP = 50


def bursts_of(units: int) -> Bursts:
    bursts = Bursts(units)
    bursts.budget(0.01, 1000, units)
    return bursts


def told(bursts: Bursts, lost: np.ndarray) -> np.ndarray:
    """[iterations, units] residuals where outliers have cost this much, and nothing else is slow."""
    return np.array([bursts.residuals(np.zeros(row.size), row) for row in lost])


@pytest.mark.parametrize("who", [[5], list(range(16))])
def test_hiccups_that_a_unit_has_always_had_are_no_bursts(who: list[int]) -> None:
    lost = np.zeros((900, 16))
    lost[:, who] = np.where(np.random.default_rng(1).random((900, len(who))) < 0.4, 0.2, 0.05)
    assert not told(bursts_of(16), lost)[WARM_UP:].any()


def test_bursts_are_found_at_once_where_there_were_none() -> None:
    lost = np.zeros((WARM_UP + ITERATIONS, 16))
    lost[WARM_UP:, 5] = 0.3
    assert told(bursts_of(16), lost)[-1].tolist() == lost[-1].tolist()


@pytest.mark.parametrize("usual", [0.05, 0.15, 0.3])
def test_bursts_are_found_where_hiccups_are_frequent(usual: float) -> None:
    """The more often they are, the more iterations it takes."""
    lost = np.where(np.random.default_rng(2).random((300, 16)) < usual, 0.2, 0.0)
    lost[200:, 3] = 0.7
    found = told(bursts_of(16), lost)
    assert not found[WARM_UP:200].any()
    assert found[200 + max(WINDOWS), 3] == lost[-1, 3] and not found[WARM_UP:, :3].any()


def test_losses_that_are_usual_are_not_added_to_a_speed() -> None:
    lost = np.where(np.random.default_rng(3).random((300, 16)) < np.where(np.arange(16) == 5, 0.4, 0.0), 0.2, 0.0)
    bursts = bursts_of(16)
    told(bursts, lost)
    assert not bursts.untold.any()
    told(bursts, np.tile(np.where(np.arange(16) == 4, 0.2, 0.0), (ITERATIONS // 2, 1)))
    assert bursts.untold[: ITERATIONS // 2, 4].tolist() == [0.2] * (ITERATIONS // 2)


def test_bursts_from_the_start_that_others_do_not_have_are_found() -> None:
    lost = np.tile(np.where(np.arange(8) == 5, 0.3, 0.0), (ITERATIONS, 1))
    assert told(bursts_of(8), lost)[-1].tolist() == lost[-1].tolist()


def test_stops_that_are_known_are_bursts_when_they_are_not_known_any_more() -> None:
    bursts = bursts_of(16)
    told(bursts, np.zeros((WARM_UP, 16)))
    lost = np.where(np.arange(16) == 5, 0.3, 0.0)
    for number in range(ITERATIONS + 1):
        stopped = (lost > 0) & (number < ITERATIONS)
        assert bursts.residuals(np.zeros(16), lost, stopped=stopped).tolist() == lost.tolist()


@pytest.mark.parametrize(("units", "who"), [(1, [0]), (2, [1]), (4, [2, 3]), (4, [1, 2, 3])])
def test_bursts_are_found_where_few_units_have_none(units: int, who: list[int]) -> None:
    lost = np.zeros((WARM_UP + ITERATIONS, units))
    lost[WARM_UP:, who] = 0.7
    assert told(bursts_of(units), lost)[-1].tolist() == lost[-1].tolist()


def test_small_bursts_of_one_of_two_units_are_found() -> None:
    lost = np.zeros((WARM_UP + ITERATIONS, 2))
    lost[WARM_UP:, 1] = 0.18
    assert told(bursts_of(2), lost)[-1].tolist() == lost[-1].tolist()


def test_bursts_stay_known_where_units_get_other_numbers() -> None:
    bursts = bursts_of(8)
    lost = np.zeros((WARM_UP + ITERATIONS, 8))
    lost[WARM_UP:, 5] = 0.3
    told(bursts, lost)
    bursts.move(np.array([5, -1, 2]))
    assert bursts.residuals(np.zeros(3), np.full(3, 0.3)).tolist() == [0.3, 0.0, 0.0]
