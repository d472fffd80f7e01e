"""First layouts: groups dealt to so many replicas. Imports numpy and numba."""

from typing import Final

import numpy as np

from megatron_resihp.cost.job import Array
from megatron_resihp.pipeline.compiled import compiled
from megatron_resihp.planner.search.groups import Nodes, degree_of, speed_of
from megatron_resihp.planner.search.layout import Layout, Scratch, assess, insert, new_layout, new_scratch, stand_by
from megatron_resihp.planner.search.share import level, share_by_power
from megatron_resihp.planner.search.tables import Index, Tables

BY_POWER: Final = 0
"""Replicas get equal power."""
BY_SIZE: Final = 1
"""Replicas get equally many workers, and with them equal memory."""
ALIKE: Final = 2
"""Replicas get equal power out of groups that are alike: slow ones come together."""
WAYS: Final = (BY_POWER, BY_SIZE, ALIKE)


@compiled
def construct(
    tables: Tables, nodes: Nodes, working: Index, idle: Index, replicas: int, micro_batches: int, way: int
) -> Layout:
    """Deal groups to replicas; the slowest come first in each pipeline (Malleus, 2410.13333).

    Groups that are left without layers become idle. Seconds are infinite where a replica doesn't fit.
    """
    most_stages = tables.forward.shape[1]
    scratch = new_scratch(most_stages)
    layout = new_layout(replicas, most_stages, nodes.speed.size)
    for group in idle:
        stand_by(layout, group)
    power = np.empty(len(working))
    for number in range(len(working)):
        power[number] = tables.rate[degree_of(nodes, working[number])] * speed_of(nodes, working[number])
    _deal(nodes, layout, working, power, way)
    share_by_power(tables, nodes, layout, micro_batches)
    for replica in range(replicas):
        if not _assess_like_before(tables, nodes, layout, replica, scratch):
            assess(tables, nodes, layout, replica, scratch)
            _drop_empty(tables, nodes, layout, replica, scratch)
        if layout.seconds[replica] == np.inf:
            return layout
    level(tables, nodes, layout, scratch)
    return layout


@compiled
def _deal(nodes: Nodes, layout: Layout, working: Index, power: Array, way: int) -> None:
    """Each group to the replica that has least so far; or, for ALIKE, one replica after another filled.

    The most powerful are dealt first, and so each becomes the first stage of those that were dealt before.
    """
    replicas, most_stages = layout.order.shape
    filled = np.zeros(replicas)
    each, replica = power.sum() / replicas, 0
    for number in np.argsort(-power, kind="mergesort"):
        group = working[number]
        weight = float(degree_of(nodes, group)) if way == BY_SIZE else power[number]
        if way == ALIKE:
            while replica < replicas - 1 and filled[: replica + 1].sum() + weight / 2 > each * (replica + 1):
                replica += 1
        else:
            replica = int(np.argmin(filled))
        if layout.stages[replica] == most_stages:
            stand_by(layout, group)
            continue
        filled[replica] += weight
        insert(layout, replica, 0, group)


@compiled
def _assess_like_before(tables: Tables, nodes: Nodes, layout: Layout, replica: int, scratch: Scratch) -> bool:
    """Copy the result of the replica before if this one is just like it; whether it is."""
    if replica == 0 or layout.stages[replica] != layout.stages[replica - 1]:
        return False
    if layout.micro_batches[replica] != layout.micro_batches[replica - 1]:
        return False
    for stage in range(layout.stages[replica]):
        mine, other = layout.order[replica, stage], layout.order[replica - 1, stage]
        if degree_of(nodes, mine) != degree_of(nodes, other) or speed_of(nodes, mine) != speed_of(nodes, other):
            return False
    layout.ends[replica] = layout.ends[replica - 1]
    layout.seconds[replica], layout.period[replica] = layout.seconds[replica - 1], layout.period[replica - 1]
    return True


@compiled
def _drop_empty(tables: Tables, nodes: Nodes, layout: Layout, replica: int, scratch: Scratch) -> None:
    """Make groups idle that got no layers."""
    while layout.seconds[replica] < np.inf:
        kept, first = 0, 0
        for stage in range(layout.stages[replica]):
            group, end = layout.order[replica, stage], layout.ends[replica, stage]
            if end == first:
                stand_by(layout, group)
            else:
                layout.order[replica, kept] = group
                kept += 1
            first = end
        if kept == layout.stages[replica]:
            return
        layout.stages[replica] = kept
        assess(tables, nodes, layout, replica, scratch)
