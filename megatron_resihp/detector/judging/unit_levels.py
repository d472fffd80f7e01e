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

from megatron_resihp.detector.judging.common_mode import Places, job_level, peer_medians, stage_levels
from megatron_resihp.detector.judging.faster import Faster
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
        excess: how slow it was, log of the ratio of times; below 0 if it was faster than its level.
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
        smallest: smallest slowdown to report, log of the ratio of times.

    Attributes:
        level: [units] healthy levels.
        offset: [families, units] drift from them.
        slow: [units] whether a unit is slow.
        excess: [units] how slow it is, log of the ratio of times.
        first_excess: [units] the same, when that was found.
        began: [units] the iteration from which it is.
        of_stage: [units] how much the work of the unit's stage has changed in the last iteration that was `centred`.
        faster: which healthy units are faster than their levels.
    """

    def __init__(self, level: NDArray[np.float64], slow: NDArray[np.bool_], began: int, smallest: float) -> None:
        units = level.size
        self.level, self.slow = level, slow.copy()
        self.offset = np.zeros((FAMILIES, units))
        self.excess = np.zeros(units)
        self.first_excess = np.zeros(units)
        self.began = np.where(slow, began, 0)
        self.of_stage = np.zeros(units)
        self.faster = Faster(units, smallest)
        self._smallest = smallest

    def healthy(self) -> NDArray[np.float64]:
        """[units] log of the device's own healthy level relative to the prediction."""
        return self.level + self.offset[JOB]

    def faster_than_job(self) -> NDArray[np.float64]:
        """[units] how much faster units have been for long than all healthy units have at least, 0 or below."""
        healthy = self.faster.level[~self.slow]
        return np.minimum(self.faster.level - healthy.max(), 0.0) if healthy.size else self.faster.level

    def without_stage(self, residuals: NDArray[np.float64], places: Places) -> NDArray[np.float64]:
        """[units] residuals relative to the prediction, without what their stage's work has added; see `of_stage`."""
        own = residuals - self.healthy()
        usable = np.isfinite(own) & ~self.slow
        own = own - job_level(own, usable)
        self.of_stage = stage_levels(own, usable, places, self._smallest / 2)
        return residuals - self.of_stage

    def centred(self, residuals: NDArray[np.float64], node: NDArray[np.int64]) -> NDArray[np.float64]:
        """[families, units] residuals without the part that the node or the job shares.

        Args:
            residuals: [units] of `without_stage`, NaN where unknown.
            node: [units] number of the node.
        """
        residuals = residuals - self.level
        known = np.isfinite(residuals)
        healthy = known & ~self.slow
        as_usual = healthy & ~self.faster.now
        usable = next((each for each in (as_usual, healthy) if each.any()), known)
        shared = residuals - self.faster_than_job()
        job = residuals - job_level(shared - self.offset[JOB], usable)
        return np.stack([residuals - peer_medians(shared, usable, node), job])

    def drift(self, change: NDArray[np.float64] | float) -> None:
        """Let the healthy levels follow drift, [families, units]."""
        self.offset = np.clip(self.offset + change, -FARTHEST_DRIFT, FARTHEST_DRIFT)

    def known(self) -> list[Known]:
        """What is known of each unit, for `move` when the unit comes back."""
        beyond = np.where(self.slow, self.excess, self.faster.level)
        return [
            Known(float(self.level[unit]), self.offset[:, unit].copy(), bool(self.slow[unit]),
                  float(beyond[unit]), int(self.began[unit]))
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
        self.of_stage = np.zeros(source.size)
        for name in ("level", "offset", "slow", "excess", "first_excess", "began"):
            setattr(self, name, moved(getattr(self, name), source))
        self.faster.move(source)
        self.level = np.where(present, self.level, level)
        for unit, known in returning.items():
            self.level[unit], self.offset[:, unit] = known.level, known.offset
            self.slow[unit], self.began[unit] = known.slow, known.began
            if known.slow:
                self.excess[unit] = self.first_excess[unit] = known.excess
            else:
                self.faster.level[unit] = known.excess
        new = slow & ~present
        new[list(returning)] = False
        self.slow |= new
        self.began[new] = began
        return new
