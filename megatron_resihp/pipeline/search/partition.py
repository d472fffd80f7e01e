# SPDX-License-Identifier: Apache-2.0
"""Which layers form a stage and which device holds it, before any order of ops. Imports numpy and numba.

The partition and placement parts of AdaPtis (arXiv 2509.23722): contiguous stages of least variance, then devices of
equal load. The text leaves open how the load is balanced: here, by moving layers over stage boundaries.
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
    """There and back: 0, 1, 2, 2, 1, 0, … (Qi et al., arXiv 2405.15362, for two chunks)."""
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
    """A layout near this one whose devices are better balanced.

    One or two boundaries move by a layer, again and again. What makes neither the memory that is lacking for one
    micro-batch worse nor the time is kept: a device's load with the forwards before its first stage, spread over the
    micro-batches, the largest of all; and, because large stages are hard to order, their root mean square, spread so.

    Args:
        job, layout: what is laid out, and how at first.
        seed: of the moves.
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
    """Cuts with the least sum of squared stage times (their mean is fixed where devices are alike)."""
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
    """Descent in place."""
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
    """Of a stage; without an array in between."""
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
    """Memory that devices lack for one micro-batch, and seconds per micro-batch; `load` and `room` are scratch."""
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
