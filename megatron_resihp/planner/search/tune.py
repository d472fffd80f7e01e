"""The second step of the search: each replica's pipeline tuned for itself.

Imports `plan`, `pipeline`, `cost` and `planner`.

Chunks, their places and the order of ops are what `pipeline.tuning` finds for the replica's groups; groups, replicas
and shares of the micro-batches stay.
"""

from dataclasses import replace

from megatron_resihp.cost.job import JobCost
from megatron_resihp.pipeline.program import ProgramError
from megatron_resihp.pipeline.tuning import tuned_pipeline
from megatron_resihp.plan import ParallelPlan, Replica
from megatron_resihp.planner.evaluation import timeline_of
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.pipelines import layout_of, pipeline_job, replica_of


def tuned(plan: ParallelPlan, health: Health, cost: JobCost, effort: int) -> ParallelPlan:
    """The plan with every replica's pipeline tuned where that makes it faster.

    Args:
        plan: says its layers, has no migrations.
        health, cost: of the workers and the job.
        effort: ops run in trials for each replica.
    """
    copies = len(plan.replicas)
    return replace(
        plan, replicas=tuple(_tuned(replica, copies, health, cost, effort) for replica in plan.replicas)
    )


def _tuned(replica: Replica, copies: int, health: Health, cost: JobCost, effort: int) -> Replica:
    if len(replica.stages) == 1:
        return replica
    job = pipeline_job(replica.stages, len(replica.micro_batches), copies, health, cost)
    try:
        found = tuned_pipeline(job, [layout_of(replica)], effort)
    except ProgramError:
        return replica
    if found.makespan >= timeline_of(replica, health, cost).makespan:
        return replica
    return replica_of(replica.stages, found.layout, found.program, replica.micro_batches)
