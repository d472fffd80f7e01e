# SPDX-License-Identifier: Apache-2.0
"""How many micro-batches each replica runs. Imports numpy, `cost`, `plan` and this package."""

import heapq
from collections.abc import Sequence

from megatron_resihp.cost.job import JobCost
from megatron_resihp.plan import Replica
from megatron_resihp.planner.evaluation import stage_seconds, transfer_seconds
from megatron_resihp.planner.health import Health


def pace_of(replica: Replica, health: Health, cost: JobCost) -> tuple[float, float]:
    """Seconds that 1F1B takes for the first micro-batch, transfers included, and for each further one."""
    per_chunk = stage_seconds(replica, health, cost).sum(axis=0)
    per_stage = [0.0] * len(replica.stages)
    for chunk, seconds in zip(replica.chunks, per_chunk, strict=True):
        per_stage[chunk.stage] += float(seconds)
    return float(per_chunk.sum() + transfer_seconds(replica, health, cost).sum()), max(per_stage)


def fastest_shares(paces: Sequence[tuple[float, float]], micro_batches: int) -> list[int]:
    """Counts of at least 1 that make the slowest replica finish first: each next one goes to who ends it soonest.

    Giving each micro-batch in turn to the earliest end is optimal, since a replica's time grows with its count.

    Args:
        paces: of each replica, the seconds of its first micro-batch and of each further one.
        micro_batches: to share out, as many as there are replicas at least.
    """
    counts = [1] * len(paces)
    ends = [(first + further, number) for number, (first, further) in enumerate(paces)]
    heapq.heapify(ends)
    for _ in range(micro_batches - len(paces)):
        end, number = ends[0]
        counts[number] += 1
        heapq.heapreplace(ends, (end + paces[number][1], number))
    return counts
