# SPDX-License-Identifier: Apache-2.0
"""What a running job does where replicas share experts or sequences: complete replicas of its own TP × PP.

Imports the standard library, `plan`, `cost` and this package.
"""

from dataclasses import replace

from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.memory import check_plan
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.plan.layers import interleaves
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.job_shape import JobShape
from megatron_resihp.planner.strategies.common import next_plan, spelt_out
from megatron_resihp.planner.uniform import plan_uniform, plan_with_room


def uniform(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    """As many complete replicas as survivors can form. Of these, as many share each sequence and each layer's experts
    as need the least time, if work is proportional to a worker's tokens, and as fit into memory. Speeds don't count.

    Raises:
        NoPlanError: too few survivors for one replica, a shard without a living holder, or too little memory.
    """
    plan = spelt_out(plan, cost)
    first = plan.replicas[0]
    shape = JobShape(
        tensor_parallel=max(first.shape),
        pipeline_parallel=len(first.stages),
        micro_batches=cost.micro_batches,
        workers_per_node=cost.workers_per_node,
        micro_batch_group=len(first.stages) if interleaves(first.chunks) else None,
        distributed_optimizer=cost.training.distributed_optimizer,
        sharings=cost.sharings,
        equal_rounds=cost.equal_rounds,
        unlike_context=not cost.model.experts,
    )
    held = {worker: plan.coordinate_of(worker) for worker in health.live}

    def make(shape: JobShape) -> ParallelPlan:
        found = plan_uniform(shape, held, plan)
        return replace(found, replicas=tuple(replace(each, chunks=first.chunks) for each in found.replicas))

    def check(found: ParallelPlan) -> None:
        check_plan(found, cost.model, cost.training, cost.device.memory)

    found = plan_with_room(shape, make, check)
    return next_plan(found.replicas, plan, health, cost, sharing=found.sharing, context_groups=found.context_groups)
