# SPDX-License-Identifier: Apache-2.0
"""How many micro-batches each replica runs. Imports numpy, `cost`, `plan` and this package."""

import heapq
from collections.abc import Sequence

from megatron_resihp.cost.job import JobCost
from megatron_resihp.plan import Replica
from megatron_resihp.planner.evaluation import stage_seconds, transfer_seconds
from megatron_resihp.planner.health import Health


def pace_of(replica: Replica, health: Health, cost: JobCost) -> tuple[float, float]:
    """Seconds of 1F1B for the first micro-batch, transfers included, and for each further micro-batch."""
    per_chunk = stage_seconds(replica, health, cost).sum(axis=0)
    per_stage = [0.0] * len(replica.stages)
    for chunk, seconds in zip(replica.chunks, per_chunk, strict=True):
        per_stage[chunk.stage] += float(seconds)
    return float(per_chunk.sum() + transfer_seconds(replica, health, cost).sum()), max(per_stage)


def fastest_shares(paces: Sequence[tuple[float, float]], micro_batches: int) -> list[int]:
    """Counts of at least 1 for which the slowest replica finishes earliest.

    Each micro-batch goes to the replica that ends first. That is optimal, since a replica's time grows with its count.

    Args:
        paces: for each replica, the seconds of its first micro-batch and of each further one.
        micro_batches: how many to distribute; at least as many as replicas.
    """
    counts = [1] * len(paces)
    ends = [(first + further, number) for number, (first, further) in enumerate(paces)]
    heapq.heapify(ends)
    for _ in range(micro_batches - len(paces)):
        end, number = ends[0]
        counts[number] += 1
        heapq.heapreplace(ends, (end + paces[number][1], number))
    return counts
