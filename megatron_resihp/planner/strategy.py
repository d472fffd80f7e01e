# SPDX-License-Identifier: Apache-2.0
"""The signature of every strategy: plan, health and cost → next plan. Imports `plan`, `cost` and this package."""

from typing import Protocol

from megatron_resihp.cost.job import JobCost
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.planner.health import Health


class Strategy(Protocol):
    """A way to plan; a pure function."""

    def __call__(self, plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
        """The next plan.

        Args:
            plan: the plan in force; its workers may be dead by now, and it may lack some live workers.
            health: of all live workers.
            cost: what work costs in this job.

        Raises:
            NoPlanError: this strategy finds no plan that fits the survivors; the message says why.
        """
