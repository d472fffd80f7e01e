# SPDX-License-Identifier: Apache-2.0
"""Strategies for dead workers followed by Greyhound for slow ones, as ResiHP's evaluation puts them together.

Imports `plan`, `cost` and this package.
"""

from megatron_resihp.cost.job import JobCost
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.strategies.greyhound import greyhound
from megatron_resihp.planner.strategies.oobleck import oobleck
from megatron_resihp.planner.strategies.recycle import recycle


def recycle_greyhound(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    """ReCycle's plan for the live workers, then Greyhound's for their speeds (ResiHP, arXiv 2605.06374, section 8).

    Raises:
        NoPlanError: as in either strategy.
    """
    return greyhound(recycle(plan, health, cost), health, cost)


def oobleck_greyhound(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    """Oobleck's pipelines of live workers, then Greyhound's shares and places (ResiHP, arXiv 2605.06374, section 8).

    Raises:
        NoPlanError: as in either strategy.
    """
    return greyhound(oobleck(plan, health, cost), health, cost)
