# SPDX-License-Identifier: Apache-2.0
"""ReCycle (Gandhi et al., SOSP 2024, arXiv 2405.14009): peers do a dead stage's work in their pipelines' bubbles.

Imports the standard library, `plan`, `cost` and this package.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from megatron_resihp.cost.job import JobCost
from megatron_resihp.plan import ParallelPlan, Replica
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.job_shape import NoPlanError
from megatron_resihp.planner.steps.rerouting import rerouted
from megatron_resihp.planner.strategies.common import (
    Group,
    all_well,
    evenly_shared,
    groups_that_came_back,
    next_plan,
    spelt_out,
)


def recycle(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    """Micro-batches of a dead stage go through that stage in other replicas; everything else stays where it is.

    1. A dead worker takes its tensor-parallel group with it: the group's stage is dead in its replica. Groups that are
    whole again take a dead stage's place.
    2. Failure normalization: it matters how many replicas lost each stage, not which. Whole groups move between stages
    where that makes the slowest stage faster.
    3. Adaptive pipelining: the live peers of a dead stage take its micro-batches in turns.
    4. Decoupled back-propagation: B and W are separate ops in replicas that take part, as far as memory allows. The
    paper's schedules come from a MILP that is solved offline; here they come from list scheduling with several policies
    (`pipeline.search.rerouted`).
    5. The staggered optimizer lets the stages begin the next iteration one by one. The plan leaves it out, since no
    strategy is judged by more than one iteration here, and a step before every stage's gradients are known cannot clip
    by their norm.

    Where the text leaves it open: peers must have the same layers, and pipelines have one chunk per stage (1F1B). The
    strategy ignores slow workers: it orders ops as if all workers were healthy.

    Raises:
        NoPlanError: a stage lost all its data-parallel peers, replicas' layers differ, or memory is too small.
    """
    plan = spelt_out(plan, cost)
    rows = [[_whole(members, health) for members in replica.stages] for replica in plan.replicas]
    if any(() in row for row in rows):
        if len({replica.chunks for replica in plan.replicas}) > 1 or len(plan.replicas[0].chunks) > len(rows[0]):
            raise NoPlanError("ReCycle needs replicas with the same layers, each stage's in one chunk")
        _require_peers(rows)
        _fill(rows, plan, health, cost)
        _normalize(rows, _stage_seconds(plan.replicas[0], rows, cost), cost.micro_batches)
    alive = [
        replace(replica, stages=tuple(row), schedule=None if () in row or plan.migrations else replica.schedule)
        for replica, row in zip(plan.replicas, rows, strict=True)
        if any(row)
    ]
    replicas, migrations = rerouted(evenly_shared(alive, cost), all_well(health), cost)
    return next_plan(replicas, plan, health, cost, migrations)


def _whole(members: Group, health: Health) -> Group:
    """The group, or an empty group if one of its members died."""
    return members if all(worker in health.speed for worker in members) else ()


def _require_peers(rows: Sequence[Sequence[Group]]) -> None:
    for stage, groups in enumerate(zip(*rows, strict=True)):
        if not any(groups):
            raise NoPlanError(f"stage {stage} lost all its data-parallel peers")


def _fill(rows: list[list[Group]], plan: ParallelPlan, health: Health, cost: JobCost) -> None:
    """Put groups that came back at dead stages: the stage whose layers they hold, else the one with the most deaths."""
    used = [group for row in rows for group in row]
    degree = max(map(len, used))
    for block in groups_that_came_back(plan, used, degree, health, cost):
        holes = [(r, s) for r, row in enumerate(rows) for s, group in enumerate(row) if not group]
        if not holes:
            return
        first_held = {shard.first for shard in plan.shards_of(block[0])}
        dead = [sum(not row[stage] for row in rows) for stage in range(len(rows[0]))]
        replica, stage = min(
            holes, key=lambda hole: (plan.replicas[0].chunks[hole[1]].first not in first_held, -dead[hole[1]], hole)
        )
        rows[replica][stage] = block


def _stage_seconds(replica: Replica, rows: Sequence[Sequence[Group]], cost: JobCost) -> list[float]:
    """Seconds of a micro-batch in each stage, on a healthy group."""
    degrees = [max(map(len, groups)) for groups in zip(*rows, strict=True)]
    return [
        float(cost.seconds(degree)[:, chunk.first : chunk.end].sum())
        for degree, chunk in zip(degrees, replica.chunks, strict=True)
    ]


def _normalize(rows: list[list[Group]], seconds: Sequence[float], micro_batches: int) -> None:
    """Move groups from other stages to the slowest one, while this makes the slower of the two faster."""
    while True:
        live = [sum(map(bool, groups)) for groups in zip(*rows, strict=True)]

        def busy(stage: int, change: int = 0, live: Sequence[int] = live) -> float:
            peers = live[stage] + change
            return seconds[stage] * ceil(micro_batches / peers) if peers else float("inf")

        slowest = max(range(len(seconds)), key=busy)
        holes = [row for row in rows if not row[slowest]]
        givers = [
            stage
            for stage in range(len(seconds))
            if max(busy(stage, -1), busy(slowest, 1)) < busy(slowest) and stage != slowest
        ]
        if not holes or not givers:
            return
        giver = min(givers, key=lambda stage: busy(stage, -1))
        source = next((row for row in holes if row[giver]), None) or next(row for row in rows if row[giver])
        target = source if not source[slowest] else holes[0]
        target[slowest], source[giver] = source[giver], ()
