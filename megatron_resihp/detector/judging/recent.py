# SPDX-License-Identifier: Apache-2.0
"""The newest residuals of many units, each since its level last changed. Imports numpy and this package."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.judging.noise import FAR
from megatron_resihp.detector.judging.sequential import FAMILIES, LONGEST, REFRESH

KEPT: Final = LONGEST + REFRESH + max(FAR)


class RecentResiduals:
    """A few hundred numbers per unit.

    Attributes:
        values: [KEPT, families, units] residuals, newest first.
        count: [families, units] how many of them came since the unit's level last changed.
    """

    def __init__(self, units: int) -> None:
        self.values = np.zeros((KEPT, FAMILIES, units))
        self.count = np.zeros((FAMILIES, units), dtype=np.int64)
        self._when = np.zeros((KEPT, FAMILIES, units), dtype=np.int64)
        self._unlearned = np.zeros((FAMILIES, units), dtype=np.int64)

    def push(self, centred: NDArray[np.float64], iteration: int) -> None:
        """Put residuals, [families, units], in front of the older ones, for units that have one."""
        arriving = np.isfinite(centred)
        for store, newest in ((self.values, centred), (self._when, iteration)):
            if arriving.all():
                store[1:] = store[:-1]
                store[0] = newest
            else:
                moved = np.concatenate([np.broadcast_to(newest, (1, *arriving.shape)), store[:-1]])
                np.copyto(store, moved, where=arriving, casting="unsafe")
        self.count = np.minimum(self.count + arriving, KEPT)
        self._unlearned = np.minimum(self._unlearned + arriving, REFRESH)

    def iteration(self, family: int, unit: int, rows: int) -> int:
        """The iteration of the unit's residual that many rows ago, the newest one included."""
        return int(self._when[min(rows, KEPT) - 1, family, unit])

    def series(self, family: int, unit: int) -> NDArray[np.float64]:
        """The unit's residuals since its level last changed, newest first, at most LONGEST."""
        return self.values[: min(self.count[family, unit], LONGEST), family, unit]

    def forget_before(self, unit: int, since: int) -> None:
        """Keep only the unit's residuals from this iteration on."""
        for family in range(FAMILIES):
            when = self._when[: self.count[family, unit], family, unit]
            self.count[family, unit] = int((when >= since).sum())

    def keep(self, unit: int, rows: int) -> None:
        """Keep only that many of the unit's residuals."""
        self.count[:, unit] = np.minimum(self.count[:, unit], rows)

    def take_old(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which residuals have become too old for any test and were not taken before.

        Returns:
            [REFRESH, families, units] for rows from LONGEST on, and [lags, REFRESH, families, units] for which of them
            one as many rows older as each lag of FAR is known.
        """
        row = np.arange(REFRESH)[:, None, None]
        old = (row < self._unlearned) & (row + LONGEST < self.count)
        self._unlearned[:] = 0
        return old, np.stack([row + LONGEST + lag < self.count for lag in FAR])

    def valid(self) -> NDArray[np.bool_]:
        """[KEPT, families, units] whether a residual came since the unit's level last changed."""
        return np.arange(KEPT)[:, None, None] < self.count

    def move(self, source: NDArray[np.int64]) -> None:
        """Go on with other units; `source` gives each one's number before, or -1 if it is new."""
        self.values, self._when = moved(self.values, source), moved(self._when, source)
        self.count, self._unlearned = moved(self.count, source), moved(self._unlearned, source)


def moved(values: NDArray[Any], source: NDArray[np.int64]) -> NDArray[Any]:
    """Columns of the last axis by number; zeros for -1."""
    return np.concatenate([values, np.zeros_like(values, shape=(*values.shape[:-1], 1))], axis=-1)[..., source]
