# SPDX-License-Identifier: Apache-2.0
"""Adds to a plan everything that it leaves to the job, and removes it again. Imports the other files of `plan`.

A plan that leaves layers and order of ops to the job can run with Megatron's own groups, schedules and gradient
reduction. Comparison, validation and migration need every layer named. These are two forms of the same plan.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_resihp.plan.errors import PlanError
from megatron_resihp.plan.layers import Chunk, interleaves
from megatron_resihp.plan.parallel_plan import ParallelPlan
from megatron_resihp.plan.replica import Coordinate, Kept, Replica, Shard, shards_at
from megatron_resihp.plan.schedule import EXPLICIT, INTERLEAVED, ONE_F_ONE_B, Schedule


class OwnSplit(NamedTuple):
    """What Megatron's own groups are made for: the job's own layers of each stage, and its tensor-parallel degree."""

    chunks: tuple[Chunk, ...]
    degree: int

    def runs(self, plan: ParallelPlan) -> bool:
        """Whether Megatron's own groups can run a plan, whatever its standbys keep.

        Raises:
            PlanError: a replica without layers has other stages than the job's own.
        """
        short = shortened(spelled_out(replace(plan, standbys={}), self.chunks), self.chunks)
        return short.not_uniform is None and short.grid.tensor_parallel == self.degree


def coordinate_at(chunks: Sequence[Chunk], held: Sequence[Shard], degree: int) -> Coordinate | None:
    """The coordinate that holds exactly these shards in stages of this tensor-parallel degree, or None; however its
    members share experts."""
    if not held:
        return None
    plain = tuple(shard._replace(expert_members=0) for shard in held)
    for stage in sorted({chunk.stage for chunk in chunks}):
        coordinate = Coordinate(stage, held[0].tp_rank)
        if shards_at(chunks, coordinate, degree) == plain:
            return coordinate
    return None


def spelled_out(plan: ParallelPlan, own: tuple[Chunk, ...]) -> ParallelPlan:
    """The plan with the layers of each replica, and with the layers that each standby keeps.

    Args:
        plan: any plan.
        own: the job's own split, for replicas without layers.

    Raises:
        PlanError: a replica without layers has other stages than `own`, or other replicas have other layers.
    """
    replicas = tuple(each if each.chunks else replace(each, chunks=own) for each in plan.replicas)

    def kept_as_shards(kept: Kept) -> Kept:
        if not isinstance(kept, Coordinate):
            return kept
        degree, experts = len(replicas[0].stages[kept.stage]), (0, 1, plan.expert_members)
        return shards_at(replicas[0].chunks, kept, degree, experts) or None

    standbys = {worker: kept_as_shards(kept) for worker, kept in plan.standbys.items()}
    return replace(plan, replicas=replicas, standbys=standbys)


def shortened(plan: ParallelPlan, own: tuple[Chunk, ...]) -> ParallelPlan:
    """The plan without what the job's own arguments imply; the plan itself if it says more than they do.

    It shortens uniform plans with the job's own layers and order of ops, whose standbys keep what a working member
    holds. Plain 1F1B counts as the own order, or interleaved 1F1B if stages have several chunks. For these plans it is
    the inverse of `spelled_out`. Megatron's own interleaved schedule needs a micro-batch for each stage. A plan with
    fewer in some replica stays as it is.
    """
    if plan.migrations or plan.uneven_shards or len({degree for each in plan.replicas for degree in each.shape}) != 1:
        return plan
    if not all(_is_own(replica, own) for replica in plan.replicas):
        return plan
    degree = plan.replicas[0].shape[0]
    standbys: dict[int, Kept] = {}
    for worker, kept in plan.standbys.items():
        if kept is None or isinstance(kept, Coordinate):
            standbys[worker] = kept
            continue
        standbys[worker] = coordinate_at(own, kept, degree)
        if standbys[worker] is None:
            return plan
    replicas = tuple(replace(replica, chunks=(), schedule=None) for replica in plan.replicas)
    return replace(plan, replicas=replicas, standbys=standbys)


def trimmed(plan: ParallelPlan) -> ParallelPlan:
    """The plan without chunks and stages that have no layers.

    A planner may leave a slow stage without layers. Such a stage only passes on what it receives, and has no state; and
    the detector could not tell when it recovers.

    Raises:
        PlanError: the first or last chunk of a replica has no layers, and other chunks depend on its number.
    """
    fixed = bool(plan.migrations)
    return replace(plan, replicas=tuple(_checked_ends(each if fixed else _trimmed(each)) for each in plan.replicas))


def _trimmed(replica: Replica) -> Replica:
    kept = [number for number, chunk in enumerate(replica.chunks) if chunk.end > chunk.first]
    schedule = replica.schedule
    listed = schedule is not None and schedule.name == EXPLICIT
    in_turns = not listed and (len(replica.chunks) > len(replica.stages) or (schedule and schedule.name == INTERLEAVED))
    if len(kept) == len(replica.chunks) or in_turns:
        return replica
    stages = sorted({replica.chunks[number].stage for number in kept})
    if schedule is not None and listed:
        order_of = [
            tuple(op._replace(chunk=kept.index(op.chunk)) for op in order if op.chunk in kept)
            for order in schedule.orders
        ]
        schedule = replace(schedule, orders=tuple(order_of[stage] for stage in stages))
    return replace(
        replica,
        stages=tuple(replica.stages[stage] for stage in stages),
        chunks=tuple(replica.chunks[n]._replace(stage=stages.index(replica.chunks[n].stage)) for n in kept),
        schedule=schedule,
    )


def _checked_ends(replica: Replica) -> Replica:
    if any(chunk.end == chunk.first for chunk in (*replica.chunks[:1], *replica.chunks[-1:])):
        raise PlanError("the first or last chunk of a replica has no layers, where embedding and head have to be")
    return replica


def _is_own(replica: Replica, own: tuple[Chunk, ...]) -> bool:
    stages, many = 1 + max(chunk.stage for chunk in own), interleaves(own)
    own_order = replica.schedule in (None, Schedule(INTERLEAVED if many else ONE_F_ONE_B))
    enough = not many or len(replica.micro_batches) >= stages
    return replica.chunks in ((), own) and len(replica.stages) == stages and own_order and enough
