# SPDX-License-Identifier: Apache-2.0
"""Local search over groups, their replicas and their order. Imports numpy and numba."""

from functools import partial
from typing import Final

import numpy as np

from megatron_resihp.pipeline.compiled import compiled
from megatron_resihp.planner.search.groups import Nodes, degree_of, first_of, group_at, node_of
from megatron_resihp.planner.search.layout import (
    Layout,
    assess,
    copy_layout,
    insert,
    new_layout,
    new_scratch,
    remove,
    stand_by,
    take_idle,
)
from megatron_resihp.planner.search.share import level
from megatron_resihp.planner.search.tables import Tables

_TIE: Final = 1e-4
"""Weight of the mean makespan against the longest; it separates layouts whose longest makespans are equal."""
_THRESHOLD: Final = 0.1
"""Largest share by which the first move may worsen the score."""
_OFTEN: Final = 0.8
"""Share of moves that touch the slowest replica; other moves touch any replica."""
_TWICE: Final = 0.3
"""Share of steps with two moves; two layouts that fit may have none that fits between them."""
_JOIN: Final = 0.7
"""Share of new cuts that join two groups first."""
_MOVES: Final = 5
NOTHING: Final = -1
IDLE: Final = -2


@compiled
def score_of(layout: Layout) -> float:
    """Seconds of the slowest replica, with a small part of the mean."""
    return layout.seconds.max() * (1 - _TIE) + layout.seconds.mean() * _TIE


@partial(compiled, without_lock=True)
def improve(tables: Tables, nodes: Nodes, layout: Layout, steps: int, seed: int) -> None:
    """Random moves, kept if they worsen the score little, and ever less so; leaves the best layout in place.

    Source: Dueck and Scheuer, Threshold accepting, J. of Computational Physics 90 (1990).

    Args:
        tables: what work costs.
        nodes: live workers.
        layout: a layout that fits.
        steps: how many moves are tried.
        seed: for the random choices.
    """
    np.random.seed(seed)
    replicas, most_stages = layout.order.shape
    scratch = new_scratch(most_stages)
    before = new_layout(replicas, most_stages, len(layout.idle))
    best = new_layout(replicas, most_stages, len(layout.idle))
    copy_layout(layout, before)
    copy_layout(layout, best)
    score = least = score_of(layout)
    for step in range(steps):
        one = int(np.argmax(layout.seconds)) if np.random.random() < _OFTEN else np.random.randint(replicas)
        other = third = _move(tables, nodes, layout, one, np.random.randint(replicas))
        if other != NOTHING and np.random.random() < _TWICE:
            third = _move(tables, nodes, layout, one, np.random.randint(replicas))
        if other != NOTHING and third != NOTHING:
            assess(tables, nodes, layout, one, scratch)
            if other != one:
                assess(tables, nodes, layout, other, scratch)
            if third != one and third != other:
                assess(tables, nodes, layout, third, scratch)
            level(tables, nodes, layout, scratch)
            after = score_of(layout)
            if after <= score * (1 + _THRESHOLD * (1 - step / steps) * np.random.random()):
                score = after
                copy_layout(layout, before)
                if score < least:
                    least = score
                    copy_layout(layout, best)
                continue
        copy_layout(before, layout)
    copy_layout(best, layout)


@compiled
def _move(tables: Tables, nodes: Nodes, layout: Layout, one: int, other: int) -> int:
    """Change a replica at random, and perhaps another, whose index is returned; NOTHING if the move failed."""
    move = np.random.randint(_MOVES)
    if move == 0:
        return other if _swap(layout, one, other) else NOTHING
    if move == 1:
        return other if _shift(layout, one, other) else NOTHING
    if move == 2:
        return other if _shift(layout, other, one) else NOTHING
    if move == 3:
        return one if _use_idle(layout, one) else NOTHING
    return _cut_anew(tables, nodes, layout, one, other)


@compiled
def _swap(layout: Layout, one: int, other: int) -> bool:
    """Exchange two groups; both may be of the same replica."""
    first, second = np.random.randint(layout.stages[one]), np.random.randint(layout.stages[other])
    held = layout.order[one, first]
    layout.order[one, first] = layout.order[other, second]
    layout.order[other, second] = held
    return one != other or first != second


@compiled
def _shift(layout: Layout, source: int, target: int) -> bool:
    """Move a group to another place, of the same replica or another one."""
    if source != target and (layout.stages[source] == 1 or layout.stages[target] == layout.order.shape[1]):
        return False
    group = remove(layout, source, np.random.randint(layout.stages[source]))
    insert(layout, target, np.random.randint(layout.stages[target] + 1), group)
    return True


@compiled
def _use_idle(layout: Layout, replica: int) -> bool:
    """Put an idle group in, take one out, or both."""
    idle, stages = layout.idle_count[0], layout.stages[replica]
    put, take = np.random.random() < 0.67, np.random.random() < 0.67
    if put and (idle == 0 or (not take and stages == layout.order.shape[1])):
        return False
    if take and not put and stages == 1:
        return False
    place = np.random.randint(stages)
    taken = remove(layout, replica, place) if take else -1
    if put:
        insert(layout, replica, place, take_idle(layout, np.random.randint(idle)))
    if take:
        stand_by(layout, taken)
    return put or take


@compiled
def _cut_anew(tables: Tables, nodes: Nodes, layout: Layout, one: int, other: int) -> int:
    """Cut a group in two, or move or drop the cut between it and the next; returns the other changed replica."""
    stage = np.random.randint(layout.stages[one])
    group = layout.order[one, stage]
    node, first, degree = node_of(nodes, group), first_of(nodes, group), degree_of(nodes, group)
    where, place = _find(nodes, layout, node, first + degree)
    join = where != NOTHING and np.random.random() < _JOIN
    total = degree
    if join:
        total += degree_of(nodes, layout.idle[place] if where == IDLE else layout.order[where, place])
    cut = np.random.randint(total) + 1
    if cut == degree or tables.rate[cut] == 0 or (cut < total and tables.rate[total - cut] == 0):
        return NOTHING
    layout.order[one, stage] = group_at(nodes, node, first, cut)
    rest = group_at(nodes, node, first + cut, total - cut) if cut < total else NOTHING
    if join:
        return _replace(layout, where, place, rest, one)
    if layout.stages[other] == layout.order.shape[1]:
        return NOTHING
    insert(layout, other, np.random.randint(layout.stages[other] + 1), rest)
    return other


@compiled
def _replace(layout: Layout, where: int, place: int, group: int, one: int) -> int:
    """Replace a group with another, or with nothing; returns the replica that changes besides `one`."""
    if where == IDLE:
        take_idle(layout, place)
        if group != NOTHING:
            stand_by(layout, group)
        return one
    if group != NOTHING:
        layout.order[where, place] = group
        return where
    if layout.stages[where] == 1:
        return NOTHING
    remove(layout, where, place)
    return where


@compiled
def _find(nodes: Nodes, layout: Layout, node: int, first: int) -> tuple[int, int]:
    """Replica (or IDLE) and place of the group that begins at `first`; NOTHING if there is none."""
    for place in range(layout.idle_count[0]):
        if node_of(nodes, layout.idle[place]) == node and first_of(nodes, layout.idle[place]) == first:
            return IDLE, place
    for replica in range(len(layout.stages)):
        for place in range(layout.stages[replica]):
            group = layout.order[replica, place]
            if node_of(nodes, group) == node and first_of(nodes, group) == first:
                return replica, place
    return NOTHING, 0
