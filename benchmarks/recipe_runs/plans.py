# SPDX-License-Identifier: Apache-2.0
"""What happens to a recipe's job: who dies where, and the plan that the survivors change to.

Pure: the same seed gives the same. May import `megatron_resihp.plan` and `megatron_resihp.config`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Final

from megatron_resihp.plan import Chunk, ParallelPlan, Replica
from megatron_resihp.plan.rules import Sharing

POINTS: Final = ("forward", "backward", "grad-sync", "norm", "step", "between")
PIPELINE_POINTS: Final = ("p2p",)
FIRST_DEATH, LAST_DEATH = 2, 4
"""Iterations."""
CHANGE_AT: Final = 6
"""When the plan is asked for."""
HOLD_AT: Final = 10
"""Where the survivors wait until the dead have returned."""


@dataclass(frozen=True)
class Death:
    """A SIGKILL to a worker at a point of an iteration."""

    worker: int
    iteration: int
    point: str

    def __str__(self) -> str:
        return f"kill:{self.worker}@{self.iteration}:{self.point}"


def draw_death(random: Random, workers: int, pipeline: int) -> Death:
    """Any worker, at any point that it reaches."""
    points = POINTS + (PIPELINE_POINTS if pipeline > 1 else ())
    return Death(random.randrange(workers), random.randint(FIRST_DEATH, LAST_DEATH), random.choice(points))


def unlike_replicas(
    survivors: Sequence[int], tensor: int, layers: int, micro_batches: int, only: int | None = None
) -> ParallelPlan:
    """Two replicas of unlike stages, degrees and shares; Megatron's own groups can't run them.

    Args:
        tensor: the recipe's degree of tensor parallelism, which no stage exceeds, but that two are always tried.
        layers: embedding and head included.
        only: the degree that all stages must have.
    """
    first, second = _deal(survivors, min(max(tensor, 2), len(survivors) // 2 + 1))
    if only is not None:
        groups = [tuple(survivors[start : start + only]) for start in range(0, len(survivors) - only + 1, only)]
        first, second = (tuple(groups[each] for (each,) in one) for one in _deal(range(len(groups)), 1))
    larger = micro_batches * 5 // 8
    replicas = (
        Replica(first, tuple(range(larger)), _chunks(len(first), layers)),
        Replica(second, tuple(range(larger, micro_batches)), _chunks(len(second), layers)),
    )
    return ParallelPlan(replicas, {})


def sharing_replicas(
    survivors: Sequence[int], tensor: int, pipeline: int, sharing: Sharing, micro_batches: int
) -> ParallelPlan:
    """As many replicas as share sequences or experts in the job's own layout, and no others: these run all
    micro-batches. A job with context or expert parallelism runs uniform plans only. Workers are dealt from the last to
    the first, so that this is never the plan that they have made for themselves after the death.

    Args:
        tensor, pipeline: the recipe's degrees.
        sharing: the recipe's.
    """
    whole = _whole_replicas(sorted(survivors, reverse=True), tensor, pipeline, sharing.together)
    shares = [tuple(range(group, micro_batches, sharing.in_step)) for group in range(sharing.in_step)]
    replicas = (Replica(stages, shares[n // sharing.context]) for n, stages in enumerate(whole))
    return ParallelPlan(
        tuple(replicas), context_parallel=sharing.context, expert_parallel=sharing.experts,
        expert_members=sharing.members,
    )  # fmt: skip


def _whole_replicas(
    survivors: Sequence[int], tensor: int, pipeline: int, count: int
) -> list[tuple[tuple[int, ...], ...]]:
    """The stages of so many replicas."""
    return [
        tuple(tuple(survivors[start : start + tensor]) for start in range(first, first + tensor * pipeline, tensor))
        for first in range(0, count * tensor * pipeline, tensor * pipeline)
    ]


def _deal(survivors: Sequence[int], wide: int) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """A stage of the widest degree and, where there are enough workers, a narrower one; then the same with less."""
    workers = list(survivors)

    def take(count: int) -> tuple[int, ...]:
        taken = tuple(workers[:count])
        del workers[:count]
        return taken

    if len(workers) < 4:
        stages = 1 if wide > 1 else len(workers) - 1
        return tuple(take(wide) for _ in range(stages)), (take(1),)
    first = (take(wide), take(1))
    second = (take(1), take(min(wide, 2))) if len(workers) > 2 else (take(1),) * min(len(workers), 1)
    return first, second


def _chunks(stages: int, layers: int) -> tuple[Chunk, ...]:
    """The later a stage, the more layers it has."""
    ends = [layers * (stage + 1) * (stage + 2) // (stages * (stages + 1)) for stage in range(stages)]
    return tuple(Chunk(stage, first, end) for stage, (first, end) in enumerate(pairwise([0, *ends])))
