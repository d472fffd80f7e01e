# SPDX-License-Identifier: Apache-2.0
"""The usual answer to a failure: restart the job from its last checkpoint on the live workers.

Imports the standard library, `plan`, `cost` and this package.
"""

from dataclasses import replace
from itertools import batched
from math import isinf

from megatron_resihp.cost.job import JobCost
from megatron_resihp.plan import ParallelPlan, Replica, deal, even_counts
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.job_shape import NoPlanError
from megatron_resihp.planner.strategies.common import (
    Group,
    groups_in_nodes,
    job_degree,
    next_plan,
    position_of,
    spelt_out,
)


def restart(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    """Complete replicas of the job's own TP × PP and layers, as many as survivors can form and the batch divides by.

    As many of them share sequences or experts as in the job's own layout, so that what remains of such a group is of no
    use. Schedulers and users differ here. This strategy uses the remaining workers of a node that lost some, if they
    make whole tensor-parallel groups. The global batch must be a multiple of the number of replicas, as unmodified
    Megatron demands. If more groups exist than are needed, the fastest are used.

    Raises:
        NoPlanError: too few workers for one replica, or too little memory for the remaining replicas.
    """
    plan = spelt_out(plan, cost)
    sharing, original = cost.sharings[0], plan.replicas[0]
    degree = job_degree(plan, cost)
    groups = groups_in_nodes(health.live, degree, plan, health, cost)
    stages, together = len(original.stages), sharing.together
    block = stages * together
    most = min(len(groups) // block, cost.micro_batches // sharing.in_step)
    blocks = next((count for count in range(most, 0, -1) if cost.micro_batches % (count * sharing.in_step) == 0), 0)
    if not blocks:
        needed = f"a replica takes {stages}" if together == 1 else f"{together} replicas that share take {block}"
        raise NoPlanError(f"{len(groups)} groups of {degree} workers are left; {needed}")

    def place(group: Group) -> tuple[float, ...]:
        replica, stage = position_of(group, plan)
        return (replica if isinf(replica) else replica // together, stage, replica)

    chosen = sorted(groups[: blocks * block], key=place)
    formed = [
        Replica(tuple(row[number::together]), (), original.chunks)
        for row in batched(chosen, block)
        for number in range(together)
    ]
    hands = deal(even_counts(cost.micro_batches, len(formed) // sharing.context))
    replicas = [replace(each, micro_batches=hands[n // sharing.context]) for n, each in enumerate(formed)]
    return next_plan(replicas, plan, health, cost, sharing=sharing)
