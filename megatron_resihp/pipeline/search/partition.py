# SPDX-License-Identifier: Apache-2.0
"""Chooses which layers form a stage and which device holds it, before any order of ops. Imports numpy and numba.

The partition and placement parts of AdaPtis (arXiv 2509.23722): contiguous stages of least variance, then devices of
equal load. The text does not say how to balance the load; here layers move over stage boundaries.
"""

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.pipeline.compiled import compiled
from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.pipeline.search.job import Layout, PipelineJob, before
from megatron_resihp.pipeline.times import Array

Index = NDArray[np.int64]
_TRIES_PER_STAGE = 1500


def in_turns(devices: int, chunks: int) -> tuple[int, ...]:
    """Stages dealt to the devices as Megatron interleaves: 0, 1, 2, 0, 1, 2, …"""
    return tuple(range(devices)) * chunks


def zigzag(devices: int, chunks: int) -> tuple[int, ...]:
    """Stages dealt there and back: 0, 1, 2, 2, 1, 0, … (Qi et al., arXiv 2405.15362, for two chunks)."""
    there = tuple(range(devices))
    return tuple(home for chunk in range(chunks) for home in (there if chunk % 2 == 0 else there[::-1]))


def least_variance(job: PipelineJob, homes: tuple[int, ...]) -> Layout:
    """Contiguous stages whose times have the least variance, each with at least one layer.

    Raises:
        ValueError: there are more stages than layers.
    """
    if len(homes) > job.layers:
        raise ValueError(f"{job.layers} layers are too few for {len(homes)} stages")
    return Layout(tuple(_least_squares(before(job.work), np.array(homes)).tolist()), homes)


def balanced(job: PipelineJob, layout: Layout, seed: int = 0) -> Layout:
    """A similar layout with better balanced devices.

    Each step moves one or two boundaries by a layer. It is kept if it increases neither the memory lacking for one
    micro-batch nor the time. The time is the largest load of a device, plus the root mean square of the stage times, as
    large stages are hard to order. A device's load includes the forwards before its first stage. Those forwards and the
    root mean square are spread over the micro-batches.

    Args:
        job, layout: the job, and its layout at first.
        seed: for the moves.
    """
    if len(layout.homes) < 2:
        return layout
    cuts, homes, limit = np.array(layout.cuts), np.array(layout.homes), np.array(job.limit, np.float64)
    work, forwards, needed = map(before, (job.work, job.seconds[:, OpKind.F], job.state + job.kept))
    tries, share = _TRIES_PER_STAGE * len(homes), 1 / job.micro_batches
    _balance(work, forwards, needed, limit, cuts, homes, share, tries, seed)
    return Layout(tuple(cuts.tolist()), layout.homes)


@compiled
def _least_squares(work: Array, homes: Index) -> Index:
    """Cuts with the least sum of squared stage times (whose mean is fixed if devices are alike)."""
    stages, layers = len(homes), work.shape[1] - 1
    best = np.full((stages + 1, layers + 1), np.inf)
    cut = np.zeros((stages + 1, layers + 1), np.int64)
    best[0, 0] = 0.0
    for stage in range(1, stages + 1):
        own = work[homes[stage - 1]]
        for end in range(stage, layers + 1):
            for first in range(stage - 1, end):
                total = best[stage - 1, first] + (own[end] - own[first]) ** 2
                if total < best[stage, end]:
                    best[stage, end], cut[stage, end] = total, first
    cuts = np.empty(stages + 1, np.int64)
    cuts[stages] = layers
    for stage in range(stages, 0, -1):
        cuts[stage - 1] = cut[stage, cuts[stage]]
    return cuts


@compiled
def _balance(
    work: Array,
    forwards: Array,
    needed: Array,
    limit: Array,
    cuts: Index,
    homes: Index,
    share: float,
    tries: int,
    seed: int,
) -> None:
    """Descend in place."""
    np.random.seed(seed)
    load, room = np.empty(len(limit)), np.empty(len(limit))
    judged = _judge(work, forwards, needed, limit, cuts, homes, share, load, room)
    old = cuts.copy()
    for _ in range(tries):
        for _move in range(np.random.randint(1, 3)):
            cuts[np.random.randint(1, len(cuts) - 1)] += 2 * np.random.randint(2) - 1
        if _least_layers(cuts) > 0:
            new = _judge(work, forwards, needed, limit, cuts, homes, share, load, room)
            if new <= judged:
                judged = new
                old[:] = cuts
                continue
        cuts[:] = old


@compiled
def _least_layers(cuts: Index) -> int:
    """The least number of layers of a stage; without a temporary array."""
    least = cuts[1] - cuts[0]
    for stage in range(1, len(cuts) - 1):
        least = min(least, cuts[stage + 1] - cuts[stage])
    return least


@compiled
def _judge(
    work: Array,
    forwards: Array,
    needed: Array,
    limit: Array,
    cuts: Index,
    homes: Index,
    share: float,
    load: Array,
    room: Array,
) -> tuple[float, float]:
    """Memory that devices lack for one micro-batch, and seconds per micro-batch; `load` and `room` are buffers."""
    squares, arrival = 0.0, 0.0
    for device in range(len(limit)):
        load[device], room[device] = 0.0, limit[device]
    for stage in range(len(homes)):
        home, first, end = homes[stage], cuts[stage], cuts[stage + 1]
        if load[home] == 0.0:
            load[home] = share * arrival
        arrival += forwards[home, end] - forwards[home, first]
        seconds = work[home, end] - work[home, first]
        load[home] += seconds
        squares += seconds * seconds
        room[home] -= needed[home, end] - needed[home, first]
    most, over = 0.0, 0.0
    for device in range(len(limit)):
        most = max(most, load[device])
        over += min(room[device], 0.0)
    return -over, most + share * np.sqrt(squares / len(homes))
