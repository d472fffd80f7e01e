# SPDX-License-Identifier: Apache-2.0
"""Converts a layout of the search to a plan. Imports `plan`, `cost` and this package."""

from megatron_resihp.cost.job import JobCost
from megatron_resihp.plan import Chunk, Kept, ParallelPlan, Replica, Schedule, deal
from megatron_resihp.plan.schedule import ZERO_BUBBLE
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.search.groups import Nodes, members_of
from megatron_resihp.planner.search.layout import Layout


def plan_of(layout: Layout, nodes: Nodes, splits_backward: bool, health: Health, cost: JobCost) -> ParallelPlan:
    """The layout as a plan; workers without work are standbys that hold nothing.

    Args:
        layout, nodes: what the search found.
        splits_backward: whether its order of ops is ZB-H1 instead of 1F1B.
        health: of the workers that the plan covers.
        cost: of the job.
    """
    stages = [
        tuple(members_of(nodes, group) for group in layout.order[replica, :count].tolist())
        for replica, count in enumerate(layout.stages.tolist())
    ]
    hands = deal(layout.micro_batches.tolist())
    schedule = Schedule(ZERO_BUBBLE) if splits_backward else None
    replicas = tuple(
        Replica(groups, hand, _chunks(layout.ends[number, : len(groups)].tolist()), schedule)
        for number, (groups, hand) in enumerate(zip(stages, hands, strict=True))
    )
    working = {worker for groups in stages for members in groups for worker in members}
    standbys: dict[int, Kept] = {worker: None for worker in sorted(health.speed.keys() - working)}
    uneven = any(cost.uneven(degree) for degree in {len(members) for groups in stages for members in groups})
    return ParallelPlan(replicas, standbys, uneven_shards=uneven)


def _chunks(ends: list[int]) -> tuple[Chunk, ...]:
    return tuple(Chunk(stage, first, end) for stage, (first, end) in enumerate(zip([0, *ends], ends, strict=False)))
