# SPDX-License-Identifier: Apache-2.0
"""Plans whose replicas are all complete TP x PP grids, formed from any survivors. Imports `plan` and `spreading`.

In each replica, one worker works on each shard. A worker keeps the shard that it holds if the plan needs it there. If a
shard has fewer living holders than there are replicas, a surplus worker moves to it and fetches its state.

With context parallelism, replicas share sequences in groups of one size, which may be smaller than the job's own, or
where that is faster, of several (`context_groups`). With expert parallelism, they share experts in groups of one size.
With both, groups of one kind are made of whole groups of the other.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from megatron_resihp.plan import Coordinate, ParallelPlan, PlanError, Replica, deal
from megatron_resihp.plan.microbatches import counts_by_size
from megatron_resihp.plan.rules import Sharing
from megatron_resihp.planner.job_shape import JobShape, NoPlanError
from megatron_resihp.planner.spreading import Homes, spread


def initial_plan(shape: JobShape, workers: int, pipeline_last: bool = True) -> ParallelPlan:
    """Megatron's own layout of ranks 0..workers-1, or one that is more spread if the user wants that.

    Raises:
        NoPlanError: if the sizes do not divide.
    """
    own = _megatrons_own(shape, workers, pipeline_last)
    if not shape.spread_replicas:
        return own
    other = _megatrons_own(shape, workers, not pipeline_last)
    return spread((own, other), shape.node_of, shape.distributed_optimizer)


def _megatrons_own(shape: JobShape, workers: int, pipeline_last: bool) -> ParallelPlan:
    own = shape.own_sharing
    context = own.context
    groups, rest = divmod(workers, shape.replica_size * context)
    if rest or not groups:
        sizes = "TP x PP" if context == 1 else "TP x CP x PP"
        raise NoPlanError(f"{workers} workers are not a multiple of {sizes} = {shape.replica_size * context}")
    if shape.micro_batches % groups:
        batches = f"{shape.micro_batches} micro-batches"
        raise NoPlanError(f"{batches} cannot be shared evenly by {groups} replicas at the start")

    def worker(replica: int, stage: int, tp_rank: int) -> int:
        group, place = divmod(replica, context)
        row = group + groups * stage if pipeline_last else stage + shape.pipeline_parallel * group
        return tp_rank + shape.tensor_parallel * (place + context * row)

    if groups * context % own.experts:
        raise NoPlanError(f"{groups * context} replicas can't share experts in groups of {own.experts}")
    replicas = range(groups * context)
    grid = [{c: worker(replica, c.stage, c.tp_rank) for c in shape.coordinates()} for replica in replicas]
    return _plan(grid, shape, {}, own)


def plan_uniform(shape: JobShape, held: Mapping[int, Coordinate | None], previous: ParallelPlan) -> ParallelPlan:
    """As many complete replicas as the survivors can form, moving as little state as possible.

    Args:
        shape: sizes of the job.
        held: for every living worker, the shard that it holds completely and up to date, or None.
        previous: the plan that the survivors come from; its replica indices are kept where possible.

    Raises:
        NoPlanError: too few survivors for one replica, or a shard without a living holder.
    """
    coordinates = shape.coordinates()
    holders: dict[Coordinate, list[int]] = {c: [] for c in coordinates}
    for worker in sorted(held, key=_preference(held, previous)):
        coordinate = held[worker]
        if coordinate is not None:
            holders[coordinate].append(worker)
    missing = tuple(c for c in coordinates if not holders[c])
    if missing:
        shards = ", ".join(f"stage {c.stage} TP rank {c.tp_rank}" for c in missing)
        raise NoPlanError(f"the state of {shards} is held by no survivor", missing)
    complete = len(held) // shape.replica_size
    if not complete or shape.micro_batches < shape.fewest_micro_batches:
        raise NoPlanError(f"{len(held)} survivors are fewer than TP x PP = {shape.replica_size}")
    sharing, replicas = shape.sharing(complete)
    groups = shape.context_groups(complete)
    if groups:
        sharing, replicas = Sharing(max(groups)), sum(groups)
    chosen = {c: workers[:replicas] for c, workers in holders.items()}
    free = sorted(set(held) - {w for workers in chosen.values() for w in workers})
    moved = _fill(chosen, replicas, free, shape, Homes(held, shape.node_of))
    # Where experts are shared, a standby would keep a share of them that no plan may ask for.
    standbys = {worker: None if sharing.experts > 1 else held[worker] for worker in free if worker not in moved}
    return _plan(_arrange(chosen, replicas, previous, shape), shape, standbys, sharing, groups)


def plan_with_room(
    shape: JobShape, make: Callable[[JobShape], ParallelPlan], check: Callable[[ParallelPlan], None]
) -> ParallelPlan:
    """A plan in which as many replicas share as need the least time within memory. The job's own numbers are known to
    fit, so that a plan of these isn't checked.

    Args:
        shape: sizes of the job.
        make: a plan of a job of these sizes; raises NoPlanError if there is none.
        check: raises PlanError if a plan doesn't fit into memory.

    Raises:
        NoPlanError: there is none, or none that fits.
    """
    own, too_large = shape.own_sharing, ""
    while True:
        try:
            plan = make(shape)
        except NoPlanError as error:
            raise NoPlanError(f"{error}; {too_large}", error.missing) if too_large else error from None
        tried = plan.sharing
        if tried[:2] == own[:2] and not plan.context_groups:
            return plan
        try:
            check(plan)
        except PlanError as error:
            fewest = min(plan.context_groups, default=tried.context)
            too_large = f"with {max(fewest, tried.experts)} of them {error}"
            left = (each for each in shape.sharings if each.context > fewest or each.experts > tried.experts)
            shape = replace(shape, sharings=tuple(left))
        else:
            return plan


def _preference(held: Collection[int], previous: ParallelPlan) -> Callable[[int], tuple[int, ...]]:
    """Sort key: workers that had work come first (no warm-up), and among them those that lost the fewest mates.

    A TP group that stays together needs no new links, and TP peers of different replicas may be on different nodes.
    """
    lost = [[sum(each not in held for each in stage) for stage in replica.stages] for replica in previous.replicas]
    lost_of_replica = list(map(sum, lost))

    def key(worker: int) -> tuple[int, ...]:
        index, coordinate = previous.replica_of(worker), previous.coordinate_of(worker)
        if index is None or coordinate is None:
            return (1, worker)
        return (0, lost[index][coordinate.stage], lost_of_replica[index], index, worker)

    return key


def _fill(
    chosen: dict[Coordinate, list[int]], replicas: int, free: list[int], shape: JobShape, homes: Homes
) -> set[int]:
    """Give free workers to shards that lack them, from the node of their TP peers first; returns the moved workers.

    Where the user wants shards spread, it comes before that that none is left on one node only.
    """
    moved: set[int] = set()
    for coordinate, workers in chosen.items():
        while len(workers) < replicas:
            peers = {shape.node_of(w) for c, ws in chosen.items() if c.stage == coordinate.stage for w in ws}

            def preference(w: int, coordinate: Coordinate = coordinate, peers: set[int] = peers) -> tuple[int, ...]:
                alone = homes.alone_after(w, coordinate) if shape.spread_replicas else 0
                return (alone, shape.node_of(w) not in peers, w)

            mover = min((w for w in free if w not in moved), key=preference)
            workers.append(mover)
            moved.add(mover)
            homes.move(mover, coordinate)
    return moved


def _arrange(
    chosen: dict[Coordinate, list[int]], replicas: int, previous: ParallelPlan, shape: JobShape
) -> list[dict[Coordinate, int]]:
    """Deal each shard's workers to replicas: mates of the previous replica together, then TP peers on one node."""
    grid: list[dict[Coordinate, int]] = [{} for _ in range(replicas)]
    waiting: list[tuple[Coordinate, int]] = []
    for coordinate, workers in chosen.items():
        for worker in workers:
            replica = previous.replica_of(worker)
            if replica is not None and replica < replicas and coordinate not in grid[replica]:
                grid[replica][coordinate] = worker
            else:
                waiting.append((coordinate, worker))
    for coordinate, worker in waiting:
        open_rows = [row for row in range(replicas) if coordinate not in grid[row]]

        def strangers(row: int, coordinate: Coordinate = coordinate, worker: int = worker) -> int:
            node = shape.node_of(worker)
            return sum(shape.node_of(w) != node for c, w in grid[row].items() if c.stage == coordinate.stage)

        grid[min(open_rows, key=strangers)][coordinate] = worker
    return grid


def _plan(
    grid: list[dict[Coordinate, int]], shape: JobShape, standbys: Mapping[int, Coordinate | None], sharing: Sharing,
    groups: tuple[int, ...] = (),
) -> ParallelPlan:  # fmt: skip
    sizes = groups or (sharing.context,) * (len(grid) // sharing.context)
    if groups:
        counts = counts_by_size(shape.micro_batches, groups, shape.pipeline_parallel)
    else:
        counts = shape.shares(len(sizes), sharing)
    shares = [share for share, size in zip(deal(counts), sizes, strict=True) for _ in range(size)]
    return ParallelPlan(
        replicas=tuple(
            Replica(
                stages=tuple(
                    tuple(row[Coordinate(stage, tp_rank)] for tp_rank in range(shape.tensor_parallel))
                    for stage in range(shape.pipeline_parallel)
                ),
                micro_batches=share,
            )
            for row, share in zip(grid, shares, strict=True)
        ),
        standbys=standbys,
        context_parallel=sharing.context,
        expert_parallel=sharing.experts,
        expert_members=sharing.members,
        uneven_experts=sharing.uneven,
        context_groups=groups if len(set(groups)) > 1 else (),
    )
