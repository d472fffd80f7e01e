# SPDX-License-Identifier: Apache-2.0
"""Plans whose replicas are all complete TP x PP grids, formed from any survivors. Imports `plan` and `spreading`.

In each replica, one worker works on each shard. A worker keeps the shard that it holds if the plan needs it there. If a
shard has fewer living holders than there are replicas, a surplus worker moves to it and fetches its state.

With context parallelism, replicas share sequences in groups of one size, which may be smaller than the job's own, or
where that is faster, of several (`context_groups`). With expert parallelism, they share experts in groups of one size.
With both, groups of one kind are made of whole groups of the other.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

from megatron_resihp.plan import Chunk, Coordinate, ParallelPlan, PlanError, Replica, Shard, deal, even_counts
from megatron_resihp.plan.microbatches import counts_by_size, grouped_counts
from megatron_resihp.plan.replica import shards_at
from megatron_resihp.plan.rules import Sharing
from megatron_resihp.planner.context_groups import fastest_groups
from megatron_resihp.planner.spreading import Homes, spread


class NoPlanError(Exception):
    """No plan fits the survivors; the message says why, and `missing` lists the shards that no survivor holds."""

    def __init__(self, reason: str, missing: tuple[Coordinate, ...] = ()) -> None:
        super().__init__(reason)
        self.missing = missing


def context_degrees(own: int, tokens: int, members: int) -> tuple[int, ...]:
    """How many replicas may share a sequence, the job's own number first.

    Megatron cuts a sequence in two parts for each of them, so that all have as much to attend to.

    Args:
        own: the job's.
        tokens: of a sequence.
        members: of a stage among which the tokens between layers are shared out, too; 1: they aren't.
    """
    fitting = (degree for degree in range(own - 1, 1, -1) if can_share_sequence(degree, tokens, members))
    return tuple(dict.fromkeys((own, *fitting, 1)))


def can_share_sequence(degree: int, tokens: int, members: int) -> bool:
    """Whether so many replicas may share a sequence; `tokens`, `members`: as of `context_degrees`."""
    return degree == 1 or (tokens % (2 * degree) == 0 and tokens // degree % members == 0)


def expert_degrees(own: int, experts: int) -> tuple[int, ...]:
    """How many replicas may share each layer's experts, the job's own number first: all of them have as many.

    Args:
        own: the job's.
        experts: of a layer; 0: there are none.
    """
    return tuple(degree for degree in range(own, 0, -1) if experts % degree == 0) if experts else (1,)


def uneven_sharings(own: int, experts: int) -> tuple[Sharing, ...]:
    """The numbers of replicas that may share each layer's experts beside `expert_degrees`: some have one expert more
    than others.

    Args:
        own: the job's.
        experts: of a layer.
    """
    return tuple(Sharing(1, degree, 0, experts) for degree in range(own - 1, 1, -1) if experts % degree)


def sharings(
    contexts: Sequence[int], experts: Sequence[int], members: int = 0, alike: bool = False
) -> tuple[Sharing, ...]:
    """How many replicas may share each sequence and each layer's experts, the job's own numbers first.

    Args:
        contexts, experts: what either may be, the job's own first.
        members: see `ParallelPlan.expert_members`.
        alike: the ratio of both stays: Megatron counts ranks through pipelines before it counts them through replicas,
            and wants as many of each in a stage.

    Raises:
        ValueError: of the job's own numbers, neither divides the other.
    """
    own = Fraction(contexts[0], experts[0])
    found = tuple(
        Sharing(context, each, members)
        for context, each in product(contexts, experts)
        if max(context, each) % min(context, each) == 0 and (not alike or Fraction(context, each) == own)
    )
    if found[0][:2] != (contexts[0], experts[0]):
        raise ValueError(
            f"{contexts[0]} replicas share a sequence, and {experts[0]} experts: neither divides the other"
        )
    return found


@dataclass(frozen=True)
class JobShape:
    """What a failure may not change.

    Attributes:
        tensor_parallel, pipeline_parallel: degrees given by the user.
        micro_batches: micro-batches per global batch, over all replicas.
        workers_per_node: worker w lives on node w // workers_per_node.
        micro_batch_group: how many go together in an interleaved pipeline; None: it isn't interleaved.
        distributed_optimizer: replicas share the optimizer's state out.
        spread_replicas: the user wants no shard on one node only.
        sharings: how many replicas may share each sequence and each layer's experts; the job's own numbers first.
        equal_rounds: those that share experts must have equally many micro-batches.
        unlike_context: sequences may be shared in groups of unlike sizes.
        expert_copies: experts that are held once have a copy with another worker, if no optimizer is shared out.
    """

    tensor_parallel: int
    pipeline_parallel: int
    micro_batches: int
    workers_per_node: int = 1
    micro_batch_group: int | None = None
    distributed_optimizer: bool = False
    spread_replicas: bool = False
    sharings: tuple[Sharing, ...] = (Sharing(),)
    equal_rounds: bool = False
    expert_copies: bool = False
    unlike_context: bool = False

    def node_of(self, worker: int) -> int:
        """Where a worker lives."""
        return worker // self.workers_per_node

    @property
    def fewest_micro_batches(self) -> int:
        """Of a replica: Megatron's interleaved schedule needs one for each stage."""
        return 1 if self.micro_batch_group is None else self.pipeline_parallel

    @property
    def own_sharing(self) -> Sharing:
        """Of the job's own layout."""
        return self.sharings[0]

    @property
    def shares_experts(self) -> bool:
        """Whether replicas share experts in the job's own layout."""
        return self.own_sharing.experts > 1

    def sharing(self, replicas: int) -> tuple[Sharing, int]:
        """How many of them share each sequence and each layer's experts, and how many then work: as many as need the
        least time, which is that of the replica with most micro-batches; and of several numbers the largest, since each
        worker then holds the least. Where experts are dealt in unequal numbers, a micro-batch takes as much longer as
        the worker with most of them has more than the mean. Of what takes as long, equal numbers come first.

        Raises:
            NoPlanError: there are too few replicas, or micro-batches don't go evenly into groups of them, which must.
        """
        working = {sharing: self._working(replicas, sharing) for sharing in self.sharings}
        possible = [sharing for sharing, count in working.items() if count]
        if not possible:
            raise NoPlanError(f"{replicas} complete replicas can't share {self.shared}")

        def preference(sharing: Sharing) -> tuple[Fraction, bool, int, int]:
            longest = max(self.shares(working[sharing] // sharing.context, sharing))
            time = longest * sharing.fullest / sharing.context
            return time, sharing.uneven > 0, -sharing.context, -sharing.experts

        chosen = min(possible, key=preference)
        return chosen, working[chosen]

    def context_groups(self, replicas: int) -> tuple[int, ...]:
        """How many of them share each sequence, group by group, as needs the least time; nothing where `sharing` says
        it. A pipeline that is interleaved takes micro-batches in numbers of its own."""
        if not self.unlike_context or self.micro_batch_group is not None:
            return ()
        degrees = [sharing.context for sharing in self.sharings]
        return fastest_groups(replicas, self.micro_batches, self.pipeline_parallel, degrees)

    def _working(self, replicas: int, sharing: Sharing) -> int:
        """How many work: whole groups, of which each member has a micro-batch at least."""
        rounds, rest = divmod(self.micro_batches, sharing.in_step)
        if self.equal_rounds and rest:
            return 0
        return sharing.together * min(replicas // sharing.together, rounds // self.fewest_micro_batches)

    @property
    def shared(self) -> str:
        """What replicas must share, and in groups of how many."""
        degrees = {
            "sequences": sorted({sharing.context for sharing in self.sharings}, reverse=True),
            "experts": sorted({sharing.experts for sharing in self.sharings}, reverse=True),
        }
        shared = {what: " or ".join(map(str, numbers)) for what, numbers in degrees.items() if max(numbers) > 1}
        return " and ".join(f"{what} in groups of {numbers}" for what, numbers in shared.items())

    def shares(self, groups: int, sharing: Sharing) -> tuple[int, ...]:
        """How many micro-batches each group of replicas that share sequences has; without such, each replica."""
        alike, in_step = (sharing.in_step, 1) if self.equal_rounds else (1, sharing.in_step)
        rounds, several = self.micro_batches // alike, groups // alike
        if self.micro_batch_group is None:
            counts = even_counts(rounds, several)
        else:
            counts = grouped_counts(rounds, several, self.pipeline_parallel, self.micro_batch_group, in_step)
        return tuple(count for count in counts for _ in range(alike))

    @property
    def replica_size(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def coordinates(self) -> list[Coordinate]:
        return [Coordinate(s, t) for s in range(self.pipeline_parallel) for t in range(self.tensor_parallel)]

    def shards_at(self, own: Sequence[Chunk], coordinate: Coordinate) -> tuple[Shard, ...]:
        """What the holder of a coordinate has where no replicas share experts. `own`: the job's own split."""
        return shards_at(own, coordinate, self.tensor_parallel, (0, 1, self.own_sharing.members))


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
