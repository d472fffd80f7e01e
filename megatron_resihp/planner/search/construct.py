# SPDX-License-Identifier: Apache-2.0
"""First layouts: deals groups to a given number of replicas. Imports numpy and numba."""

from heapq import heappop, heappush
from typing import Final

import numpy as np

from megatron_resihp.cost.job import Array
from megatron_resihp.pipeline.compiled import compiled
from megatron_resihp.planner.search.groups import Nodes, degree_of, speed_of
from megatron_resihp.planner.search.layout import MISFIT, Layout, insert, new_layout, new_scratch, remove, stand_by
from megatron_resihp.planner.search.share import share_out
from megatron_resihp.planner.search.tables import Index, Tables

BY_POWER: Final = 0
"""Replicas get equal power."""
BY_SIZE: Final = 1
"""Replicas get equal numbers of workers, and so equal memory."""
ALIKE: Final = 2
"""Replicas get equal power from similar groups: slow groups share a replica."""
WAYS: Final = (BY_POWER, BY_SIZE, ALIKE)


@compiled
def construct(
    tables: Tables, nodes: Nodes, working: Index, idle: Index, replicas: int, micro_batches: int, way: int
) -> Layout:
    """Deal groups to replicas; slower groups come earlier in each pipeline (Malleus, 2410.13333).

    Groups without layers become idle. A replica that does not fit has seconds of MISFIT or more.
    """
    most_stages = min(tables.forward.shape[1], 4 * (len(working) // replicas) + 8)
    scratch = new_scratch(most_stages)
    layout = new_layout(replicas, most_stages, nodes.speed.size)
    for group in idle:
        stand_by(layout, group)
    power = np.empty(len(working))
    for number in range(len(working)):
        power[number] = tables.rate[degree_of(nodes, working[number])] * speed_of(nodes, working[number])
    _deal(nodes, layout, working, power, way)
    share_out(tables, nodes, layout, micro_batches, scratch)
    if layout.seconds.max() < MISFIT and _drop_empty(layout):
        share_out(tables, nodes, layout, micro_batches, scratch)
    return layout


@compiled
def _deal(nodes: Nodes, layout: Layout, working: Index, power: Array, way: int) -> None:
    """Deal each group to the replica that has the least so far; for ALIKE, fill one replica after another.

    The most powerful groups are dealt first; each new group goes before the groups that its replica already has.
    """
    replicas, most_stages = layout.order.shape
    least = [(0.0, replica) for replica in range(replicas)]
    filled, each, replica = 0.0, power.sum() / replicas, 0
    for dealt, number in enumerate(np.argsort(-power, kind="mergesort")):
        group = working[number]
        weight = float(degree_of(nodes, group)) if way == BY_SIZE else power[number]
        if way == ALIKE:
            is_full = filled + weight / 2 > each * (replica + 1) or len(working) - dealt < replicas - replica
            if replica < replicas - 1 and layout.stages[replica] > 0 and is_full:
                replica += 1
            filled += weight
        else:
            load, replica = heappop(least)
            heappush(least, (load + weight, replica))
        if layout.stages[replica] == most_stages:
            stand_by(layout, group)
        else:
            insert(layout, replica, 0, group)


@compiled
def _drop_empty(layout: Layout) -> bool:
    """Make groups without layers idle; returns whether there were any."""
    dropped = False
    for replica in range(len(layout.stages)):
        for stage in range(layout.stages[replica] - 1, -1, -1):
            if layout.ends[replica, stage] == (layout.ends[replica, stage - 1] if stage else 0):
                stand_by(layout, remove(layout, replica, stage))
                dropped = True
    return dropped
