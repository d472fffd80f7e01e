# SPDX-License-Identifier: Apache-2.0
"""A program as flat arrays: ops in a runnable order, and what each op waits for. Imports numpy and numba.

Besides the op before it on its device, an op waits for at most one other op: F for the F of the stage before, B for the
B of the stage after. B's own F and W's own B run earlier on the same device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_resihp.pipeline.compiled import compiled
from megatron_resihp.pipeline.op import Op, OpKind

NONE: Final = -1
_F, _B = int(OpKind.F), int(OpKind.B)


@dataclass(frozen=True)
class OpGraph:
    """One element per op, in topological order. "Cell" is an op's index in an array [3, stages, micro-batches].

    Attributes:
        cell: the op.
        device: where it runs.
        source: cell of the op whose result it needs from another stage; NONE if it needs none.
        transfer: index of the transfer that brings this result, in an array [2 (F, B), stages − 1, micro-batches]; NONE
            where source and op are on the same device.
        stuck: index of an op (device after device) that can never start, NONE if all can; the other arrays end there.
    """

    cell: NDArray[np.int32]
    device: NDArray[np.int32]
    source: NDArray[np.int32]
    transfer: NDArray[np.int32]
    stuck: int


def rows_of(ops: Sequence[Sequence[Op]]) -> NDArray[np.int64]:
    """All ops, device after device, as rows (kind, stage, micro-batch)."""
    count = sum(map(len, ops))
    return np.fromiter(chain.from_iterable(chain.from_iterable(ops)), np.int64, 3 * count).reshape(count, 3)


def build_graph(
    flat: NDArray[np.int64], offsets: NDArray[np.int64], stages: int, micro_batches: int, last_stage: ArrayLike
) -> OpGraph:
    """Build the graph of ops that are valid individually.

    Args:
        flat: rows (kind, stage, micro-batch), device after device.
        offsets: where each device's rows begin, and the end.
        stages, micro_batches: how many there are.
        last_stage: last stage, whose B needs no other stage's result: for all micro-batches, or [micro-batches].
    """
    kind, stage, micro_batch = flat.T
    device = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    cells = 3 * stages * micro_batches
    cell = (kind * stages + stage) * micro_batches + micro_batch
    forward = (kind == _F) & (stage > 0)
    backward = (kind == _B) & (stage < np.broadcast_to(last_stage, micro_batches)[micro_batch])
    source = np.where(forward | backward, cell + np.where(forward, -1, 1) * micro_batches, NONE)
    home = np.full(cells, NONE)
    home[cell] = device
    crosses = (source != NONE) & (home[source] != device)
    boundary = np.where(forward, stage - 1, stage)
    index = (np.where(forward, 0, stages - 1) + boundary) * micro_batches + micro_batch
    transfer = np.where(crosses, index, NONE)
    order, stuck = _topological_order(cell, source, offsets, cells)
    return OpGraph(
        cell=cell[order].astype(np.int32),
        device=device[order].astype(np.int32),
        source=source[order].astype(np.int32),
        transfer=transfer[order].astype(np.int32),
        stuck=int(stuck),
    )


@compiled
def _topological_order(
    cell: NDArray[np.int64], source: NDArray[np.int64], offsets: NDArray[np.int64], cells: int
) -> tuple[NDArray[np.int64], int]:
    """Indices of the ops in a runnable order, and one op that can never start (NONE if all can)."""
    devices = len(offsets) - 1
    following = offsets[:-1].copy()
    done = np.zeros(cells, np.bool_)
    order = np.empty(len(cell), np.int64)
    count = 0
    moved = True
    while moved:
        moved = False
        for device in range(devices):
            i = following[device]
            while i < offsets[device + 1] and (source[i] == NONE or done[source[i]]):
                done[cell[i]] = True
                order[count] = i
                count += 1
                i += 1
                moved = True
            following[device] = i
    for device in range(devices):
        if following[device] < offsets[device + 1]:
            return order[:count], following[device]
    return order, NONE
