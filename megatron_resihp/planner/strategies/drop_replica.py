# SPDX-License-Identifier: Apache-2.0
"""The simplest way to go on without a restart: leave out each replica that lost a worker.

Imports the standard library, `plan`, `cost` and this package.
"""

from dataclasses import replace
from itertools import batched

from megatron_resihp.cost.job import JobCost
from megatron_resihp.plan import ParallelPlan, Replica
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.job_shape import NoPlanError
from megatron_resihp.planner.strategies.common import (
    evenly_shared,
    groups_in_nodes,
    job_degree,
    next_plan,
    position_of,
    spelt_out,
)


def drop_replica(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    """Replicas that lost no worker share the batch; live workers of the other replicas become standbys.

    When workers come back, they and the standbys form more replicas.

    Raises:
        NoPlanError: every replica lost a worker, or memory is too small for the optimizer's share of the rest.
    """
    plan = spelt_out(plan, cost)
    whole = [replica for replica in plan.replicas if _is_whole(replica, health)]
    if not whole:
        raise NoPlanError(f"each of the {len(plan.replicas)} replicas lost a worker")
    if not health.speed.keys() <= set(plan.members):
        whole += _formed(whole, plan, health, cost)
    return next_plan(evenly_shared(whole[: cost.micro_batches], cost), plan, health, cost)


def _is_whole(replica: Replica, health: Health) -> bool:
    return all(replica.stages) and all(worker in health.speed for worker, _ in replica.workers())


def _formed(whole: list[Replica], plan: ParallelPlan, health: Health, cost: JobCost) -> list[Replica]:
    """Replicas like the first of the whole ones, formed from workers that are in none of them."""
    degree, model = job_degree(plan, cost), whole[0]
    working = {worker for replica in whole for worker, _ in replica.workers()}
    groups = groups_in_nodes(set(health.live) - working, degree, plan, health, cost)
    count = len(groups) // len(model.stages)
    chosen = sorted(groups[: count * len(model.stages)], key=lambda group: position_of(group, plan))
    rows = batched(chosen, len(model.stages))
    return [replace(model, stages=tuple(row)) for row in rows]
