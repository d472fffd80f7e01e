# SPDX-License-Identifier: Apache-2.0
"""Chooses how many layers each stage runs, the same in all replicas: ResiHP's PP step.

Imports numpy, `cost` and this package.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.cost.job import Array, JobCost

Booleans = NDArray[np.bool_]


@dataclass(frozen=True)
class Lane:
    """A stage's group in one replica.

    Attributes:
        degree: number of members; 0 if the group is empty.
        speed: p of the slowest member.
    """

    degree: int
    speed: float


@dataclass(frozen=True, eq=False)
class Ranges:
    """Costs of layers first, …, end − 1 on a member of a healthy group, each [layers + 1 (first), layers + 1 (end)].

    Attributes:
        seconds: of F, B and W of a micro-batch.
        state, kept, working: bytes; see `cost.memory.LayerBytes`.
    """

    seconds: Array
    state: Array
    kept: Array
    working: Array


def ranges(cost: JobCost, degree: int, copies: int) -> Ranges:
    """Costs of all ranges of layers, for groups of a degree."""
    size = cost.bytes(degree, copies)
    working = np.zeros((cost.layers + 1, cost.layers + 1))
    for first in range(cost.layers):
        working[first, first + 1 :] = np.maximum.accumulate(size.working[first:])
    return Ranges(_sums(cost.seconds(degree).sum(axis=0)), _sums(size.state), _sums(size.kept), working)


def _sums(each: Array) -> Array:
    total = np.concatenate([[0.0], np.cumsum(each)])
    sums: Array = total[np.newaxis, :] - total[:, np.newaxis]
    return sums


class Partitioner:
    """Splits a job's layers over stages; each stage has one lane per replica."""

    def __init__(self, cost: JobCost) -> None:
        self._cost = cost
        self._ranges: dict[tuple[int, int], Ranges] = {}

    def room(self, degree: int, copies: int, first: int, end: int) -> int:
        """Micro-batches whose activations of layers first, …, end − 1 fit beside the layers' state; 0 if none does."""
        costs = self._of(degree, copies)
        left = self._memory - costs.state[first, end] - costs.working[first, end]
        kept = costs.kept[first, end]
        if left < kept or left < 0:
            return 0
        return int(min(left // kept, self._cost.micro_batches)) if kept > 0 else self._cost.micro_batches

    def split(
        self, stages: Sequence[Sequence[Lane]], in_flight: Sequence[int], near: Sequence[int]
    ) -> list[int] | None:
        """Where each stage's layers end so that the slowest stage is as fast as possible.

        The lanes of a stage share its work by their speeds, if the layers fit them. Of equally good splits, the ends
        nearest to those given win.

        Source: ResiHP, arXiv 2605.06374, PP adaptation: (4, 4, 4) → (5, 2, 5). Where the text leaves it open: the split
        balances the layers' own costs, embedding and head included; and a stage goes on without the lanes whose memory
        is too small.

        Args:
            stages: the lanes of each stage.
            in_flight: for each stage, how many micro-batches' activations must fit.
            near: where the stages end now.

        Returns:
            ends, one for each stage; None if no split fits.
        """
        seconds = [self._stage_seconds(lanes, count) for lanes, count in zip(stages, in_flight, strict=True)]
        best = self._least(seconds, np.maximum)
        if best is None:
            return None
        limit = max(table[pair] for table, pair in zip(seconds, _pairs(best), strict=True)) * (1 + 1e-9)
        moved = [
            np.where(table <= limit, np.abs(np.arange(table.shape[1]) - end), np.inf)
            for table, end in zip(seconds, near, strict=True)
        ]
        return self._least(moved, np.add)

    def slowest(self, stages: Sequence[Sequence[Lane]], in_flight: Sequence[int], ends: Sequence[int]) -> float:
        """Seconds of the slowest stage for a micro-batch, for a given split; infinite if it doesn't fit."""
        tables = (self._stage_seconds(lanes, count) for lanes, count in zip(stages, in_flight, strict=True))
        return max(float(table[pair]) for table, pair in zip(tables, _pairs(ends), strict=True))

    def fitting(self, lanes: Sequence[Lane], in_flight: int, first: int, end: int) -> list[bool]:
        """Which lanes have room to run these layers."""
        for copies in self._copies(lanes):
            fits = [lane.degree > 0 and self.room(lane.degree, copies, first, end) >= in_flight for lane in lanes]
            if sum(fits) >= copies:
                return fits
        return [False] * len(lanes)

    @cached_property
    def _memory(self) -> float:
        # The plan check rounds bytes up several times.
        return self._cost.device.memory - 16

    def _copies(self, lanes: Sequence[Lane]) -> Sequence[int]:
        """How many lanes may share the optimizer's state, largest number first."""
        live = sum(lane.degree > 0 for lane in lanes)
        return range(live, 0, -1) if self._cost.training.distributed_optimizer else range(1, min(live, 1) + 1)

    def _of(self, degree: int, copies: int) -> Ranges:
        key = (degree, copies if self._cost.training.distributed_optimizer else 1)
        if key not in self._ranges:
            self._ranges[key] = ranges(self._cost, *key)
        return self._ranges[key]

    def _stage_seconds(self, lanes: Sequence[Lane], in_flight: int) -> Array:
        """Seconds of a micro-batch for each range of layers, shared by all lanes that it fits; infinite if none."""
        layers = self._cost.layers
        best = np.zeros((layers + 1, layers + 1))
        alike: dict[int, list[float]] = {}
        for lane in lanes:
            if lane.degree:
                alike.setdefault(lane.degree, []).append(lane.speed)
        for copies in self._copies(lanes):
            rate, count = np.zeros_like(best), np.zeros(best.shape, np.int64)
            for degree, speeds in alike.items():
                costs = self._of(degree, copies)
                fits = costs.state + costs.kept * in_flight + costs.working <= self._memory
                fits &= costs.seconds > 0
                rate[fits] += sum(speeds) / costs.seconds[fits]
                count += fits * len(speeds)
            best = np.where(count >= copies, np.maximum(best, rate), best)
        return np.divide(1.0, best, out=np.full_like(best, np.inf), where=best > 0)

    def _least(self, tables: Sequence[Array], join: np.ufunc) -> list[int] | None:
        """The ends that minimise the joined values of the tables at (end of the stage before, end)."""
        layers = self._cost.layers
        least = np.full(layers + 1, np.inf)
        least[0] = 0.0
        choices = []
        for table in tables:
            joined = join(least[:, np.newaxis], table)
            joined[np.tril_indices(layers + 1)] = np.inf
            choices.append(joined.argmin(axis=0))
            least = joined.min(axis=0)
        if not np.isfinite(least[-1]):
            return None
        ends = [layers]
        for choice in reversed(choices[1:]):
            ends.insert(0, int(choice[ends[0]]))
        return ends


def _pairs(ends: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip([0, *ends[:-1]], ends, strict=True))
