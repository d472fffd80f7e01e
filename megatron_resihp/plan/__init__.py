# SPDX-License-Identifier: Apache-2.0
"""The plan of an epoch: which worker does which work. Immutable, validated, JSON in and out. May import `coding`."""

from megatron_resihp.plan.difference import differences
from megatron_resihp.plan.errors import PlanError
from megatron_resihp.plan.layers import Chunk, chunks_of_layout, even_chunks, layout_of
from megatron_resihp.plan.microbatches import deal, even_counts, even_share
from megatron_resihp.plan.parallel_plan import ParallelPlan, data_parallel_of
from megatron_resihp.plan.replica import Coordinate, Kept, Migration, Replica, Shard
from megatron_resihp.plan.schedule import PlannedOp, Schedule
from megatron_resihp.plan.spelling import OwnSplit, shortened, spelled_out

__all__ = [
    "Chunk", "Coordinate", "Kept", "Migration", "OwnSplit", "ParallelPlan", "PlanError", "PlannedOp", "Replica",
    "Schedule", "Shard", "chunks_of_layout", "data_parallel_of", "deal", "differences", "even_chunks", "even_counts",
    "even_share", "layout_of", "shortened", "spelled_out",
]  # fmt: skip
