"""The second step of the search: each replica's pipeline tuned for itself.

Imports `plan`, `pipeline`, `cost` and `planner`.

Chunks, their places and the order of ops are what `pipeline.tuning` finds for the replica's groups; groups, replicas
and shares of the micro-batches stay.
"""

from dataclasses import replace
from functools import lru_cache

from megatron_resihp.cost.job import JobCost
from megatron_resihp.pipeline.job import Layout, PipelineJob
from megatron_resihp.pipeline.program import ProgramError
from megatron_resihp.pipeline.tuning import Pipeline, tuned_pipeline
from megatron_resihp.plan import ParallelPlan, Replica
from megatron_resihp.planner.evaluation import timeline_of
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.pipelines import layout_of, pipeline_job, replica_of


def tuned(plan: ParallelPlan, health: Health, cost: JobCost, effort: int) -> ParallelPlan:
    """The plan with every replica's pipeline tuned where that makes it faster.

    Args:
        plan: says its layers, has no migrations.
        health, cost: of the workers and the job.
        effort: ops run in trials, for all replicas together; of those that are alike one is tuned.
    """
    alike: dict[tuple[object, ...], Replica] = {}
    keys = [_key(replica, health) for replica in plan.replicas]
    share = effort // len(set(keys))
    for key, replica in zip(keys, plan.replicas, strict=True):
        if key not in alike:
            alike[key] = _tuned(replica, len(plan.replicas), health, cost, share)
    return replace(
        plan,
        replicas=tuple(
            _like(alike[key], replica) for key, replica in zip(keys, plan.replicas, strict=True)
        ),
    )


def _key(replica: Replica, health: Health) -> tuple[object, ...]:
    """Equal for replicas whose pipelines are tuned alike; with slow links none are."""
    speeds = tuple(min(health.speed[worker] for worker in members) for members in replica.stages)
    return replica.shape, speeds, replica.chunks, len(replica.micro_batches), replica.stages if health.link else ()


def _like(tuned_one: Replica, replica: Replica) -> Replica:
    """The replica with the chunks and order of ops of one that is just like it."""
    schedule = tuned_one.schedule
    if schedule is not None and schedule.orders:
        index = dict(zip(tuned_one.micro_batches, replica.micro_batches, strict=True))
        orders = tuple(
            tuple(op._replace(micro_batch=index[op.micro_batch]) for op in order) for order in schedule.orders
        )
        schedule = replace(schedule, orders=orders)
    return replace(replica, chunks=tuned_one.chunks, schedule=schedule)


def _tuned(replica: Replica, copies: int, health: Health, cost: JobCost, effort: int) -> Replica:
    if len(replica.stages) == 1:
        return replica
    job = pipeline_job(replica.stages, len(replica.micro_batches), copies, health, cost)
    try:
        found = _pipeline(job, layout_of(replica), effort)
    except ProgramError:
        return replica
    if found.makespan >= timeline_of(replica, health, cost).makespan:
        return replica
    return replica_of(replica.stages, found.layout, found.program, replica.micro_batches)


@lru_cache(maxsize=256)
def _pipeline(job: PipelineJob, known: Layout, effort: int) -> Pipeline:
    """Kept, because most replicas are as they were when something happened to another one."""
    return tuned_pipeline(job, [known], effort)
