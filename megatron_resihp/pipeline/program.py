# SPDX-License-Identifier: Apache-2.0
"""A pipeline program: which device runs which op, and in which order. Imports numpy and numba."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.pipeline.errors import ProgramError as ProgramError
from megatron_resihp.pipeline.graph import OpGraph, build_graph, rows_of
from megatron_resihp.pipeline.op import Op, OpKind

ABSENT: Final = -1


@dataclass(frozen=True)
class Program:
    """The order of ops on each device of one pipeline.

    Attributes:
        ops: for each device, its ops in the order in which it runs them.
        device_of_stage: for each stage, the device that holds it.
        micro_batches: number of micro-batches.
        splits_backward: whether weight gradients are separate ops (W); otherwise B is the whole backward.

        Raises:
            ProgramError: on construction, unless each F, B (and W) of each stage and micro-batch appears exactly once,
                on the stage's device, F before B before W, and no ops wait for each other in a circle.
    """

    ops: tuple[tuple[Op, ...], ...]
    device_of_stage: tuple[int, ...]
    micro_batches: int
    splits_backward: bool = False

    def __post_init__(self) -> None:
        if not self.ops or not self.device_of_stage or self.micro_batches < 1:
            raise ProgramError("a program needs at least one device, one stage and one micro-batch")
        for stage, device in enumerate(self.device_of_stage):
            if not 0 <= device < self.devices:
                raise ProgramError(f"stage {stage} is on device {device}; devices are 0 to {self.devices - 1}")
        self._check_each_once()
        self._check_order_on_device()
        self._check_acyclic()

    @property
    def devices(self) -> int:
        return len(self.ops)

    @property
    def stages(self) -> int:
        return len(self.device_of_stage)

    @property
    def kinds(self) -> tuple[OpKind, ...]:
        """The kinds of ops in the program."""
        return (OpKind.F, OpKind.B, OpKind.W) if self.splits_backward else (OpKind.F, OpKind.B)

    @cached_property
    def flat(self) -> NDArray[np.int64]:
        """All ops, device after device, as rows (kind, stage, micro-batch)."""
        return rows_of(self.ops)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Where each device's ops begin in `flat`, and the end: [devices + 1]."""
        return np.cumsum([0, *map(len, self.ops)])

    @cached_property
    def graph(self) -> OpGraph:
        """The program as arrays for the simulator."""
        return build_graph(self.flat, self.offsets, self.stages, self.micro_batches, self.stages - 1)

    @cached_property
    def _position(self) -> NDArray[np.int64]:
        """Index in `flat` of each op: [3, stages, micro-batches]; ABSENT for ops that are missing."""
        position = np.full((len(OpKind), self.stages, self.micro_batches), ABSENT)
        position[tuple(self.flat.T)] = np.arange(len(self.flat))
        return position

    def _op(self, index: int) -> Op:
        kind, stage, micro_batch = map(int, self.flat[index])
        return Op(OpKind(kind), stage, micro_batch)

    def _check_each_once(self) -> None:
        kind, stage, micro_batch = self.flat.T
        limits = (len(self.kinds), self.stages, self.micro_batches)
        outside = np.any((self.flat < 0) | (self.flat >= limits), axis=1)
        if outside.any():
            row = self.flat[np.flatnonzero(outside)[0]].tolist()
            raise ProgramError(f"op (kind, stage, micro-batch) {row} is outside of {list(limits)}")
        device = np.repeat(np.arange(self.devices), np.diff(self.offsets))
        wrong = np.flatnonzero(device != np.asarray(self.device_of_stage)[stage])
        if len(wrong):
            op = self._op(wrong[0])
            home = self.device_of_stage[op.stage]
            raise ProgramError(f"{op} is on device {device[wrong[0]]}; the stage is on device {home}")
        times = np.zeros(limits, np.int64)
        np.add.at(times, (kind, stage, micro_batch), 1)
        if np.any(times != 1):
            first, *rest = map(int, np.argwhere(times != 1)[0])
            op = Op(OpKind(first), *rest)
            raise ProgramError(f"{op} stands {times[op]} times; each op is run exactly once")

    def _check_order_on_device(self) -> None:
        for earlier, later in zip(self.kinds, self.kinds[1:], strict=False):
            wrong = np.argwhere(self._position[later] < self._position[earlier])
            if len(wrong):
                op = Op(later, *map(int, wrong[0]))
                raise ProgramError(f"{op} stands before its {earlier.name}; F comes before B, and B before W")

    def _check_acyclic(self) -> None:
        stuck = self.graph.stuck
        if stuck >= 0:
            op = self._op(stuck)
            neighbour = op.stage - 1 if op.kind == OpKind.F else op.stage + 1
            needed = Op(op.kind, neighbour, op.micro_batch)
            raise ProgramError(f"{op} waits for {needed}, which waits for it: ops must not wait in a circle")
