# SPDX-License-Identifier: Apache-2.0
"""The cost of work, as arrays for the compiled search. Imports numpy and `cost`."""

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
    """Costs for one order of ops. Row k is tensor-parallel degree k; rows of degrees that are not allowed are infinite.

    Attributes:
        forward, backward, weight: seconds of each layer on healthy workers, [degrees + 1, layers]; with 1F1B, backward
            is the whole backward and weight is 0.
        whole: their sum.
        held: bytes of each layer that every copy holds, [degrees + 1, layers].
        shared: bytes of each layer that its copies share, [degrees + 1, layers].
        kept, working: activations of one micro-batch from F to B, and the extra bytes that recomputation needs.
        rate: models per second that a healthy group of each degree processes, [degrees + 1]; 0 if not allowed.
        transfer: seconds between groups of two degrees, [degrees + 1, degrees + 1].
        memory: bytes of a device.
        beside: bytes of it that must stay free beside the state while nothing runs.
        splits_backward: whether the order is ZB-H1 instead of 1F1B.
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
    """The tables of a job for one order of ops; `uneven` allows degrees whose members hold unequal shards."""
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
        # State is linear in 1 / copies, so two points determine it.
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
