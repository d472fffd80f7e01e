# SPDX-License-Identifier: Apache-2.0
"""Distributes whole units of work so that the last finish time is least, as an integer program. Imports scipy."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

Kind = tuple[float, float, int]
"""Slope, offset and upper limit."""


def least_maximum(
    slopes: Sequence[float], offsets: Sequence[float], most: Sequence[int], total: int, least: int = 0
) -> list[int] | None:
    """Integers x with Σ x = total and least ≤ x ≤ most that minimise max(slope · x + offset).

    All x with the same slope, offset and limit share one variable of the program, the largest of them. So the solver
    does not search their permutations: Σ count · largest ≥ total. The excess is then taken from the steepest.

    Args:
        slopes: above 0.
        offsets, most: offset and upper limit of each x.
        total: sum of all x.
        least: lower limit of each x.

    Returns:
        x, or None if no such x exists.
    """
    if len(slopes) * least > total or min(most, default=0) < least or sum(most) < total:
        return None
    each = list(zip(slopes, offsets, (min(limit, total) for limit in most), strict=True))
    alike = Counter(each)
    largest = dict(zip(alike, _largest(tuple(alike.items()), total, least), strict=True))
    found = [largest[key] for key in each]
    surplus = sum(found) - total
    for place in sorted(range(len(found)), key=lambda place: -slopes[place]):
        taken = min(surplus, found[place] - least)
        found[place] -= taken
        surplus -= taken
    return found


@lru_cache(maxsize=4096)
def _largest(kinds: tuple[tuple[Kind, int], ...], total: int, least: int) -> tuple[int, ...]:
    """The x of each kind that minimise the maximum, with Σ count · x ≥ total; `kinds` gives kinds and their counts."""
    if len(kinds) == 1:
        return (-(-total // kinds[0][1]),)
    slope, offset, most = np.array([kind for kind, _ in kinds], np.float64).T
    rows = np.hstack([np.diag(slope / slope.max()), np.full((len(kinds), 1), -1.0)])
    result = milp(
        np.append(np.zeros(len(kinds)), 1.0),
        constraints=[
            LinearConstraint(rows, ub=-offset / slope.max()),
            LinearConstraint(np.array([[*(float(count) for _, count in kinds), 0.0]]), lb=total),
        ],
        bounds=Bounds(np.append(np.full(len(kinds), least), -np.inf), np.append(most, np.inf)),
        integrality=np.append(np.ones(len(kinds)), 0.0),
        options={"mip_rel_gap": 0.0},
    )
    return tuple(round(value) for value in result.x[:-1])
