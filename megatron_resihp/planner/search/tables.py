"""What work costs, as the arrays that the compiled search runs over. Imports numpy and `cost`."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.cost.job import Array, JobCost
from megatron_resihp.pipeline.op import OpKind

Index = NDArray[np.int64]
_ROUNDING = 64
"""Bytes by which sums of rounded parts may differ from the rounded sum."""


class Tables(NamedTuple):
    """One row per tensor-parallel degree, row k for degree k; rows of degrees that are not allowed hold infinities.

    Attributes:
        forward, backward: seconds of each layer on the healthy, [degrees + 1, layers]; backward is the whole of it.
        held: bytes of each layer that every copy has, [degrees + 1, layers].
        shared: bytes of each layer that its copies share out, [degrees + 1, layers].
        kept, working: activations of one micro-batch from F to B, and what recomputation needs besides.
        rate: models per second that a healthy group of each degree would work through, [degrees + 1]; 0 if not allowed.
        transfer: seconds between groups of two degrees, [degrees + 1, degrees + 1].
        memory: bytes of a device.
    """

    forward: Array
    backward: Array
    held: Array
    shared: Array
    kept: Array
    working: Array
    rate: Array
    transfer: Array
    memory: float


@lru_cache(maxsize=16)
def tables_of(cost: JobCost, uneven: bool) -> Tables:
    """The tables of a job, with or without the degrees whose members hold unlike shards."""
    degrees = [degree for degree in cost.degrees if uneven or not cost.uneven(degree)]
    rows, layers = cost.workers_per_node + 1, cost.layers
    forward, backward, held, shared, kept, working = np.full((6, rows, layers), np.inf)
    rate, transfer = np.zeros(rows), np.zeros((rows, rows))
    for degree in degrees:
        seconds = cost.seconds(degree)
        forward[degree] = seconds[OpKind.F]
        backward[degree] = seconds[OpKind.B] + seconds[OpKind.W]
        rate[degree] = 1 / seconds.sum()
        # State is linear in 1 / copies: two points tell it.
        alone, of_two = cost.bytes(degree, 1), cost.bytes(degree, 2)
        shared[degree] = 2 * (alone.state - of_two.state)
        held[degree] = alone.state - shared[degree]
        kept[degree], working[degree] = alone.kept, alone.working
        for other in degrees:
            transfer[degree, other] = cost.transfer(degree, other)
    memory = float(cost.device.memory - _ROUNDING)
    return Tables(forward, backward, held, shared, kept, working, rate, transfer, memory)
