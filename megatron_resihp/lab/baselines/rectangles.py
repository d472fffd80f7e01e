# SPDX-License-Identifier: Apache-2.0
"""What a job with a fixed mesh of devices can do: complete rectangles of its own degrees, and nothing else.

A rectangle has TP × PP × the replicas that share sequences or experts. One that lost a worker is left out whole, and
the others share out its micro-batches. Imports the standard library, `plan`, `cost` and `planner`.
"""

from dataclasses import replace
from itertools import batched

from megatron_resihp.cost.job import JobCost
from megatron_resihp.plan import ParallelPlan, Replica, deal, even_counts
from megatron_resihp.plan.rules import Sharing
from megatron_resihp.planner import NoPlanError
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.strategies.common import groups_in_nodes, next_plan, position_of, spelt_out


def rectangles(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    """The rectangles that are whole. When workers come back, they and those that are idle form more.

    Raises:
        NoPlanError: none is whole, memory is too small, or the batch isn't one that members run in step.
    """
    plan = spelt_out(plan, cost)
    sharing = cost.sharings[0]
    found = [each for each in batched(plan.replicas, sharing.together) if all(_is_whole(one, health) for one in each)]
    if not health.speed.keys() <= set(plan.members):
        found += _formed(found, plan, health, cost)
    if not found:
        count = len(plan.replicas) // sharing.together
        raise NoPlanError(f"each of the {count} rectangles of {sharing.together} replicas lost a worker")
    counts = _counts(len(found), sharing, cost)
    hands = deal(counts)
    kept = [one for rectangle in found[: len(counts) // sharing.in_step] for one in rectangle]
    replicas = [replace(each, micro_batches=hands[number // sharing.context]) for number, each in enumerate(kept)]
    return next_plan(replicas, plan, health, cost, sharing=sharing)


def _counts(rectangles: int, sharing: Sharing, cost: JobCost) -> list[int]:
    """Micro-batches of each sharer of a sequence, in at most so many rectangles. Members of one run as many rounds, of
    which some hold nothing where the batch doesn't divide."""
    rounds = -(-cost.micro_batches // sharing.in_step)
    lacking = rounds * sharing.in_step - cost.micro_batches
    used = min(rectangles, rounds - bool(lacking))
    if (lacking and cost.equal_rounds) or not used:
        raise NoPlanError(f"{cost.micro_batches} micro-batches can't be run by {sharing.in_step} replicas at a time")
    counts = [count for count in even_counts(rounds, used) for _ in range(sharing.in_step)]
    fewer = range(sharing.in_step - lacking, sharing.in_step)  # in the first one, which has most
    return [count - (number in fewer) for number, count in enumerate(counts)]


def _is_whole(replica: Replica, health: Health) -> bool:
    return all(worker in health.speed for worker, _ in replica.workers())


def _formed(
    whole: list[tuple[Replica, ...]], plan: ParallelPlan, health: Health, cost: JobCost
) -> list[tuple[Replica, ...]]:
    """Rectangles of workers that are in none of the whole ones."""
    model, together = plan.replicas[0], cost.sharings[0].together
    working = {worker for rectangle in whole for replica in rectangle for worker, _ in replica.workers()}
    free = set(health.live) - working
    groups = groups_in_nodes(free, max(model.shape), plan, health, cost)
    stages = len(model.stages)
    count = len(groups) // (together * stages)
    chosen = sorted(groups[: count * together * stages], key=lambda group: (group[0], position_of(group, plan)))
    # Those that share a stage are neighbours, as in the job's own layout.
    return [
        tuple(replace(model, stages=tuple(row[place::together])) for place in range(together))
        for row in batched(chosen, together * stages)
    ]
