# SPDX-License-Identifier: Apache-2.0
"""Makespans of plans as in `evaluation`, without programs where the order of ops is known.

Imports numpy, `plan`, `cost` and this package.
"""

import numpy as np

from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.memory import with_layers
from megatron_resihp.plan import ParallelPlan, Replica
from megatron_resihp.plan.parallel_plan import sharing_of
from megatron_resihp.plan.schedule import ONE_F_ONE_B, ZERO_BUBBLE
from megatron_resihp.planner.evaluation import evaluate, stage_seconds, transfer_seconds
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.search.makespan import pipeline_makespan

_KNOWN = (ONE_F_ONE_B, ZERO_BUBBLE)


def iteration_seconds(plan: ParallelPlan, health: Health, cost: JobCost) -> float:
    """Same as `evaluate(…).iteration_s`.

    Raises:
        PlanError: the plan's layers differ from the model's.
        KeyError: a working worker is dead.
    """
    replicas = [with_layers(replica, cost.model) for replica in plan.replicas]
    if plan.migrations or sharing_of(plan) > 1 or not all(map(_has_known_order, replicas)):
        return evaluate(plan, health, cost).iteration_s
    known: dict[tuple[object, ...], float] = {}
    for replica in replicas:
        speeds = tuple(min(health.speed[worker] for worker in members) for members in replica.stages)
        key = (replica.shape, speeds, replica.chunks, replica.schedule, len(replica.micro_batches))
        if health.link or key not in known:
            known[replica.stages if health.link else key] = _seconds(replica, health, cost)
    return max(known.values()) + cost.sums(plan)


def _has_known_order(replica: Replica) -> bool:
    straight = replica.stage_of_chunk == tuple(range(len(replica.stages)))
    return straight and (replica.schedule is None or replica.schedule.name in _KNOWN) and all(replica.stages)


def _seconds(replica: Replica, health: Health, cost: JobCost) -> float:
    stages = len(replica.stages)
    transfer = np.append(transfer_seconds(replica, health, cost)[0, :, 0], 0.0)
    forward, backward, weight = stage_seconds(replica, health, cost)
    free, done = np.empty((2, stages))
    micro_batches = len(replica.micro_batches)
    return pipeline_makespan(forward, backward, weight, transfer, stages, micro_batches, free, done)
