# SPDX-License-Identifier: Apache-2.0
"""One pipeline's work, before layers, devices and the order of ops are chosen. Imports numpy."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megatron_resihp.pipeline.memory import peak_live_activations
from megatron_resihp.pipeline.program import Program
from megatron_resihp.pipeline.times import Array


class Layout(NamedTuple):
    """The layers of each stage, and the device that holds it.

    Attributes:
        cuts: stage s has layers cuts[s], …, cuts[s + 1] − 1; it may have none.
        homes: device of each stage.
    """

    cuts: tuple[int, ...]
    homes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PipelineJob:
    """Layers, devices and micro-batches of one pipeline; all micro-batches take the same time. Equal by content.

    Attributes:
        seconds: of F, B and W of each layer for a micro-batch on each device, [devices, 3, layers].
        transfers: of a stage's result, in seconds, [devices (from), devices (to)].
        micro_batches: number of micro-batches.
        state: bytes of weights, gradients and optimizer of each layer on each device, [devices, layers].
        kept: bytes that each layer keeps of a micro-batch from its F on, [devices, layers].
        limit: bytes of each device for both, [devices].
        kept_until_w: the share of `kept` that only W frees; B frees the rest. Without W, B frees everything.
        beside: bytes that must stay free beside `state` on each device while nothing runs.
    """

    seconds: Array
    transfers: Array
    micro_batches: int
    state: Array
    kept: Array
    limit: Array
    kept_until_w: float = 1.0
    beside: int = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PipelineJob) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @cached_property
    def _content(self) -> tuple[object, ...]:
        arrays = (self.seconds, self.transfers, self.state, self.kept, self.limit)
        return (self.micro_batches, self.kept_until_w, self.beside, *((each.shape, each.tobytes()) for each in arrays))

    @property
    def devices(self) -> int:
        return len(self.seconds)

    @property
    def layers(self) -> int:
        return self.seconds.shape[2]

    @cached_property
    def work(self) -> Array:
        """Seconds of each layer for a micro-batch on each device, [devices, layers]."""
        return np.asarray(self.seconds.sum(axis=1))

    @cached_property
    def floor(self) -> float:
        """Least seconds of any layout and order: the work over the devices, W included.

        A device that takes at least 1 / speed times as long as the fastest for every layer does at most speed ·
        makespan of the fastest's seconds.
        """
        least = self.work.min(axis=0)
        some = least > 0
        speed = (least[some] / self.work[:, some]).max(axis=1, initial=0.0)
        return self.micro_batches * float(least.sum()) / float(speed.sum()) if some.any() else 0.0

    def durations(self, layout: Layout, splits_backward: bool = True) -> Array:
        """Seconds of the ops of each stage, [3, stages, micro-batches], as `simulate` takes them."""
        times = np.array([self.seconds[home, :, first:end].sum(axis=1) for home, first, end in _stages(layout)]).T
        if not splits_backward:
            times = np.stack([times[0], times[1] + times[2], np.zeros(times.shape[1])])
        return np.repeat(times[:, :, np.newaxis], self.micro_batches, axis=2)

    def hops(self, layout: Layout) -> Array:
        """Seconds of the transfer at each boundary, [2, stages − 1, 1], as `simulate` takes them."""
        there = np.array([self.transfers[pair] for pair in pairwise(layout.homes)])
        back = np.array([self.transfers[pair[::-1]] for pair in pairwise(layout.homes)])
        return np.stack([there, back]).reshape(2, -1, 1)

    def sizes(self, layout: Layout) -> Array:
        """Bytes that each stage keeps of a micro-batch, [stages, 1]."""
        return np.array([[self.kept[home, first:end].sum()] for home, first, end in _stages(layout)])

    def room(self, layout: Layout) -> Array:
        """Bytes that each device has for activations, [devices]; negative if its layers alone are too large."""
        room = np.array(self.limit, np.float64)
        for home, first, end in _stages(layout):
            room[home] -= self.state[home, first:end].sum()
        return np.where(room < self.beside, room - self.beside, room)

    def load(self, layout: Layout) -> Array:
        """Seconds of each device's work for a micro-batch, [devices]."""
        load = np.zeros(self.devices)
        for home, first, end in _stages(layout):
            load[home] += self.work[home, first:end].sum()
        return load

    def fits(self, layout: Layout, program: Program) -> bool:
        """Whether no device needs more than its limit at any time."""
        peak = peak_live_activations(program, self.sizes(layout), self.kept_until_w)
        return bool(np.all(peak <= self.room(layout)))


def before(values: Array) -> Array:
    """Sums along the last axis of the elements before each one, and of all: one element more."""
    return np.concatenate([np.zeros((*values.shape[:-1], 1)), values.cumsum(axis=-1)], axis=-1)


def _stages(layout: Layout) -> Sequence[tuple[int, int, int]]:
    return list(zip(layout.homes, layout.cuts, layout.cuts[1:], strict=False))
