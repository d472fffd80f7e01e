"""A plan with all that it leaves to the job said in full, and back. Imports the other files of `plan`.

A plan that leaves layers and order of ops to the job can be run with Megatron's own groups, schedules and gradient
reduction; comparing, validating and migrating want every layer named. These are two ways to say the same.
"""

from collections.abc import Sequence
from dataclasses import replace

from megatron_resihp.plan.layers import Chunk
from megatron_resihp.plan.parallel_plan import ParallelPlan
from megatron_resihp.plan.replica import Coordinate, Kept, Replica, Shard, shards_at
from megatron_resihp.plan.schedule import ONE_F_ONE_B


def coordinate_at(chunks: Sequence[Chunk], held: Sequence[Shard], degree: int) -> Coordinate | None:
    """The coordinate whose holder holds just these shards, of stages of this tensor-parallel degree; None: no such."""
    if not held:
        return None
    for stage in sorted({chunk.stage for chunk in chunks}):
        coordinate = Coordinate(stage, held[0].tp_rank)
        if shards_at(chunks, coordinate, degree) == tuple(held):
            return coordinate
    return None


def spelled_out(plan: ParallelPlan, own: tuple[Chunk, ...]) -> ParallelPlan:
    """The plan in which each replica says its layers, and each standby which layers it keeps.

    Args:
        plan: any.
        own: the job's own split, which holds for replicas that say none.

    Raises:
        PlanError: a replica without layers has other stages than `own`, or others have other layers.
    """
    replicas = tuple(each if each.chunks else replace(each, chunks=own) for each in plan.replicas)

    def kept_as_shards(kept: Kept) -> Kept:
        if not isinstance(kept, Coordinate):
            return kept
        return shards_at(replicas[0].chunks, kept, len(replicas[0].stages[kept.stage])) or None

    standbys = {worker: kept_as_shards(kept) for worker, kept in plan.standbys.items()}
    return replace(plan, replicas=replicas, standbys=standbys)


def shortened(plan: ParallelPlan, own: tuple[Chunk, ...]) -> ParallelPlan:
    """The plan without what the job's own arguments say as well; the plan itself where it says more than they do.

    Such are rectangular plans with the job's own layers and order of ops, for which 1F1B counts, whose standbys keep
    what a working member holds. For these it is the inverse of `spelled_out`.
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


def _is_own(replica: Replica, own: tuple[Chunk, ...]) -> bool:
    own_order = replica.schedule is None or replica.schedule.name == ONE_F_ONE_B
    return replica.chunks in ((), own) and len(replica.stages) == 1 + max(chunk.stage for chunk in own) and own_order
