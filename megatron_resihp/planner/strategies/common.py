# SPDX-License-Identifier: Apache-2.0
"""Parts that several published strategies share: layers, groups inside nodes, standbys, the final check.

Imports the standard library, `plan`, `cost` and this package.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Final

from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.memory import check_plan, with_layers
from megatron_resihp.cost.room import check_change
from megatron_resihp.cost.training import Training
from megatron_resihp.plan import Kept, Migration, ParallelPlan, PlanError, Replica, deal, even_counts
from megatron_resihp.plan.copies import NodeOf, lost_parts
from megatron_resihp.plan.rules import Sharing
from megatron_resihp.plan.spelling import shortened
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.job_shape import NoPlanError

NOTHING_SHARED: Final = Sharing()
Group = tuple[int, ...]
"""The members of a tensor-parallel group."""


def spelt_out(plan: ParallelPlan, cost: JobCost) -> ParallelPlan:
    """The plan with the layers of each stage, also where it leaves them to the job's own split.

    Raises:
        NoPlanError: the plan's layers differ from the model's.
    """
    try:
        return replace(plan, replicas=tuple(with_layers(replica, cost.model) for replica in plan.replicas))
    except PlanError as error:
        raise NoPlanError(f"the current plan doesn't fit the job: {error}") from None


def job_degree(plan: ParallelPlan, cost: JobCost) -> int:
    """The job's tensor-parallel degree: the largest even power of two in the plan. Published strategies keep it."""
    largest = max(degree for replica in plan.replicas for degree in replica.shape)
    usable = [k for k in cost.degrees if k <= largest and k.bit_count() == 1 and not cost.uneven(k)]
    if not usable:
        raise NoPlanError(f"no power of two up to {largest} can share the model's layers evenly")
    return max(usable)


def has_room_to_change(before: ParallelPlan, after: ParallelPlan, cost: JobCost) -> bool:
    """Whether the states of both plans fit into memory together, as an optional change needs."""
    if before.replicas == after.replicas:
        return True
    try:
        check_change(before, after, cost.model, cost.training, cost.device.memory, cost.device.host)
    except PlanError:
        return False
    return True


def require_state(plan: ParallelPlan, health: Health, training: Training, node_of: NodeOf) -> None:
    """Raises NoPlanError unless the live workers of a plan with layers hold the state of every layer together.

    Parts of a distributed optimizer are with their owners and with the workers that keep copies. Parameters are
    masters, rounded. So a part may have experts that no survivor holds.
    """
    alike = len({replica.shape for replica in plan.replicas}) == len(set(plan.replicas[0].shape)) == 1
    in_parts = alike and training.under(plan).distributed_optimizer
    require_parameters(replace(plan, expert_parallel=1, uneven_experts=0) if in_parts else plan, health)
    lost = lost_parts(shortened(plan, plan.replicas[0].chunks), health.live, node_of) if in_parts else ()
    if lost:
        shards = ", ".join(f"stage {stage} TP rank {tp_rank}" for stage, tp_rank in lost)
        raise NoPlanError(f"a part of the optimizer's state of {shards} died with its copy")


def require_parameters(plan: ParallelPlan, health: Health) -> None:
    """Raises NoPlanError unless the live workers hold the parameters of every layer together."""
    held: dict[tuple[int, int], set[tuple[Fraction, Fraction]]] = defaultdict(set)
    for shard in {shard for worker in plan.members if worker in health.speed for shard in plan.shards_of(worker)}:
        part = (Fraction(shard.tp_rank, shard.tp_degree), Fraction(shard.tp_rank + 1, shard.tp_degree))
        for layer in range(shard.first, shard.end):
            held[layer, shard.expert_rank].add(part)
    for layer, share in product(range(plan.replicas[0].chunks[-1].end), range(plan.expert_parallel)):
        reached = Fraction(0)
        for first, end in sorted(held[layer, share]):
            reached = max(reached, end) if first <= reached else reached
        if reached < 1:
            experts = f", share {share} of {plan.expert_parallel} of its experts" if plan.expert_parallel > 1 else ""
            raise NoPlanError(f"the state of layer {layer}{experts} is not held by the survivors")


def groups_in_nodes(
    workers: Iterable[int], degree: int, plan: ParallelPlan, health: Health, cost: JobCost
) -> list[Group]:
    """As many groups of a degree as each node's workers can form, fastest groups first; similar speeds share a group.

    Equally fast workers that are mates in the plan stay together.
    """

    def preference(group: Group) -> tuple[float, float, float, Group]:
        return (-speed_of(group, health), *position_of(group, plan), group)

    nodes: dict[int, list[int]] = defaultdict(list)
    for worker in sorted(workers, key=lambda worker: preference((worker,))):
        nodes[worker // cost.workers_per_node].append(worker)
    groups = [
        tuple(sorted(members[first : first + degree]))
        for members in nodes.values()
        for first in range(0, len(members) - degree + 1, degree)
    ]
    return sorted(groups, key=preference)


def groups_that_came_back(
    plan: ParallelPlan, used: Iterable[Group], degree: int, health: Health, cost: JobCost
) -> list[Group]:
    """Whole groups of workers that came back; the workers are in no used group.

    A whole group is a block of workers as Megatron numbers them. If groups were mixed since, workers that are new to
    the plan join free workers of their node. So the remains of two broken groups form no new group.
    """
    working = {worker for group in used for worker in group}
    nodes: dict[int, list[int]] = defaultdict(list)
    for worker in health.live:
        if worker not in working:
            nodes[worker // cost.workers_per_node].append(worker)
    known = set(plan.members)
    return [group for free in nodes.values() for group in _whole_groups(free, known, degree)]


def _whole_groups(free: list[int], known: set[int], degree: int) -> Iterator[Group]:
    """Whole groups of a node's free workers; see `groups_that_came_back`."""
    left = set(free)
    for first in free:
        block = range(first, first + degree)
        if first % degree == 0 and left.issuperset(block):
            left.difference_update(block)
            yield tuple(block)
    while len(left) >= degree and left - known:
        group = sorted(left, key=lambda worker: (worker in known, worker))[:degree]
        left.difference_update(group)
        yield tuple(sorted(group))


def position_of(group: Group, plan: ParallelPlan) -> tuple[float, float]:
    """Replica and stage of the first group member that has work in the plan; infinite if no member has."""
    places = [(plan.replica_of(worker), plan.coordinate_of(worker)) for worker in group]
    known = [(float(replica), float(place.stage)) for replica, place in places if replica is not None and place]
    return min(known, default=(float("inf"), float("inf")))


def all_well(health: Health) -> Health:
    """Full speed for all live workers: the health for strategies that ignore slow workers and links."""
    return Health({worker: 1.0 for worker in health.live})


def speed_of(group: Sequence[int], health: Health) -> float:
    """A group is as fast as its slowest member."""
    return min(health.speed[worker] for worker in group)


def with_shares(replicas: Sequence[Replica], counts: Sequence[int]) -> tuple[Replica, ...]:
    """The replicas with `counts` micro-batches; an explicit order of ops for other micro-batches is dropped."""
    changed = []
    for replica, share in zip(replicas, deal(counts), strict=True):
        orders = replica.schedule.orders if replica.schedule else ()
        schedule = None if orders and {op.micro_batch for op in orders[0]} != set(share) else replica.schedule
        changed.append(replace(replica, micro_batches=share, schedule=schedule))
    return tuple(changed)


def evenly_shared(replicas: Sequence[Replica], cost: JobCost) -> tuple[Replica, ...]:
    """The replicas with even shares of the global batch; each of them must get work."""
    return with_shares(replicas, even_counts(cost.micro_batches, len(replicas)))


def next_plan(
    replicas: Sequence[Replica],
    plan: ParallelPlan,
    health: Health,
    cost: JobCost,
    migrations: tuple[Migration, ...] = (),
    sharing: Sharing = NOTHING_SHARED,
    context_groups: tuple[int, ...] = (),
) -> ParallelPlan:
    """A plan of these replicas; all other live workers are standbys that keep the state they hold, or nothing.

    Args:
        replicas: with layers and micro-batches.
        plan: the plan in force, with layers.
        health, cost: as for a strategy.
        migrations: between the replicas.
        sharing, context_groups: of the replicas.

    Raises:
        NoPlanError: the plan breaks a rule of plans or does not fit in memory.
    """
    working = {worker for replica in replicas for worker, _ in replica.workers()}
    # Shares of experts are of no use to a standby, as plans may share them otherwise.
    useful = max(plan.expert_parallel, sharing.experts) == 1
    standbys: dict[int, Kept] = {
        worker: (plan.shards_of(worker) or None) if useful else None for worker in health.live if worker not in working
    }
    uneven = any(cost.uneven(degree) for replica in replicas for degree in set(replica.shape) - {0})
    # With fewer holders, shares of a distributed optimizer are larger, so a standby may lack room for its old state.
    for kept in (standbys, dict.fromkeys(standbys)):
        try:
            following = ParallelPlan(tuple(replicas), kept, migrations, uneven, *sharing, context_groups)
            check_plan(following, cost.model, cost.training, cost.device.memory)
        except PlanError as error:
            reason = str(error)
        else:
            return following
    raise NoPlanError(reason)
