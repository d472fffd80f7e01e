# SPDX-License-Identifier: Apache-2.0
"""Each unit has its own newest residuals, with the iterations from which they come."""

from __future__ import annotations

import numpy as np

from megatron_resihp.detector.judging.recent import RecentResiduals
from megatron_resihp.detector.judging.sequential import FAMILIES, LONGEST


def filled(*rows: tuple[float, float]) -> RecentResiduals:
    """Of two units; NaN where a unit has no residual."""
    recent = RecentResiduals(2)
    for iteration, row in enumerate(rows, start=1):
        recent.push(np.tile(row, (FAMILIES, 1)), iteration)
    return recent


def test_a_unit_without_a_residual_keeps_its_older_ones_in_place() -> None:
    recent = filled((1.0, 10.0), (2.0, np.nan), (3.0, 30.0))
    assert recent.series(0, 0).tolist() == [3.0, 2.0, 1.0]
    assert recent.series(0, 1).tolist() == [30.0, 10.0]
    assert (recent.iteration(0, 0, 2), recent.iteration(0, 1, 2)) == (2, 1)


def test_residuals_of_an_earlier_level_are_forgotten_for_that_unit_alone() -> None:
    recent = filled((1.0, 10.0), (2.0, 20.0), (3.0, 30.0))
    recent.forget_before(0, since=3)
    recent.keep(1, rows=2)
    assert recent.series(0, 0).tolist() == [3.0] and recent.series(1, 1).tolist() == [30.0, 20.0]


def test_each_residual_is_learned_from_once_when_no_test_needs_it_any_more() -> None:
    recent = filled(*[(1.0, 1.0)] * LONGEST)
    assert not recent.take_old()[0].any(), "all are in some window"
    for iteration in range(3):
        recent.push(np.ones((FAMILIES, 2)), LONGEST + iteration)
    assert recent.take_old()[0].sum(axis=0).tolist() == [[3, 3], [3, 3]]
    assert not recent.take_old()[0].any()


def test_units_move_with_their_residuals() -> None:
    recent = filled((1.0, 10.0), (2.0, 20.0))
    recent.move(np.array([1, -1, 0]))
    assert [recent.series(0, unit).tolist() for unit in range(3)] == [[20.0, 10.0], [], [2.0, 1.0]]
