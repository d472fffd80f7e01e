# SPDX-License-Identifier: Apache-2.0
"""Pipelines that work for each other: a device may run a stage's ops for another pipeline's micro-batches.

Imports numpy, numba and this package. Unlike in a `Program`, a stage then has no fixed device. Each micro-batch takes
its own path through the devices, and a result is sent if two successive ops are on different devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_resihp.pipeline.graph import NONE, OpGraph, build_graph, rows_of
from megatron_resihp.pipeline.op import Op, OpKind
from megatron_resihp.pipeline.program import ProgramError
from megatron_resihp.pipeline.simulate import run_graph
from megatron_resihp.pipeline.times import Array, checked_times


@dataclass(frozen=True, eq=False)
class JointProgram:
    """The order of ops on each device of several pipelines.

    Attributes:
        ops: for each device, its ops in the order in which it runs them; stages are numbered within the micro-batch's
            own pipeline, micro-batches across all pipelines.
        last_stage: of each micro-batch's pipeline, [micro-batches].

    Raises:
        ProgramError: on construction, if an op appears twice, or if ops wait for each other in a circle or for an op
            that does not exist.
    """

    ops: tuple[Sequence[Op], ...]
    last_stage: tuple[int, ...]

    def __post_init__(self) -> None:
        cells, counts = np.unique(self._cells, return_counts=True)
        if len(cells) != len(self._cells):
            twice = np.unravel_index(cells[counts > 1][0], self.shape)
            raise ProgramError(f"{_op(*map(int, twice))} stands twice")
        if self.graph.stuck != NONE:
            stuck = _op(*self.flat[self.graph.stuck].tolist())
            raise ProgramError(f"{stuck} waits for an op that isn't there or waits for it")

    @property
    def devices(self) -> int:
        return len(self.ops)

    @property
    def stages(self) -> int:
        """Number of stages of the longest pipeline."""
        return 1 + max(self.last_stage)

    @property
    def micro_batches(self) -> int:
        return len(self.last_stage)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of an array with one element per op: [3 (F, B, W), stages, micro-batches]."""
        return len(OpKind), self.stages, self.micro_batches

    @cached_property
    def flat(self) -> NDArray[np.int64]:
        """All ops, device after device, as rows (kind, stage, micro-batch)."""
        return rows_of(self.ops)

    @cached_property
    def device(self) -> NDArray[np.int64]:
        """The device of each row of `flat`."""
        return np.repeat(np.arange(self.devices), list(map(len, self.ops)))

    @cached_property
    def graph(self) -> OpGraph:
        """The program as arrays for the simulator."""
        offsets = np.cumsum([0, *map(len, self.ops)])
        return build_graph(self.flat, offsets, self.stages, self.micro_batches, self.last_stage)

    @property
    def _cells(self) -> NDArray[np.int64]:
        return np.ravel_multi_index(tuple(self.flat.T), self.shape)


def _op(kind: int, stage: int, micro_batch: int) -> Op:
    return Op(OpKind(kind), stage, micro_batch)


@dataclass(frozen=True, eq=False)
class JointTimeline:
    """A joint program with times, in seconds from the start of the iteration.

    Attributes:
        program: the program that ran.
        start, end: of each op, [3 (F, B, W), stages, micro-batches]; NaN for ops that the program does not have.
        makespan: the end of the last op.
    """

    program: JointProgram
    start: Array
    end: Array
    makespan: float

    @property
    def finish(self) -> Array:
        """[micro-batches] end of each micro-batch's last op, in seconds."""
        finish: Array = np.nanmax(self.end, axis=(0, 1))
        return finish


def joint_makespans(program: JointProgram, durations: ArrayLike, transfers: ArrayLike = 0.0) -> Array:
    """The makespans alone, [runs], of a joint program with each of many sets of durations.

    Args:
        program: the program to run.
        durations, transfers: as in `simulate_joint`, with a leading axis of runs for the durations.

    Raises:
        ValueError: shapes do not fit, or a time is negative, infinite or NaN.
    """
    return _run(program, durations, transfers)[2]


def simulate_joint(program: JointProgram, durations: ArrayLike, transfers: ArrayLike = 0.0) -> JointTimeline:
    """Run a joint program once; the times follow the rules of `simulate`, each op's on the device that runs it.

    Args:
        program: the program to run.
        durations: seconds of each op, broadcastable to [3 (F, B, W), stages, micro-batches].
        transfers: seconds that a result takes, broadcastable to [2 (activations, their gradients), stages − 1 (boundary
            after each stage), micro-batches]. Ignored between ops on the same device.

    Raises:
        ValueError: shapes do not fit, or a time is negative, infinite or NaN.
    """
    given = np.broadcast_to(np.asarray(durations, np.float64), program.shape)[np.newaxis]
    start, end, makespan = _run(program, given, transfers)
    return JointTimeline(program, start.reshape(program.shape), end.reshape(program.shape), float(makespan[0]))


def _run(program: JointProgram, durations: ArrayLike, transfers: ArrayLike) -> tuple[Array, Array, Array]:
    ops, edges = checked_times(program.stages, program.micro_batches, True, durations, transfers)
    return run_graph(program.graph, program.devices, ops.reshape(len(ops), -1), edges.reshape(len(edges), -1))
