"""From the current plan, the health of what is left and what work costs to the next plan. Pure functions, no torch.

Imports numpy, scipy, `plan`, `pipeline` and `cost`. `rectangular` serves what the executor can run today; `strategies`
holds everything else.
"""

from megatron_resihp.planner.rectangular import JobShape, NoPlanError, initial_plan, plan_rectangular

__all__ = ["JobShape", "NoPlanError", "initial_plan", "plan_rectangular"]
