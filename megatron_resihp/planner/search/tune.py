# SPDX-License-Identifier: Apache-2.0
"""The second step of the search: tunes each replica's pipeline.

Imports `plan`, `pipeline`, `cost` and `planner`.

`pipeline.search.tuning` finds chunks, their places and the order of ops for the replica's groups; groups, replicas and
shares of the micro-batches stay.
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
        plan: with layers and without migrations.
        health, cost: of the workers and the job.
        effort: ops that trials run, for all replicas together; equal replicas are tuned once.
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
    """A key that is equal for replicas with the same tuned pipeline; with slow links, each replica differs."""
    speeds = tuple(min(health.speed[worker] for worker in members) for members in replica.stages)
    return replica.shape, speeds, replica.chunks, len(replica.micro_batches), replica.stages if health.link else ()


def _like(found: Replica | None, replica: Replica) -> Replica:
    """The replica with the chunks and order of ops found for its equals, if any."""
    if found is None:
        return replica
    schedule = found.schedule
    if schedule is not None:
        schedule = schedule.renamed(found.micro_batches, replica.micro_batches)
    return replace(replica, chunks=found.chunks, schedule=schedule)


def _tuned(replica: Replica, copies: int, health: Health, cost: JobCost, effort: int) -> Replica | None:
    """A faster replica, possibly with other workers' and micro-batches' ids; None if none is faster."""
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
    """The replica found, with devices as workers and micro-batches numbered from 0, and its makespan.

    Cached, because most replicas stay unchanged when another one changes.
    """
    found = tuned_pipeline(job, [known], effort)
    devices = [(device,) for device in range(job.devices)]
    replica = replica_of(devices, found.layout, found.program, range(job.micro_batches))
    check_ops(replica)
    return replica, found.makespan
