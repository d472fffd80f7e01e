# SPDX-License-Identifier: Apache-2.0
"""Forms the tensor-parallel group of each stage: ResiHP's TP step. Imports `plan` and this package."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron_resihp.plan import ParallelPlan
from megatron_resihp.planner.health import Health

Group = tuple[int, ...]


@dataclass(frozen=True)
class Grouping:
    """The groups of a plan's replicas, and the workers left over.

    Attributes:
        groups: of each stage of each replica, in tensor-parallel order; empty if the stage is dead there.
        free: live workers outside all groups, sorted.
    """

    groups: tuple[tuple[Group, ...], ...]
    free: Group


@dataclass
class _Pool:
    """Free workers by node."""

    workers_per_node: int
    nodes: dict[int, list[int]] = field(default_factory=dict)

    def add(self, workers: Iterable[int]) -> None:
        for worker in workers:
            self.nodes.setdefault(worker // self.workers_per_node, []).append(worker)

    def take(self, workers: Iterable[int]) -> None:
        for worker in workers:
            self.nodes[worker // self.workers_per_node].remove(worker)

    def beside(self, group: Group) -> Group:
        """Free workers in the group's node."""
        return tuple(sorted(self.nodes.get(group[0] // self.workers_per_node, ()))) if group else ()

    @property
    def all(self) -> Group:
        return tuple(sorted(worker for workers in self.nodes.values() for worker in workers))


def strength(group: Sequence[int], health: Health) -> float:
    """k · min p of a group; 0 if it is empty."""
    return len(group) * min((health.speed[worker] for worker in group), default=0.0)


def fastest(members: Sequence[int], degrees: Sequence[int], health: Health) -> Group:
    """S* = argmax over k of k · min p, where k takes the k fastest members. Empty if there are too few members.

    Source: ResiHP, arXiv 2605.06374, TP adaptation. Where the text leaves it open, equal k · min p go to the smallest
    k, since a member of a smaller group works more efficiently.

    Args:
        members: G', in the order of preference among equally fast ones; the result keeps it.
        degrees: K, ascending.
        health: of all members.
    """
    by_speed = sorted(range(len(members)), key=lambda place: -health.speed[members[place]])
    candidates = [tuple(members[place] for place in sorted(by_speed[:k])) for k in degrees if k <= len(members)]
    return max(candidates, key=lambda group: strength(group, health), default=())


def regroup(
    plan: ParallelPlan, health: Health, degrees: Sequence[int], smallest: Sequence[int], workers_per_node: int
) -> Grouping:
    """The TP step for all stages of all replicas.

    Each group first keeps the best of its own live members. Then free workers are offered to the groups of their node:
    first to dead stages, then to the weakest groups. Free workers are those that their group left over, and those that
    came back and are not in the plan. A dead stage has no node, so it is offered the free workers of every node.

    Args:
        plan: its replicas have the same number of stages.
        health: of all live workers.
        degrees: the allowed degrees, ascending.
        smallest: k_min of each stage; smaller degrees count only if no degree from k_min up has enough members.
        workers_per_node: groups stay inside a node.
    """
    pool = _Pool(workers_per_node)
    placed = set(plan.working)
    pool.add(worker for worker in health.live if worker not in placed)
    groups: dict[tuple[int, int], Group] = {}
    for number, replica in enumerate(plan.replicas):
        for stage, members in enumerate(replica.stages):
            live = tuple(worker for worker in members if worker in health.speed)
            kept = _best(live, degrees, smallest[stage], health)
            groups[number, stage] = kept
            pool.add(worker for worker in live if worker not in kept)
    for place in sorted(groups, key=lambda place: (strength(groups[place], health), place[1], place[0])):
        own = groups[place]
        offers = [pool.beside(own)] if own else [tuple(sorted(workers)) for workers in pool.nodes.values()]
        candidates = [own, *(_best(own + offer, degrees, smallest[place[1]], health) for offer in offers)]
        best = max(candidates, key=lambda group: strength(group, health))
        pool.take(worker for worker in best if worker not in own)
        pool.add(worker for worker in own if worker not in best)
        groups[place] = best
    rows = (tuple(groups[number, stage] for stage in range(len(smallest))) for number in range(len(plan.replicas)))
    return Grouping(tuple(rows), pool.all)


def _best(members: Group, degrees: Sequence[int], smallest: int, health: Health) -> Group:
    enough = [degree for degree in degrees if degree >= smallest]
    return fastest(members, enough, health) or fastest(members, degrees, health)
