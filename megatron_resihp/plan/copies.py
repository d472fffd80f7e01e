# SPDX-License-Identifier: Apache-2.0
"""Chooses which worker keeps a copy of which part of a distributed optimizer. Pure; imports this package only.

Each part exists once, on the replica that owns it. So the holders of a shard of the model form a ring, working holders
first, and each holder also keeps its predecessor's part. A standby owns no part, and keeps one.
"""

from collections.abc import Collection, Sequence

from megatron_resihp.plan.parallel_plan import ParallelPlan
from megatron_resihp.plan.replica import Coordinate

Edge = tuple[int, int]
"""Owner of a part, and the worker that keeps its copy."""


def copies_at(plan: ParallelPlan, coordinate: Coordinate) -> tuple[Edge, ...]:
    """Owners and buddies of the parts of one shard, by replica; empty if no other worker can keep a copy."""
    ring = plan.grid.holders_of(coordinate)
    if len(ring) < 2:
        return ()
    return tuple((owner, ring[(index + 1) % len(ring)]) for index, owner in enumerate(plan.grid.workers_at(coordinate)))


def in_turns(edges: Sequence[Edge]) -> list[Edge]:
    """Order the edges of a ring for three turns, so that all can pass something on while they wait for each other."""
    last = len(edges) - 1
    closes = len(edges) % 2 == 1 and last > 0 and edges[last][1] == edges[0][0]
    turns = {edge: 2 if closes and index == last else index % 2 for index, edge in enumerate(edges)}
    return sorted(edges, key=lambda edge: (turns[edge], edge))


def lost_parts(plan: ParallelPlan, survivors: Collection[int]) -> tuple[Coordinate, ...]:
    """The shards that have a part whose owner and buddy are both gone."""
    found = []
    for coordinate in plan.grid.coordinates():
        buddies = dict(copies_at(plan, coordinate))
        gone = (owner for owner in plan.grid.workers_at(coordinate) if owner not in survivors)
        if any(buddies.get(owner) not in survivors for owner in gone):
            found.append(coordinate)
    return tuple(found)
