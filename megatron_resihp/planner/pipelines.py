# SPDX-License-Identifier: Apache-2.0
"""Converts replicas to and from pipelines for tuning. Imports numpy, `plan`, `pipeline`, `cost` and this package."""

from collections.abc import Sequence

import numpy as np

from megatron_resihp.cost.job import JobCost
from megatron_resihp.pipeline.planned import explicit_schedule
from megatron_resihp.pipeline.program import Program
from megatron_resihp.pipeline.search.job import Layout, PipelineJob
from megatron_resihp.plan import Chunk, Replica, Schedule
from megatron_resihp.plan.schedule import INTERLEAVED, ONE_F_ONE_B
from megatron_resihp.planner.health import Health

Group = tuple[int, ...]


def pipeline_job(
    groups: Sequence[Group], micro_batches: int, copies: int, health: Health, cost: JobCost
) -> PipelineJob:
    """The work of one replica, with its tensor-parallel groups as devices.

    Memory is that of `cost.memory.check_plan` or a little more. It assumes that recomputation needs the same memory on
    every device, and that a tied head needs its copy of the embedding on every device.

    Args:
        groups: the workers of each group.
        micro_batches: how many this replica runs.
        copies: how many replicas hold each layer.
        health, cost: of the workers and the job.

    Raises:
        ShardError: a group has a degree that cannot share the model's layers.
    """
    degrees = [len(group) for group in groups]
    speeds = [min(health.speed[worker] for worker in group) for group in groups]
    sizes = [cost.bytes(degree, copies) for degree in degrees]
    transfers = [[cost.transfer(len(a), len(b)) / health.between(a, b) for b in groups] for a in groups]
    return PipelineJob(
        seconds=np.array([cost.seconds(degree) / speed for degree, speed in zip(degrees, speeds, strict=True)]),
        transfers=np.array(transfers),
        micro_batches=micro_batches,
        state=np.array([size.state for size in sizes]),
        kept=np.array([size.kept for size in sizes]),
        limit=np.array([cost.device.memory - size.working.max() for size in sizes]),
        beside=cost.beside,
    )


def layout_of(replica: Replica) -> Layout:
    """The layout of a replica whose layers are given."""
    return Layout((0, *(chunk.end for chunk in replica.chunks)), replica.stage_of_chunk)


def replica_of(groups: Sequence[Group], layout: Layout, program: Program, micro_batches: Sequence[int]) -> Replica:
    """Convert a layout and a program to a replica.

    Args:
        groups: the workers of each device.
        layout, program: what they run; a program without W uses Megatron's own schedule.
        micro_batches: global-batch indices of the program's micro-batches 0, 1, …
    """
    chunks = tuple(map(Chunk, layout.homes, layout.cuts, layout.cuts[1:]))
    if program.splits_backward:
        schedule = explicit_schedule(program, micro_batches)
    else:
        schedule = Schedule(INTERLEAVED if program.stages > program.devices else ONE_F_ONE_B)
    return Replica(tuple(groups), tuple(micro_batches), chunks, schedule)
