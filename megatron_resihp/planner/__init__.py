# SPDX-License-Identifier: Apache-2.0
"""From the current plan, the health of what is left and what work costs to the next plan. Pure functions, no torch.

Imports numpy, scipy, `plan`, `pipeline` and `cost`. `uniform` serves what the executor can run today; `strategies`
holds everything else.
"""

from megatron_resihp.planner.uniform import JobShape, NoPlanError, initial_plan, plan_uniform

__all__ = ["JobShape", "NoPlanError", "initial_plan", "plan_uniform"]
