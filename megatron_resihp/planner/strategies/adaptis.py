# SPDX-License-Identifier: Apache-2.0
"""AdaPtis / OctoPipe (arXiv 2509.23722): tunes partition, placement and schedule of each pipeline together.

Imports the standard library, `plan`, `pipeline`, `cost` and this package.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from megatron_resihp.cost.job import JobCost
from megatron_resihp.pipeline.program import ProgramError
from megatron_resihp.pipeline.search.job import Layout, PipelineJob
from megatron_resihp.pipeline.search.tuning import Pipeline, tuned_pipeline
from megatron_resihp.plan import ParallelPlan, Replica, deal
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.job_shape import NoPlanError
from megatron_resihp.planner.pipelines import layout_of, pipeline_job, replica_of
from megatron_resihp.planner.shares import fastest_shares
from megatron_resihp.planner.steps.groups import fastest, strength
from megatron_resihp.planner.strategies.common import Group, groups_in_nodes, job_degree, next_plan, spelt_out
from megatron_resihp.planner.strategy import Strategy

EFFORT = 1_000_000
"""Ops that trials run for each pipeline while a job waits for its next plan."""


def adaptis(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    """Tune every replica's pipeline for its remaining devices; see `pipeline.search.tuning`.

    The paper is about models whose layers differ and does not cover failures. Here a tensor-parallel group goes on with
    its live members and free workers of its node: the power of two with the greatest strength. A group without members
    leaves its pipeline. Other free workers form groups that join the weakest replicas. The rest of a pipeline is tuned
    as devices of unequal speed. Micro-batches are distributed by the replicas' speeds. If a replica does not fit into
    memory, the weakest replica is left out. The plan in force stays if it is at least as fast.

    Raises:
        NoPlanError: no replica fits into memory.
    """
    return _tuned_plan(plan, health, cost, EFFORT)


def with_effort(effort: int) -> Strategy:
    """`adaptis` whose trials run `effort` ops for each pipeline."""
    return partial(_tuned_plan, effort=effort)


def _tuned_plan(plan: ParallelPlan, health: Health, cost: JobCost, effort: int) -> ParallelPlan:
    plan = spelt_out(plan, cost)
    rows = _groups(plan, health, cost)
    reason = "no worker is left that can form a group"
    while rows:
        known = dict.fromkeys(layout_of(replica) for replica in plan.replicas)
        try:
            replicas = _tuned(rows, known, health, cost, effort)
            return _no_slower(next_plan(replicas, plan, health, cost), plan, health, cost)
        except (ProgramError, NoPlanError) as error:
            reason = str(error)
        rows = _without_weakest(rows, health)
    raise NoPlanError(f"no pipeline fits: {reason}")


def _groups(plan: ParallelPlan, health: Health, cost: JobCost) -> list[list[Group]]:
    """The tensor-parallel groups of each replica, in the order of its stages; replicas without any are left out."""
    most = job_degree(plan, cost)
    degrees = [k for k in cost.degrees if k <= most and k.bit_count() == 1 and not cost.uneven(k)]
    rows = [
        [fastest([worker for worker in group if worker in health.speed], degrees, health) for group in replica.stages]
        for replica in plan.replicas
    ]
    rows = [row for row in ([group for group in row if group] for row in rows) if row] or [[]]
    free = set(health.live) - {worker for row in rows for group in row for worker in group}
    for row in rows:
        for place, group in enumerate(row):
            node = group[0] // cost.workers_per_node
            mates = [worker for worker in sorted(free) if worker // cost.workers_per_node == node]
            stronger = fastest([*group, *mates], degrees, health)
            if strength(stronger, health) > strength(group, health):
                row[place] = stronger
                free = (free | set(group)) - set(stronger)
    for group in groups_in_nodes(free, most, plan, health, cost):
        min(rows, key=lambda row: _strength(row, health)).append(group)
    return [row[: cost.layers] for row in rows if row][: cost.micro_batches]


def _strength(row: Sequence[Group], health: Health) -> float:
    return sum(strength(group, health) for group in row)


def _without_weakest(rows: list[list[Group]], health: Health) -> list[list[Group]]:
    weakest = min(range(len(rows)), key=lambda number: (_strength(rows[number], health), -number))
    return rows[:weakest] + rows[weakest + 1 :]


def _tuned(
    rows: Sequence[Sequence[Group]], known: Iterable[Layout], health: Health, cost: JobCost, effort: int
) -> list[Replica]:
    """Replicas of these groups.

    Raises:
        ProgramError: a replica does not fit into memory.
    """
    alone = [pipeline_job(row, 1, len(rows), health, cost) for row in rows]
    counts = fastest_shares([(float(job.work.sum(axis=1).mean()), job.floor) for job in alone], cost.micro_batches)
    replicas = []
    for row, job, share in zip(rows, alone, deal(counts), strict=True):
        usable = tuple(layout for layout in known if set(layout.homes) == set(range(job.devices)))
        found = _pipeline(replace(job, micro_batches=len(share)), usable, effort)
        replicas.append(replica_of(row, found.layout, found.program, share))
    return replicas


@lru_cache(maxsize=256)
def _pipeline(job: PipelineJob, known: tuple[Layout, ...], effort: int) -> Pipeline:
    """Cached, because replicas are often equal and a job's devices return to earlier states."""
    return tuned_pipeline(job, known, effort)


def _no_slower(following: ParallelPlan, plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    """The plan in force if its workers are alive, it fits, and it is at least as fast; otherwise `following`."""
    if all(worker in health.speed for worker in plan.working):
        try:
            staying = next_plan(plan.replicas, plan, health, cost, plan.migrations)
        except NoPlanError:
            return following
        if evaluate(staying, health, cost).iteration_s <= evaluate(following, health, cost).iteration_s:
            return staying
    return following
