# SPDX-License-Identifier: Apache-2.0
"""What is known of many units: their levels, their drift, and which of them are slow. Imports numpy and this package.

Each unit has residuals of two families. NODE is relative to the median of its node's other units, which removes noise
that the node shares. JOB is relative to the job's level only, which shows a node that is slow as a whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.judging.common_mode import job_level, peer_medians
from megatron_resihp.detector.judging.recent import moved
from megatron_resihp.detector.judging.sequential import FAMILIES

NODE, JOB = range(FAMILIES)
FARTHEST_DRIFT: Final = 0.02
"""Largest drift from warm-up's level; a device that keeps slowing down is not drifting."""


@dataclass(frozen=True)
class Known:
    """What stays known of a unit without work.

    Attributes:
        level: its healthy level.
        offset: [families] its drift from that level.
        slow: whether it was slow.
        excess: how slow it was, log of the ratio of times.
        began: the iteration from which it was slow.
    """

    level: float
    offset: NDArray[np.float64]
    slow: bool
    excess: float
    began: int


class UnitLevels:
    """The units of one tracker.

    Args:
        level, slow: the result of `healthy_levels`.
        began: iteration from which the slow ones are slow.

    Attributes:
        level: [units] healthy levels.
        offset: [families, units] drift from them.
        slow: [units] whether a unit is slow.
        excess: [units] how slow it is, log of the ratio of times.
        first_excess: [units] the same, when that was found.
        began: [units] the iteration from which it is.
    """

    def __init__(self, level: NDArray[np.float64], slow: NDArray[np.bool_], began: int) -> None:
        units = level.size
        self.level, self.slow = level, slow.copy()
        self.offset = np.zeros((FAMILIES, units))
        self.excess = np.zeros(units)
        self.first_excess = np.zeros(units)
        self.began = np.where(slow, began, 0)

    def healthy(self) -> NDArray[np.float64]:
        """[units] log of the device's own healthy level relative to the prediction."""
        return self.level + self.offset[JOB]

    def centred(self, residuals: NDArray[np.float64], group: NDArray[np.int64]) -> NDArray[np.float64]:
        """[families, units] residuals without the part that the node or the job shares.

        Args:
            residuals: [units] relative to the prediction, NaN where unknown.
            group: [units] number of the node.
        """
        residuals = residuals - self.level
        known = np.isfinite(residuals)
        healthy = known & ~self.slow
        usable = healthy if healthy.any() else known
        job = residuals - job_level(residuals - self.offset[JOB], usable)
        return np.stack([residuals - peer_medians(residuals, usable, group), job])

    def drift(self, change: NDArray[np.float64] | float) -> None:
        """Let the healthy levels follow drift, [families, units]."""
        self.offset = np.clip(self.offset + change, -FARTHEST_DRIFT, FARTHEST_DRIFT)

    def known(self) -> list[Known]:
        """What is known of each unit, for `move` when the unit comes back."""
        return [
            Known(float(self.level[unit]), self.offset[:, unit].copy(), bool(self.slow[unit]),
                  float(self.excess[unit]), int(self.began[unit]))
            for unit in range(self.level.size)
        ]  # fmt: skip

    def move(
        self, source: NDArray[np.int64], returning: Mapping[int, Known], level: NDArray[np.float64],
        slow: NDArray[np.bool_], began: int,
    ) -> NDArray[np.bool_]:  # fmt: skip
        """Go on with other units in another order; returns which of the new ones are slow, [new units].

        Args:
            source: [new units] the unit's number before, or -1 if it had no work.
            returning: what was known of units that had no work, by their number.
            level, slow, began: as in the constructor.
        """
        present = source >= 0
        for name in ("level", "offset", "slow", "excess", "first_excess", "began"):
            setattr(self, name, moved(getattr(self, name), source))
        self.level = np.where(present, self.level, level)
        for unit, known in returning.items():
            self.level[unit], self.offset[:, unit] = known.level, known.offset
            self.slow[unit], self.began[unit] = known.slow, known.began
            self.excess[unit] = self.first_excess[unit] = known.excess
        new = slow & ~present
        new[list(returning)] = False
        self.slow |= new
        self.began[new] = began
        return new
