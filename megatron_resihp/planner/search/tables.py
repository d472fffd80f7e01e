# SPDX-License-Identifier: Apache-2.0
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
    """For one order of ops. Row k is for tensor-parallel degree k; rows of degrees that are not allowed are infinite.

    Attributes:
        forward, backward, weight: seconds of each layer on the healthy, [degrees + 1, layers]; with 1F1B, backward is
            the whole of it and weight is 0.
        whole: their sum.
        held: bytes of each layer that every copy has, [degrees + 1, layers].
        shared: bytes of each layer that its copies share out, [degrees + 1, layers].
        kept, working: activations of one micro-batch from F to B, and what recomputation needs besides.
        rate: models per second that a healthy group of each degree would work through, [degrees + 1]; 0 if not allowed.
        transfer: seconds between groups of two degrees, [degrees + 1, degrees + 1].
        memory: bytes of a device.
        beside: of them, those that must be free beside the state while nothing runs.
        splits_backward: whether the order is ZB-H1 and not 1F1B.
    """

    forward: Array
    backward: Array
    weight: Array
    whole: Array
    held: Array
    shared: Array
    kept: Array
    working: Array
    rate: Array
    transfer: Array
    memory: float
    beside: float
    splits_backward: bool


@lru_cache(maxsize=16)
def tables_of(cost: JobCost, uneven: bool, splits_backward: bool = False) -> Tables:
    """The tables of a job, with or without the degrees whose members hold unlike shards, for one of both orders."""
    degrees = [degree for degree in cost.degrees if uneven or not cost.uneven(degree)]
    rows, layers = cost.workers_per_node + 1, cost.layers
    forward, backward, weight, held, shared, kept, working = np.full((7, rows, layers), np.inf)
    rate, transfer = np.zeros(rows), np.zeros((rows, rows))
    for degree in degrees:
        seconds = cost.seconds(degree)
        forward[degree] = seconds[OpKind.F]
        backward[degree] = seconds[OpKind.B] + (0.0 if splits_backward else seconds[OpKind.W])
        weight[degree] = seconds[OpKind.W] if splits_backward else 0.0
        rate[degree] = 1 / seconds.sum()
        # State is linear in 1 / copies: two points tell it.
        alone, of_two = cost.bytes(degree, 1), cost.bytes(degree, 2)
        shared[degree] = 2 * (alone.state - of_two.state)
        held[degree] = alone.state - shared[degree]
        kept[degree], working[degree] = alone.kept, alone.working
        for other in degrees:
            transfer[degree, other] = cost.transfer(degree, other)
    memory = float(cost.device.memory - _ROUNDING)
    return Tables(
        forward, backward, weight, forward + backward + weight, held, shared, kept, working, rate, transfer, memory,
        float(cost.beside), splits_backward,
    )  # fmt: skip
