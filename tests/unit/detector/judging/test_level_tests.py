# SPDX-License-Identifier: Apache-2.0
"""A slow unit recovers, becomes slower or faster, or stays as it is, by its residuals alone."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_resihp.detector.judging.level_tests import LevelChange, UnitNoise, recovery, severity
from megatron_resihp.detector.verdict import Change

SMALLEST = 0.03
NOISE = UnitNoise(variance=1e-4, drift=1e-6, clip=0.06)


def newest_first(*parts: tuple[float, int]) -> np.ndarray:
    """A series of levels and how long each lasted, the oldest first, with a ripple of a standard deviation."""
    levels = np.concatenate([np.full(rows, level) for level, rows in parts])
    return (levels + 0.01 * np.where(np.arange(levels.size) % 2, 1.0, -1.0))[::-1]


@pytest.mark.parametrize("rows", [3, 5, 8])
def test_a_unit_that_is_healthy_again_has_recovered(rows: int) -> None:
    series = newest_first((0.4, 20), (0.0, rows))
    found = recovery(series, 0.4, NOISE, SMALLEST, NOISE)
    assert found is not None and (found.change, found.rows, found.faded) == (Change.RECOVERY, rows, False)


def test_a_level_between_is_no_recovery() -> None:
    found = recovery(newest_first((0.6, 20), (0.2, 6)), 0.6, NOISE, SMALLEST, NOISE)
    assert found is None or found.change is Change.SEVERITY


def test_a_slowness_that_fades_ends_where_nothing_is_left_of_it() -> None:
    assert recovery(newest_first((0.005, 32)), 0.4, NOISE, SMALLEST, NOISE) == LevelChange(
        Change.RECOVERY, 32, 32, faded=True
    )
    assert recovery(newest_first((0.005, 31)), 0.05, NOISE, SMALLEST, NOISE) is None, (
        "not all that are kept are known to be"
    )


@pytest.mark.parametrize(("now", "expected"), [(0.6, Change.SEVERITY), (0.25, Change.SEVERITY), (0.41, None)])
def test_another_degree_of_slowness_is_found_where_it_is_much(now: float, expected: Change | None) -> None:
    found = severity(newest_first((0.4, 16), (now, 8)), 0.4, NOISE, SMALLEST)
    assert (found and found.change) == expected
    assert found is None or found.rows == 8


def test_a_level_that_crept_away_from_what_was_told_is_found() -> None:
    found = severity(newest_first((0.6, 32)), 0.4, NOISE, SMALLEST)
    assert found is not None and found.change is Change.SEVERITY
    assert severity(newest_first((0.41, 32)), 0.4, NOISE, SMALLEST) is None
