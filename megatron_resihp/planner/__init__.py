# SPDX-License-Identifier: Apache-2.0
"""Makes the next plan from the current plan, the health of the live workers, and the cost of work.

Pure functions, no torch. Imports numpy, scipy, `plan`, `pipeline` and `cost`. `uniform` plans what the executor can run
without a strategy; `strategies` holds everything else.
"""

from megatron_resihp.planner.job_shape import JobShape, NoPlanError
from megatron_resihp.planner.uniform import initial_plan, plan_uniform

__all__ = ["JobShape", "NoPlanError", "initial_plan", "plan_uniform"]
