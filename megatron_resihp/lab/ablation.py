# SPDX-License-Identifier: Apache-2.0
"""ResiHP without some of its steps, each as far as it can go without them. Imports `plan`, `cost` and `planner`.

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
    """PP and DP alone: a group that lost a member is lost as a whole, and one with a slow member is slow as a whole.

    Raises:
        NoPlanError: as `resihp-paper` does.
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
    """TP and PP alone: micro-batches are dealt evenly, and replicas with a stage that nobody is left of are dropped.

    Raises:
        NoPlanError: no replica is complete; else as `resihp-paper` does.
    """
    found = _RESIHP(plan, health, cost)
    complete = [replace(replica, schedule=None, micro_batches=()) for replica in found.replicas if all(replica.stages)]
    if not complete:
        raise NoPlanError("no replica is complete")
    return next_plan(evenly_shared(complete, cost), spelt_out(plan, cost), health, cost)


def only_tp(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    """TP alone: as `without_dp`, and the layers stay where they are.

    Raises:
        NoPlanError: they don't fit in the memory of the groups that are left; else as `without_dp` does.
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
