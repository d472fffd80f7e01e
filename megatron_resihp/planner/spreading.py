# SPDX-License-Identifier: Apache-2.0
"""Lays workers out so that no shard lives on one node only. Pure; imports only `plan`.

A tensor-parallel group keeps its workers; only which stage and replica it works on is chosen. So what a group needs of
a node's links it still has. Replicas are counted in a ring, in which each keeps the copy of its predecessor's part of a
distributed optimizer (`plan.copies`). Where neighbours in the ring are on different nodes, a part outlives a node, too.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from megatron_resihp.plan import Coordinate, ParallelPlan
from megatron_resihp.plan.copies import Edge, NodeOf, copies_at, expert_copies_at, far_apart

_Group = tuple[int, ...]
"""The tensor-parallel members of a stage, in order."""


def fatal_nodes(
    plan: ParallelPlan, node_of: NodeOf, shared_optimizer: bool, expert_copies: bool = False
) -> frozenset[int]:
    """The nodes each of which alone has some state that is nowhere else.

    Args:
        plan: with replicas of one shape.
        shared_optimizer: each replica has a part of the optimizer's state, and a copy of another replica's part.
        expert_copies: see `last_holders`.
    """
    found = set[int]()
    for coordinate in plan.grid.coordinates():
        for holders in last_holders(plan, coordinate, node_of, shared_optimizer, expert_copies):
            nodes = {node_of(worker) for worker in holders}
            if len(nodes) == 1:
                found |= nodes
        for owner, keeper in copies_at(plan, coordinate, node_of) if shared_optimizer else ():
            if node_of(owner) == node_of(keeper):
                found.add(node_of(owner))
    return frozenset(found)


def last_holders(
    plan: ParallelPlan, coordinate: Coordinate, node_of: NodeOf, shared_optimizer: bool, expert_copies: bool = False
) -> list[tuple[int, ...]]:
    """All workers that have a shard, by the share of its experts that they have. Copies of a shared optimizer's parts
    have experts, too, and may be with any of these workers.

    Args:
        expert_copies: experts that are held once have a copy with another worker, without a shared optimizer.
    """
    if plan.expert_parallel == 1 or (shared_optimizer and copies_at(plan, coordinate, node_of)):
        return [plan.grid.holders_of(coordinate)]
    copies: tuple[Edge, ...] = ()
    if expert_copies and not shared_optimizer:
        copies = expert_copies_at(plan, coordinate, node_of)
    owners = [plan.grid.workers_at(coordinate)[share :: plan.expert_parallel] for share in range(plan.expert_parallel)]
    return [(*those, *(keeper for owner, keeper in copies if owner in those)) for those in owners]


def spread(bases: Sequence[ParallelPlan], node_of: NodeOf, shared_optimizer: bool) -> ParallelPlan:
    """The layout with the fewest fatal nodes, and of several the one that is most like the first base.

    In order: each base, the same with replicas counted in another order stage by stage, and the first base with its
    groups dealt out to stages anew. Unless groups cross the borders of nodes, the last has no fatal node wherever
    that can be: with two nodes and two replicas or more; a shared optimizer needs three nodes, or an even number of
    replicas.

    Args:
        bases: layouts of the same workers, without standbys.
        shared_optimizer: see `fatal_nodes`.
    """
    best, fewest = bases[0], math.inf
    for layout in _candidates(bases, node_of):
        fatal = len(fatal_nodes(layout, node_of, shared_optimizer))
        if fatal < fewest:
            best, fewest = layout, fatal
        if not fatal:
            break
    return best


def _candidates(bases: Sequence[ParallelPlan], node_of: NodeOf) -> Iterator[ParallelPlan]:
    for base in bases:
        yield base
        yield _counted_anew(base, node_of)
    yield _dealt_out(bases[0], node_of)


def _counted_anew(plan: ParallelPlan, node_of: NodeOf) -> ParallelPlan:
    """Each stage keeps its groups; neighbours in the ring of replicas are on different nodes, as far as can be."""
    return _with_stages(plan, [_in_a_ring(groups, node_of) for groups in _groups_by_stage(plan)])


def _dealt_out(plan: ParallelPlan, node_of: NodeOf) -> ParallelPlan:
    """Each stage gets groups of as many nodes as can be, and at most half of its ring from one node."""
    left = defaultdict[int, list[_Group]](list)
    for groups in _groups_by_stage(plan):
        for group in groups:
            left[node_of(group[0])].append(group)
    most = max(len(plan.replicas) // 2, 1)
    stages = []
    for _ in range(plan.grid.pipeline_parallel):
        taken, groups = Counter[int](), list[_Group]()
        while len(groups) < len(plan.replicas):
            node = max(left, key=lambda node: (bool(left[node]), taken[node] < most, len(left[node]), -node))
            groups.append(left[node].pop(0))
            taken[node] += 1
        stages.append(_in_a_ring(groups, node_of))
    return _with_stages(plan, stages)


def _in_a_ring(groups: Sequence[_Group], node_of: NodeOf) -> list[_Group]:
    return far_apart(groups, lambda group: node_of(group[0]))


def _groups_by_stage(plan: ParallelPlan) -> list[list[_Group]]:
    return [[replica.stages[stage] for replica in plan.replicas] for stage in range(plan.grid.pipeline_parallel)]


def _with_stages(plan: ParallelPlan, stages: Sequence[Sequence[_Group]]) -> ParallelPlan:
    """The same plan with these groups. `stages`: for each, its groups by replica."""
    rows = zip(*stages, strict=True)
    return replace(plan, replicas=tuple(replace(old, stages=row) for old, row in zip(plan.replicas, rows, strict=True)))


class Homes:
    """On which nodes the shards live that workers hold, while some of them move to others.

    Args:
        held: the shard of each worker.
    """

    def __init__(self, held: Mapping[int, Coordinate | None], node_of: NodeOf) -> None:
        self._node_of = node_of
        self._held = dict(held)
        self._holders = defaultdict[Coordinate | None, Counter[int]](Counter)
        """For each shard how many workers of which node hold it."""
        for worker, shard in held.items():
            self._holders[shard][node_of(worker)] += 1

    def alone_after(self, worker: int, coordinate: Coordinate) -> int:
        """How many of the two shards, a worker's own and the one that it would move to, would then be on one node."""
        own, here = self._held[worker], self._node_of(worker)
        left = self._holders[own] - Counter([here])
        return (own is not None and len(left) == 1) + (not self._holders[coordinate].keys() - {here})

    def move(self, worker: int, coordinate: Coordinate) -> None:
        """The worker now holds another shard."""
        here = self._node_of(worker)
        self._holders[self._held[worker]] -= Counter([here])
        self._held[worker] = coordinate
        self._holders[coordinate][here] += 1
