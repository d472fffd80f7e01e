# SPDX-License-Identifier: Apache-2.0
"""How the plans of a strategy are run and reached. Imports numpy, `plan`, `cost` and this package."""

from collections.abc import Mapping
from typing import Final, Protocol

from megatron_resihp.cost.job import JobCost
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.planner.evaluation import Evaluation, evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.moves import bytes_to_move
from megatron_resihp.planner.strategies.common import require_state


class Running(Protocol):
    """What plans stand for, which some baselines run otherwise than plans say."""

    def evaluate(self, plan: ParallelPlan, health: Health, cost: JobCost) -> Evaluation:
        """Its simulated times."""

    def bytes_to_move(self, before: ParallelPlan, after: ParallelPlan, cost: JobCost) -> Mapping[int, float]:
        """Weights and optimizer state that each worker lacks of the next plan."""

    def require_state(self, plan: ParallelPlan, health: Health, cost: JobCost) -> None:
        """Raises NoPlanError unless the live workers hold all state together."""


class AsPlanned:
    """What a plan says, and nothing else."""

    def evaluate(self, plan: ParallelPlan, health: Health, cost: JobCost) -> Evaluation:
        return evaluate(plan, health, cost)

    def bytes_to_move(self, before: ParallelPlan, after: ParallelPlan, cost: JobCost) -> Mapping[int, float]:
        return bytes_to_move(before, after, cost)

    def require_state(self, plan: ParallelPlan, health: Health, cost: JobCost) -> None:
        require_state(plan, health, cost.training, lambda worker: worker // cost.workers_per_node)


AS_PLANNED: Final = AsPlanned()
