# SPDX-License-Identifier: Apache-2.0
"""What every strategy is: current plan, health and cost → the next plan. Imports `plan`, `cost` and this package."""

from typing import Protocol

from megatron_resihp.cost.job import JobCost
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.planner.health import Health


class Strategy(Protocol):
    """A way to plan; a pure function."""

    def __call__(self, plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
        """The next plan.

        Args:
            plan: the one in force; its workers may be dead by now, and live workers may be missing in it.
            health: of all live workers.
            cost: what work costs in this job.

        Raises:
            NoPlanError: nothing that this strategy can do fits the survivors; the message says why.
        """
