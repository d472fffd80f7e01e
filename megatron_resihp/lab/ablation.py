# SPDX-License-Identifier: Apache-2.0
"""ResiHP without some of its steps, with whatever the remaining steps achieve. Imports `plan`, `cost` and `planner`.

ResiHP's steps (arXiv 2605.06374): TP makes groups smaller, PP gives slow stages fewer layers, DP moves work between
replicas.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from megatron_resihp.cost.job import JobCost
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.planner import NoPlanError
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.strategies.common import evenly_shared, next_plan, spelt_out
from megatron_resihp.planner.strategies.registry import STRATEGIES, Change, Entry, ReactsTo

_RESIHP: Final = STRATEGIES["resihp-paper"].strategy


def without_tp(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    """PP and DP alone: a group that lost a member is dead as a whole, and a group with a slow member is slow as a
    whole.

    Raises:
        NoPlanError: as in `resihp-paper`.
    """
    groups = [members for replica in plan.replicas for members in replica.stages]
    whole = [members for members in groups if members and health.speed.keys() >= set(members)]
    level = {worker: min(health.speed[w] for w in members) for members in whole for worker in members}
    if not level:
        raise NoPlanError("each group of workers lost a member")
    links = {pair: speed for pair, speed in health.link.items() if set(pair) <= level.keys()}
    found = _RESIHP(plan, Health(level, links), cost)
    return next_plan(found.replicas, spelt_out(plan, cost), health, cost, found.migrations)


def without_dp(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    """TP and PP alone: micro-batches are dealt evenly, and replicas with a dead stage are dropped.

    Raises:
        NoPlanError: no replica is complete; otherwise as in `resihp-paper`.
    """
    found = _RESIHP(plan, health, cost)
    complete = [replace(replica, schedule=None, micro_batches=()) for replica in found.replicas if all(replica.stages)]
    if not complete:
        raise NoPlanError("no replica is complete")
    return next_plan(evenly_shared(complete, cost), spelt_out(plan, cost), health, cost)


def only_tp(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    """TP alone: like `without_dp`, but the layers stay where they are.

    Raises:
        NoPlanError: the layers do not fit in the memory of the remaining groups; otherwise as in `without_dp`.
    """
    plan = spelt_out(plan, cost)
    found, chunks = without_dp(plan, health, cost), plan.replicas[0].chunks
    if len(found.replicas[0].stages) != len(plan.replicas[0].stages):
        raise NoPlanError("a stage is dead in every replica")
    return next_plan([replace(replica, chunks=chunks) for replica in found.replicas], plan, health, cost)


ABLATION: Final[Mapping[str, Entry]] = {
    "resihp-paper": STRATEGIES["resihp-paper"],
    "without TP": Entry(without_tp, "", Change.IN_PLACE, ReactsTo.BOTH),
    "without DP": Entry(without_dp, "", Change.IN_PLACE, ReactsTo.BOTH),
    "TP alone": Entry(only_tp, "", Change.IN_PLACE, ReactsTo.BOTH),
}
