# SPDX-License-Identifier: Apache-2.0
"""The second step of the search: each replica's pipeline tuned for itself.

Imports `plan`, `pipeline`, `cost` and `planner`.

Chunks, their places and the order of ops are what `pipeline.search.tuning` finds for the replica's groups; groups,
replicas and shares of the micro-batches stay.
"""

from dataclasses import replace
from functools import lru_cache

from megatron_resihp.cost.job import JobCost
from megatron_resihp.pipeline.program import ProgramError
from megatron_resihp.pipeline.search.job import Layout, PipelineJob
from megatron_resihp.pipeline.search.tuning import tuned_pipeline
from megatron_resihp.plan import ParallelPlan, Replica
from megatron_resihp.plan.rules import check_ops
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
    alike: dict[tuple[object, ...], Replica | None] = {}
    keys = [_key(replica, health) for replica in plan.replicas]
    share = effort // len(set(keys))
    for key, replica in zip(keys, plan.replicas, strict=True):
        if key not in alike:
            alike[key] = _tuned(replica, len(plan.replicas), health, cost, share)
    return replace(
        plan,
        replicas=tuple(_like(alike[key], replica) for key, replica in zip(keys, plan.replicas, strict=True)),
    )


def _key(replica: Replica, health: Health) -> tuple[object, ...]:
    """Equal for replicas whose pipelines are tuned alike; with slow links none are."""
    speeds = tuple(min(health.speed[worker] for worker in members) for members in replica.stages)
    return replica.shape, speeds, replica.chunks, len(replica.micro_batches), replica.stages if health.link else ()


def _like(found: Replica | None, replica: Replica) -> Replica:
    """The replica with the chunks and order of ops of what was found for those that are just like it, if anything."""
    if found is None:
        return replica
    schedule = found.schedule
    if schedule is not None:
        schedule = schedule.renamed(found.micro_batches, replica.micro_batches)
    return replace(replica, chunks=found.chunks, schedule=schedule)


def _tuned(replica: Replica, copies: int, health: Health, cost: JobCost, effort: int) -> Replica | None:
    """What is faster than the replica as it is, for other workers and micro-batches."""
    if len(replica.stages) == 1:
        return None
    job = pipeline_job(replica.stages, len(replica.micro_batches), copies, health, cost)
    try:
        found, makespan = _pipeline(job, layout_of(replica), effort)
    except ProgramError:
        return None
    return found if makespan < timeline_of(replica, health, cost).makespan else None


@lru_cache(maxsize=256)
def _pipeline(job: PipelineJob, known: Layout, effort: int) -> tuple[Replica, float]:
    """What was found, with devices as workers and micro-batches from 0 on, and its makespan.

    Kept, because most replicas are as they were when something happened to another one.
    """
    found = tuned_pipeline(job, [known], effort)
    devices = [(device,) for device in range(job.devices)]
    replica = replica_of(devices, found.layout, found.program, range(job.micro_batches))
    check_ops(replica)
    return replica, found.makespan
