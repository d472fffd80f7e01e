"""From the survivors and what they hold to the next plan. Pure functions; imports only `plan`, no torch."""

from megatron_resihp.planner.rectangular import JobShape, NoPlanError, initial_plan, plan_rectangular

__all__ = ["JobShape", "NoPlanError", "initial_plan", "plan_rectangular"]
