"""Which layers form a stage and which device holds it, before any order of ops. Imports numpy and numba.

The partition and placement parts of AdaPtis (arXiv 2509.23722): contiguous stages of least variance, then devices of
equal load. The text leaves open how the load is balanced: here, by moving layers over stage boundaries.
"""

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.pipeline.compiled import compiled
from megatron_resihp.pipeline.job import Layout, PipelineJob
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
    return Layout(tuple(_least_squares(_before(job.work), np.array(homes)).tolist()), homes)


def balanced(job: PipelineJob, layout: Layout, seed: int = 0) -> Layout:
    """A layout near this one whose devices are better balanced.

    One or two boundaries move by a layer, again and again. What makes neither the memory that is lacking for one
    micro-batch worse nor the time is kept: the largest load, and what filling and draining the pipeline adds to it,
    (devices − 1) / micro-batches of a stage in root mean square.

    Args:
        job, layout: what is laid out, and how at first.
        seed: of the moves.
    """
    if len(layout.homes) < 2:
        return layout
    cuts, homes, limit = np.array(layout.cuts), np.array(layout.homes), np.array(job.limit, np.float64)
    tries, filling = _TRIES_PER_STAGE * len(homes), (job.devices - 1) / job.micro_batches
    _balance(_before(job.work), _before(job.state + job.kept), limit, cuts, homes, filling, tries, seed)
    return Layout(tuple(cuts.tolist()), layout.homes)


def _before(values: Array) -> Array:
    """Sums along the last axis of what stands before: [..., layers + 1]."""
    return np.concatenate([np.zeros((*values.shape[:-1], 1)), values.cumsum(axis=-1)], axis=-1)


@compiled
def _least_squares(before: Array, homes: Index) -> Index:
    """Cuts with the least sum of squared stage times (their mean is fixed where devices are alike)."""
    stages, layers = len(homes), before.shape[1] - 1
    best = np.full((stages + 1, layers + 1), np.inf)
    cut = np.zeros((stages + 1, layers + 1), np.int64)
    best[0, 0] = 0.0
    for stage in range(1, stages + 1):
        own = before[homes[stage - 1]]
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
    before: Array, needed: Array, limit: Array, cuts: Index, homes: Index, filling: float, tries: int, seed: int
) -> None:
    """Descent in place."""
    np.random.seed(seed)
    judged = _judge(before, needed, limit, cuts, homes, filling)
    old = cuts.copy()
    for _ in range(tries):
        for _move in range(np.random.randint(1, 3)):
            cuts[np.random.randint(1, len(cuts) - 1)] += 2 * np.random.randint(2) - 1
        if np.all(cuts[1:] > cuts[:-1]):
            new = _judge(before, needed, limit, cuts, homes, filling)
            if new <= judged:
                judged = new
                old[:] = cuts
                continue
        cuts[:] = old


@compiled
def _judge(
    before: Array, needed: Array, limit: Array, cuts: Index, homes: Index, filling: float
) -> tuple[float, float]:
    """Memory that devices lack for one micro-batch, and seconds per micro-batch."""
    load, room, squares = np.zeros(len(limit)), limit.copy(), 0.0
    for stage in range(len(homes)):
        home, first, end = homes[stage], cuts[stage], cuts[stage + 1]
        work = before[home, end] - before[home, first]
        load[home] += work
        squares += work * work
        room[home] -= needed[home, end] - needed[home, first]
    return -np.minimum(room, 0.0).sum(), load.max() + filling * np.sqrt(squares / len(homes))
