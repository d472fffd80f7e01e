# SPDX-License-Identifier: Apache-2.0
"""Chooses which worker keeps a copy of whose part of a distributed optimizer, and of whose experts. Pure; imports this
package only.

Each part exists once, on the replica that owns it. So the holders of a shard of the model form a ring, working holders
first, and each holder also keeps its predecessor's part. A standby owns no part, and keeps one. Where replicas share
experts, those with the same experts form a ring of their own. If there is one of each only, all form one:
then an expert's copy is with a worker that doesn't have it, and on another node, as far as can be. Where several
instances of the optimizer have each expert once, neighbours in a ring are in different instances and own the same part:
then there are no copies.

Without a distributed optimizer every holder of a shard has all of its state. Only experts may be held once: where all
replicas share them. Then the holders of a shard form a ring, too, and each keeps a copy of its predecessor's experts.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from megatron_resihp.plan.parallel_plan import ParallelPlan
from megatron_resihp.plan.replica import Coordinate

Edge = tuple[int, int]
"""Owner of a part, and its buddy, the worker that keeps a copy of it or owns it, too."""
NodeOf = Callable[[int], int]
"""Tells a worker's node."""


def rings_at(plan: ParallelPlan, coordinate: Coordinate, node_of: NodeOf) -> tuple[tuple[int, ...], ...]:
    """The holders of one shard, in the rings that they form."""
    holders, shares = plan.grid.holders_of(coordinate), plan.expert_parallel
    if shares == 1:
        return (holders,)
    if shares == len(holders):
        return (tuple(far_apart(holders, node_of)),)
    return tuple(holders[share::shares] for share in range(shares))


def instances_under(plan: ParallelPlan, own: int) -> int:
    """How many instances of the optimizer a plan has, each of which has all of its state.

    Args:
        own: how many the job asks for. There is one where that doesn't divide the replicas that have the same experts,
            as Megatron needs, or leaves each replica on its own: it would keep a copy of what it has.
    """
    replicas = len(plan.replicas)
    return own if replicas > own and replicas // plan.expert_parallel % own == 0 else 1


def keeps_copies(plan: ParallelPlan, instances: int) -> bool:
    """Whether buddies keep copies. They don't where they own the same part: each instance has each expert once then,
    and those with the same experts are in different instances."""
    return instances == 1 or len(plan.replicas) > instances * plan.expert_parallel


def kept_copies(plan: ParallelPlan, instances: int, node_of: NodeOf) -> dict[int, int]:
    """By each worker that keeps a copy, the owner of that part."""
    if not keeps_copies(plan, instances):
        return {}
    return {buddy: owner for each in plan.grid.coordinates() for owner, buddy in copies_at(plan, each, node_of)}


def copies_at(plan: ParallelPlan, coordinate: Coordinate, node_of: NodeOf) -> tuple[Edge, ...]:
    """Owners and buddies of the parts of one shard; empty if no other worker can have a part, too."""
    owners = plan.grid.workers_at(coordinate)
    return tuple(
        (owner, ring[(index + 1) % len(ring)])
        for ring in rings_at(plan, coordinate, node_of)
        for index, owner in enumerate(ring)
        if owner in owners and len(ring) > 1
    )


def expert_copies_at(plan: ParallelPlan, coordinate: Coordinate, node_of: NodeOf) -> tuple[Edge, ...]:
    """Owners of the experts of one shard, and the workers that keep copies of these; empty unless each expert is held
    once. As far as can be, a copy is on another node than its owner."""
    workers = plan.grid.workers_at(coordinate)
    if not 1 < len(workers) == plan.expert_parallel:
        return ()
    ring = far_apart(workers, node_of)
    return tuple((owner, ring[(index + 1) % len(ring)]) for index, owner in enumerate(ring))


def kept_expert_copies(plan: ParallelPlan, node_of: NodeOf) -> dict[int, int]:
    """By each worker that keeps a copy of experts, their owner."""
    if plan.expert_parallel == 1:  # also where stages differ
        return {}
    return {
        keeper: owner for each in plan.grid.coordinates() for owner, keeper in expert_copies_at(plan, each, node_of)
    }


def far_apart[Member](members: Sequence[Member], node_of: Callable[[Member], int]) -> list[Member]:
    """The members in a ring in which neighbours are on different nodes, unless a node has more than half of them.

    Nodes take every second place, the one with most members first, and then the places between.
    """
    count = Counter(map(node_of, members))
    by_node = sorted(members, key=lambda member: (-count[node_of(member)], node_of(member)))
    places = [*range(0, len(members), 2), *range(1, len(members), 2)]
    return [member for _, member in sorted(zip(places, by_node, strict=True), key=lambda pair: pair[0])]


def in_turns(edges: Sequence[Edge]) -> list[Edge]:
    """Order the edges of a ring for three turns, so that all can pass something on while they wait for each other."""
    last = len(edges) - 1
    closes = len(edges) % 2 == 1 and last > 0 and edges[last][1] == edges[0][0]
    turns = {edge: 2 if closes and index == last else index % 2 for index, edge in enumerate(edges)}
    return sorted(edges, key=lambda edge: (turns[edge], edge))


def lost_parts(plan: ParallelPlan, survivors: Collection[int], node_of: NodeOf) -> tuple[Coordinate, ...]:
    """The shards that have a part whose owner and buddy are both gone."""
    found = []
    for coordinate in plan.grid.coordinates():
        buddies = dict(copies_at(plan, coordinate, node_of))
        gone = (owner for owner in plan.grid.workers_at(coordinate) if owner not in survivors)
        if any(buddies.get(owner) not in survivors for owner in gone):
            found.append(coordinate)
    return tuple(found)
