# SPDX-License-Identifier: Apache-2.0
"""The least time of any program, whatever its order of ops. Imports numpy and numba."""

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import ArrayLike

from megatron_resihp.pipeline.compiled import compiled
from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.pipeline.times import Array, checked_times

F, B, W = OpKind


def makespan_lower_bound(
    device_of_stage: Sequence[int], durations: ArrayLike, transfers: ArrayLike = 0.0, splits_backward: bool = False
) -> float:
    """A lower bound on the time of any program for these stages, devices and durations, with unlimited memory.

    Each device alone is a one-machine problem. An op cannot start before its head, the longest chain of ops and
    transfers before it. After the op's end, the iteration lasts at least for its tail, the longest chain after it. The
    best preemptive order of that problem is found exactly, and the largest over the devices is returned. It is never
    below head + work + tail of a device, nor below the critical path of a micro-batch.

    Source: Carlier, The one-machine sequencing problem, European J. of Operational Research 11 (1982), Jackson's
    preemptive schedule.

    Args:
        device_of_stage: for each stage, the device that holds it.
        durations: as in `simulate`, with the full axis of micro-batches.
        transfers: as in `simulate`.
        splits_backward: whether W may run apart from B; otherwise B is the whole backward and W is ignored.

    Raises:
        ValueError: as in `simulate`.
    """
    given = np.asarray(durations, np.float64)
    home = np.asarray(device_of_stage)
    runs = checked_times(len(home), given.shape[-1], splits_backward, given[np.newaxis], transfers)
    ops, edges = (times[0] for times in runs)
    edges = np.where((home[1:] != home[:-1])[:, np.newaxis], edges, 0.0)
    kinds = 3 if splits_backward else 2
    head, tail = _heads(ops, edges)[:kinds], _tails(ops, edges, splits_backward)[:kinds]
    return max(
        float(_one_machine(*(times[:, home == device].ravel() for times in (head, ops[:kinds], tail))))
        for device in np.unique(home)
    )


def _heads(ops: Array, edges: Array) -> Array:
    """The earliest start of each op if no device had other work."""
    stages = ops.shape[1]
    head = np.zeros_like(ops)
    for stage in range(1, stages):
        head[F, stage] = head[F, stage - 1] + ops[F, stage - 1] + edges[F, stage - 1]
    head[B, -1] = head[F, -1] + ops[F, -1]
    for stage in reversed(range(stages - 1)):
        head[B, stage] = head[B, stage + 1] + ops[B, stage + 1] + edges[B, stage]
    head[W] = head[B] + ops[B]
    return head


def _tails(ops: Array, edges: Array, splits_backward: bool) -> Array:
    """The least time from the end of each op to the end of the iteration."""
    stages = ops.shape[1]
    tail = np.zeros_like(ops)
    if splits_backward:
        tail[B] = ops[W]
    for stage in range(1, stages):
        onward = edges[B, stage - 1] + ops[B, stage - 1] + tail[B, stage - 1]
        tail[B, stage] = np.maximum(tail[B, stage], onward)
    tail[F, -1] = ops[B, -1] + tail[B, -1]
    for stage in reversed(range(stages - 1)):
        tail[F, stage] = edges[F, stage] + ops[F, stage + 1] + tail[F, stage + 1]
    return tail


@compiled
def _one_machine(head: Array, work: Array, tail: Array) -> float:
    """The least possible max(end + tail) of preemptible ops on one machine, which runs the longest tail first."""
    order = np.argsort(head)
    left = work.copy()
    ready = [(0.0, np.int64(-1))][:0]
    now = 0.0
    latest = 0.0
    arrived = 0
    while arrived < len(order) or len(ready) > 0:
        if len(ready) == 0:
            now = max(now, head[order[arrived]])
        while arrived < len(order) and head[order[arrived]] <= now:
            heappush(ready, (-tail[order[arrived]], order[arrived]))
            arrived += 1
        op = ready[0][1]
        interrupted = arrived < len(order) and head[order[arrived]] < now + left[op]
        if interrupted:
            left[op] -= head[order[arrived]] - now
            now = head[order[arrived]]
        else:
            now += left[op]
            heappop(ready)
            latest = max(latest, now + tail[op])
    return latest
