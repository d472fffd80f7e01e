# SPDX-License-Identifier: Apache-2.0
"""The usual answer to a failure: restart the job from its last checkpoint on the live workers.

Imports the standard library, `plan`, `cost` and this package.
"""

from itertools import batched

from megatron_resihp.cost.job import JobCost
from megatron_resihp.plan import ParallelPlan, Replica
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.strategies.common import (
    evenly_shared,
    groups_in_nodes,
    job_degree,
    next_plan,
    position_of,
    spelt_out,
)
from megatron_resihp.planner.uniform import NoPlanError


def restart(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    """Complete replicas of the job's own TP × PP and layers, as many as survivors can form and the batch divides by.

    Schedulers and users differ here. This strategy uses the remaining workers of a node that lost some, if they make
    whole tensor-parallel groups. The global batch must be a multiple of the number of replicas, as unmodified Megatron
    demands. If more groups exist than are needed, the fastest are used.

    Raises:
        NoPlanError: too few workers for one replica, or too little memory for the remaining replicas.
    """
    plan = spelt_out(plan, cost)
    degree, original = job_degree(plan, cost), plan.replicas[0]
    groups = groups_in_nodes(health.live, degree, plan, health, cost)
    stages = len(original.stages)
    most = min(len(groups) // stages, cost.micro_batches)
    replicas = next((count for count in range(most, 0, -1) if cost.micro_batches % count == 0), 0)
    if not replicas:
        raise NoPlanError(f"{len(groups)} groups of {degree} workers are left; a replica takes {stages}")
    chosen = sorted(groups[: replicas * stages], key=lambda group: position_of(group, plan))
    formed = [Replica(tuple(row), (), original.chunks) for row in batched(chosen, stages)]
    return next_plan(evenly_shared(formed, cost), plan, health, cost)
