# SPDX-License-Identifier: Apache-2.0
"""Which mode runs a plan. May import this package."""

from megatron_resihp.executor.groups.side_group import MakeSideGroup
from megatron_resihp.integration.modes.heterogeneous import HeterogeneousMode
from megatron_resihp.integration.modes.mode import Mode
from megatron_resihp.integration.modes.shared_out import SharedOutMode
from megatron_resihp.integration.modes.uniform import UniformMode
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.world.heterogeneous import HeterogeneousView
from megatron_resihp.integration.world.view import UniformView
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.plan.spelling import spelled_out


def mode_of(runtime: Runtime, plan: ParallelPlan, make_group: MakeSideGroup) -> Mode:
    """This worker's mode under a plan, which need not be the one in force.

    Args:
        make_group: (name, workers) → a group outside torch's world; all of a plan's are made here.
    """
    if plan.not_uniform is not None:
        view = HeterogeneousView(spelled_out(plan, runtime.job.own.chunks), runtime.worker, runtime.job.own.tied_head)
        return HeterogeneousMode(runtime, view, make_group)
    kind = SharedOutMode if runtime.job.shares_optimizer else UniformMode
    pipeline_last, group = not runtime.job.args.use_tp_pp_dp_mapping, runtime.job.own.micro_batch_group
    return kind(runtime, UniformView(plan, runtime.worker, pipeline_last, group), make_group)
