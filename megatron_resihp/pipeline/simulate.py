# SPDX-License-Identifier: Apache-2.0
"""Simulates when each op of a program starts and ends. Imports numpy and numba.

t_start(v) = max over all u that v waits for of t_end(u) + T_edge(u, v). T_edge is the P2P time if the result comes from
another device, and 0 if u is only the op before v on the same device (ResiHP, arXiv 2605.06374, prediction of the
healthy iteration time). A transfer occupies neither its sender nor its receiver.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_resihp.pipeline.compiled import compiled
from megatron_resihp.pipeline.graph import NONE, OpGraph
from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.pipeline.program import Program
from megatron_resihp.pipeline.times import Array, checked_times


@dataclass(frozen=True)
class Timeline:
    """A program with times, in seconds from the start of the iteration.

    Attributes:
        program: the program that ran.
        start, end: of each op, [3 (F, B, W), stages, micro-batches]; NaN for ops that the program does not have.
        makespan: the end of the last op.
    """

    program: Program
    start: Array
    end: Array
    makespan: float

    @cached_property
    def busy(self) -> Array:
        """[devices] seconds spent in ops."""
        per_stage = np.nansum(self.end - self.start, axis=(0, 2))
        return np.bincount(self.program.device_of_stage, per_stage, self.program.devices)

    @property
    def bubble(self) -> Array:
        """[devices] seconds without an op, from the start of the iteration to the makespan."""
        return self.makespan - self.busy

    @property
    def bubble_share(self) -> float:
        """Mean share of the makespan that devices idle; 0 for an empty makespan."""
        return float(self.bubble.mean() / self.makespan) if self.makespan else 0.0


@dataclass(frozen=True)
class Timelines:
    """The same program run with many sets of durations.

    Attributes:
        program: the program that ran.
        start, end: [runs, 3, stages, micro-batches], as in Timeline.
        makespan: [runs].
    """

    program: Program
    start: Array
    end: Array
    makespan: Array

    def __len__(self) -> int:
        return len(self.makespan)

    def __getitem__(self, run: int) -> Timeline:
        return Timeline(self.program, self.start[run], self.end[run], float(self.makespan[run]))


def simulate(program: Program, durations: ArrayLike, transfers: ArrayLike = 0.0) -> Timeline:
    """Run a program once.

    Args:
        program: the program to run.
        durations: seconds of each op, broadcastable to [3 (F, B, W), stages, micro-batches]. If the program does not
            split the backward, B is the whole backward and W is ignored.
        transfers: seconds that a result takes to the next device, broadcastable to [2 (activations, their gradients),
            stages − 1 (boundary after each stage), micro-batches]. Ignored between stages on the same device.

    Raises:
        ValueError: shapes do not fit, or a needed time is negative, infinite or NaN.
    """
    cells = np.broadcast_to(np.asarray(durations, np.float64), (len(OpKind), program.stages, program.micro_batches))
    return simulate_many(program, cells[np.newaxis], transfers)[0]


def simulate_many(program: Program, durations: ArrayLike, transfers: ArrayLike = 0.0) -> Timelines:
    """Run a program with each of many sets of durations.

    Args:
        program: the program to run.
        durations: as in `simulate`, with a leading axis of runs.
        transfers: as in `simulate`, the same for all runs; or with a leading axis of runs.

    Raises:
        ValueError: as in `simulate`.
    """
    ops, edges = _checked(program, durations, transfers)
    start, end, makespan = run_graph(program.graph, program.devices, ops, edges)
    shape = len(ops), len(OpKind), program.stages, program.micro_batches
    return Timelines(program, start.reshape(shape), end.reshape(shape), makespan)


def makespans(program: Program, durations: ArrayLike, transfers: ArrayLike = 0.0) -> Array:
    """The makespans of `simulate_many` alone, [runs]."""
    ops, edges = _checked(program, durations, transfers)
    # The ops' times are not needed: all runs write them to the same row.
    return _run_many(*_arrays(program.graph), program.devices, ops, edges, *np.empty((2, 1, ops.shape[1])))


def run_graph(graph: OpGraph, devices: int, durations: Array, transfers: Array) -> tuple[Array, Array, Array]:
    """Run ops with each of many sets of durations.

    Args:
        graph: the ops.
        devices: how many there are.
        durations: seconds, [runs, cells].
        transfers: seconds, [runs or 1, transfers].

    Returns:
        start and end, [runs, cells], NaN in cells without an op, and makespan, [runs].
    """
    start, end = np.full((2, *durations.shape), np.nan)
    makespan = _run_many(*_arrays(graph), devices, durations, transfers, start, end)
    return start, end, makespan


def _arrays(graph: OpGraph) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    return graph.cell, graph.device, graph.source, graph.transfer


def _checked(program: Program, durations: ArrayLike, transfers: ArrayLike) -> tuple[Array, Array]:
    """Durations and transfers with one row per run."""
    sizes = program.stages, program.micro_batches, program.splits_backward
    ops, edges = checked_times(*sizes, durations, transfers)
    return ops.reshape(len(ops), -1), edges.reshape(len(edges), -1)


@compiled
def _run(
    cell: NDArray[np.int32],
    device: NDArray[np.int32],
    source: NDArray[np.int32],
    transfer: NDArray[np.int32],
    durations: Array,
    transfers: Array,
    free: Array,
    start: Array,
    end: Array,
) -> float:
    """Fill `start` and `end`, by cell, and return the makespan; `free` is scratch, [devices]."""
    free[:] = 0.0
    for i in range(len(cell)):
        here = cell[i]
        begin = free[device[i]]
        if source[i] != NONE:
            arrival = end[source[i]]
            if transfer[i] != NONE:
                arrival += transfers[transfer[i]]
            begin = max(begin, arrival)
        start[here] = begin
        end[here] = begin + durations[here]
        free[device[i]] = end[here]
    return free.max()


@compiled
def _run_many(
    cell: NDArray[np.int32],
    device: NDArray[np.int32],
    source: NDArray[np.int32],
    transfer: NDArray[np.int32],
    devices: int,
    durations: Array,
    transfers: Array,
    start: Array,
    end: Array,
) -> Array:
    makespan = np.empty(len(durations))
    free = np.empty(devices)
    for run in range(len(durations)):
        edges, row = transfers[run % len(transfers)], run % len(start)
        makespan[run] = _run(cell, device, source, transfer, durations[run], edges, free, start[row], end[row])
    return makespan
