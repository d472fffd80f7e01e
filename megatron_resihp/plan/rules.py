# SPDX-License-Identifier: Apache-2.0
"""The rules that every plan must follow: one function for each. Imports the other files of `plan` except
`parallel_plan`.

Whether a plan fits a model and its devices' memory depends on more than the plan: see `cost.memory.check_plan`.
"""

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

from megatron_resihp.plan.errors import PlanError
from megatron_resihp.plan.experts import most_experts
from megatron_resihp.plan.layers import check_chunks, in_turns
from megatron_resihp.plan.replica import Coordinate, Kept, Migration, Replica
from megatron_resihp.plan.schedule import PlannedOp, check_order, stuck_op

Place = tuple[int, int]
"""A replica and one of its stages."""


class Sharing(NamedTuple):
    """How replicas share sequences and experts.

    Attributes:
        context: how many consecutive ones share each sequence.
        experts: how many share each layer's experts.
        members: how many members of a stage have the same of these experts; 0: all have.
        uneven: how many experts a layer has, where they are dealt in unequal numbers; 0: in equal ones.
    """

    context: int = 1
    experts: int = 1
    members: int = 0
    uneven: int = 0

    @property
    def together(self) -> int:
        """How many consecutive replicas meet in every layer. One of the two numbers divides the other."""
        return max(self.context, self.experts)

    @property
    def in_step(self) -> int:
        """How many consecutive groups of replicas that share sequences share experts, and so run as many rounds."""
        return self.together // self.context

    @property
    def fullest(self) -> Fraction:
        """How many experts the worker with most of them has, over the mean."""
        most = most_experts(self.uneven, self.experts)
        return Fraction(most * self.experts, self.uneven) if self.uneven else Fraction(1)


def groups_of(replicas: int, sizes: int | Sequence[int]) -> tuple[range, ...]:
    """So many replicas in groups of consecutive ones. `sizes`: of all groups, or of each."""
    if isinstance(sizes, int):
        sizes = (sizes,) * (replicas // sizes)
    return tuple(range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True))


def check(
    replicas: Sequence[Replica],
    standbys: Mapping[int, Kept],
    migrations: Sequence[Migration],
    sharing: Sharing,
    context_groups: tuple[int, ...] = (),
) -> None:
    """Raises PlanError if the parts of a plan break a rule; the message names it."""
    if not replicas:
        raise PlanError("a plan needs at least one replica")
    _check_workers(replicas, standbys)
    _check_context_groups(len(replicas), sharing, context_groups)
    _check_sharing(replicas, migrations, sharing.context, "sequences", "context", alike=not context_groups)
    _check_sharing(replicas, migrations, sharing.experts, "experts", "expert")
    _check_members_of_experts(replicas, sharing.members)
    _check_uneven_experts(sharing)
    groups = groups_of(len(replicas), context_groups or sharing.context)
    _check_groups(replicas, standbys, sharing, groups)
    _check_micro_batches([replicas[group.start] for group in groups])
    _check_layers(replicas)
    _check_standbys(replicas, standbys)
    _check_migrations(replicas, migrations)
    _check_members(replicas, migrations)
    _check_schedules(replicas, migrations)


def _check_workers(replicas: Sequence[Replica], standbys: Mapping[int, Kept]) -> None:
    for replica in replicas:
        if not all(isinstance(each, tuple) for each in (replica.stages, *replica.stages)):
            raise PlanError(f"stages and their members are tuples, got {replica.stages!r}")
    seen: set[int] = set()
    workers = (worker for replica in replicas for members in replica.stages for worker in members)
    for worker in (*workers, *standbys):
        if type(worker) is not int or worker < 0:
            raise PlanError(f"worker ids are whole numbers >= 0, got {worker!r}")
        if worker in seen:
            raise PlanError(f"worker {worker} appears twice")
        seen.add(worker)


def _check_context_groups(replicas: int, sharing: Sharing, sizes: tuple[int, ...]) -> None:
    """Groups of unequal numbers are said where there are such, and nowhere else."""
    if not sizes:
        return
    if not isinstance(sizes, tuple) or any(type(size) is not int or size < 1 for size in sizes):
        raise PlanError(f"context_groups are whole numbers >= 1, got {sizes!r}")
    if sum(sizes) != replicas:
        raise PlanError(f"context_groups are of {sum(sizes)} replicas, and the plan has {replicas}")
    if len(set(sizes)) == 1:
        raise PlanError(f"each sequence is shared by {sizes[0]} replicas: leave context_groups out")
    if max(sizes) != sharing.context:
        raise PlanError(f"context_parallel must be the largest of context_groups, {max(sizes)}, not {sharing.context}")
    if sharing.experts > 1 or sharing.members:
        raise PlanError("replicas that share experts must share sequences in groups of one size")


def _check_sharing(
    replicas: Sequence[Replica], migrations: Sequence[Migration], degree: int, what: str, kind: str,
    alike: bool = True,
) -> None:  # fmt: skip
    """Replicas that share something meet in every layer: all of them run the same ops in the same order. Of those that
    share experts, some may have fewer micro-batches and run ops that count nothing (`parallel_plan.rounds_of`)."""
    if type(degree) is not int or degree < 1:
        article = "an" if kind == "expert" else "a"
        raise PlanError(f"{article} {kind}-parallel degree is a whole number >= 1, got {degree!r}")
    if degree == 1:
        return
    if alike and len(replicas) % degree:
        raise PlanError(f"{len(replicas)} replicas can't share {what} in groups of {degree}")
    if migrations:
        raise PlanError(f"work can't be migrated between replicas that share {what}")
    if len({(each.shape, each.chunks, each.schedule) for each in replicas}) > 1:
        raise PlanError(f"replicas that share {what} must have the same stages, layers and order of ops")


def _check_members_of_experts(replicas: Sequence[Replica], members: int) -> None:
    if type(members) is not int or members < 0:
        raise PlanError(f"the number of members that have the same experts is a whole number >= 0, got {members!r}")
    degree = next((degree for each in replicas for degree in each.shape if members and degree % members), None)
    if degree is not None:
        raise PlanError(f"{degree} members of a stage can't share its experts in groups of {members}")


def _check_uneven_experts(sharing: Sharing) -> None:
    """Unequal numbers are said where equal ones can't be, and nowhere else, so that a plan is said in one way only."""
    context, sharers, members, experts = sharing
    if type(experts) is not int or experts < 0:
        raise PlanError(f"the number of experts dealt in unequal numbers is a whole number >= 0, got {experts!r}")
    if not experts:
        return
    if experts % sharers == 0:
        raise PlanError(f"{sharers} replicas have equal numbers of {experts} experts: leave uneven_experts out")
    if experts < sharers:
        raise PlanError(f"{sharers} replicas can't share {experts} experts so that each has one")
    if members or context > 1:
        what = "members of a stage have other experts each" if members else "replicas share sequences"
        raise PlanError(f"experts can't be dealt in unequal numbers where {what}")


def _check_groups(
    replicas: Sequence[Replica], standbys: Mapping[int, Kept], sharing: Sharing, groups: Sequence[range]
) -> None:
    """Those that share sequences run the same micro-batches."""
    context, experts, *_ = sharing
    if sharing.together % min(context, experts):
        overlap = f"groups of {context} that share sequences and of {experts} that share experts overlap"
        raise PlanError(f"{overlap}: let one number divide the other")
    for group in groups:
        if len({replicas[number].micro_batches for number in group}) > 1:
            said = f"replicas {group.start} to {group.stop - 1} share sequences and must have the same micro-batches"
            raise PlanError(said)
    kept = sorted(worker for worker, shard in standbys.items() if shard is not None)
    if experts > 1 and kept:
        raise PlanError(f"worker {kept[0]} has no work and can't keep a shard where replicas share experts")


def _check_micro_batches(replicas: Sequence[Replica]) -> None:
    indices = sorted(index for replica in replicas for index in replica.micro_batches)
    if indices != list(range(len(indices))):
        raise PlanError(f"micro-batches must be 0..n-1, each in one replica, got {indices}")
    if any(not replica.micro_batches for replica in replicas):
        raise PlanError("every replica needs at least one micro-batch")


def _check_layers(replicas: Sequence[Replica]) -> None:
    if not all(replica.stages for replica in replicas):
        raise PlanError("every replica needs at least one stage")
    if not any(replica.chunks for replica in replicas):
        counts = {len(replica.stages) for replica in replicas}
        if len(counts) != 1:
            raise PlanError(f"replicas must have the same stages or say which layers they run, got {sorted(counts)}")
        return
    most = max(replica.chunks[-1].end for replica in replicas if replica.chunks)
    for number, replica in enumerate(replicas):
        if not replica.chunks:
            raise PlanError(f"replica {number} doesn't say which layers its stages run, as others do")
        try:
            check_chunks(replica.chunks, len(replica.stages))
        except PlanError as error:
            raise PlanError(f"replica {number}: {error}") from None
        if replica.chunks[-1].end < most:
            raise PlanError(f"replica {number}: layer {replica.chunks[-1].end} is missing")


def _check_standbys(replicas: Sequence[Replica], standbys: Mapping[int, Kept]) -> None:
    first = replicas[0]
    for worker, kept in standbys.items():
        if kept is None:
            continue
        if isinstance(kept, Coordinate):
            fits = 0 <= kept.stage < len(first.stages) and 0 <= kept.tp_rank < len(first.stages[kept.stage])
            if not fits:
                raise PlanError(f"standby {worker} keeps {kept}, which the first replica doesn't have")
        elif not kept or not first.chunks:
            raise PlanError(f"standby {worker} keeps layers, but the plan doesn't say which layers its stages run")
        else:
            for shard in kept:
                if not (0 <= shard.first < shard.end <= first.chunks[-1].end and 0 <= shard.tp_rank < shard.tp_degree):
                    raise PlanError(f"standby {worker} keeps {shard}, which isn't part of the model")


def _check_migrations(replicas: Sequence[Replica], migrations: Sequence[Migration]) -> None:
    owner = _owners(replicas)
    seen: set[tuple[int, int]] = set()
    for micro_batch, chunk, replica in migrations:
        what = f"migration of micro-batch {micro_batch}, chunk {chunk}, to replica {replica}"
        if micro_batch not in owner or not 0 <= replica < len(replicas):
            raise PlanError(f"{what}: there is no such micro-batch or replica")
        if owner[micro_batch] == replica:
            raise PlanError(f"{what}: that replica runs the micro-batch itself")
        if (micro_batch, chunk) in seen:
            raise PlanError(f"{what}: it is migrated twice")
        seen.add((micro_batch, chunk))
        ours, theirs = replicas[owner[micro_batch]], replicas[replica]
        if not (0 <= chunk < len(ours.stage_of_chunk) and chunk < len(theirs.stage_of_chunk)):
            raise PlanError(f"{what}: there is no such chunk")
        if ours.chunks and ours.chunks[chunk][1:] != theirs.chunks[chunk][1:]:
            raise PlanError(f"{what}: the chunk has other layers there")
        for number in (owner[micro_batch], replica):
            schedule = replicas[number].schedule
            if schedule is None or not schedule.orders:
                raise PlanError(f"{what}: replica {number} doesn't list its ops, which takes part in migrations")


def _check_members(replicas: Sequence[Replica], migrations: Sequence[Migration]) -> None:
    if all(members for replica in replicas for members in replica.stages):
        return
    work = _work(replicas, migrations)
    for number, replica in enumerate(replicas):
        for stage, members in enumerate(replica.stages):
            if not members and work[number, stage]:
                chunk, micro_batch = min(work[number, stage])
                raise PlanError(
                    f"stage {stage} of replica {number} has no worker for micro-batch {micro_batch}, chunk {chunk}"
                )


def _check_schedules(replicas: Sequence[Replica], migrations: Sequence[Migration]) -> None:
    explicit = []
    for number, replica in enumerate(replicas):
        if replica.schedule is None:
            if not in_turns(replica.stage_of_chunk, len(replica.stages)):
                raise PlanError(f"replica {number} doesn't list its ops, and its chunks aren't dealt in turns")
            continue
        try:
            replica.schedule.check_shape(len(replica.stages), replica.chunks, len(replica.micro_batches))
        except PlanError as error:
            raise PlanError(f"replica {number}: {error}") from None
        explicit += [number] if replica.schedule.orders else []
    if explicit:
        _check_explicit(replicas, migrations, explicit)


def check_ops(replica: Replica) -> None:
    """Raises PlanError unless a replica can run its listed ops alone; then marks its schedule as known to run."""
    if replica.schedule is not None and replica.schedule.orders:
        _check_explicit([replica], (), [0])


def _check_explicit(replicas: Sequence[Replica], migrations: Sequence[Migration], explicit: Sequence[int]) -> None:
    """Check listed ops; without migrations no replica waits for another, so each is checked alone and only once."""
    if not migrations:
        explicit = [number for number in explicit if not _is_known_to_run(replicas[number])]
    _check_listed(replicas, migrations, explicit)
    for number in explicit if not migrations else ():
        replica = replicas[number]
        if replica.schedule is not None:
            replica.schedule.known_to_run.add((replica.stage_of_chunk, tuple(replica.micro_batches)))


def _is_known_to_run(replica: Replica) -> bool:
    known = replica.schedule.known_to_run if replica.schedule is not None else ()
    return (replica.stage_of_chunk, tuple(replica.micro_batches)) in known


def _check_listed(replicas: Sequence[Replica], migrations: Sequence[Migration], explicit: Sequence[int]) -> None:
    if not explicit:
        return
    work = _work(replicas, migrations)
    orders = []
    for number, stage, order in _orders(replicas, explicit):
        schedule = replicas[number].schedule
        try:
            check_order(order, work[number, stage], schedule is not None and schedule.splits_backward)
        except PlanError as error:
            raise PlanError(f"replica {number}, stage {stage}: {error}") from None
        orders.append(order)
    last_chunk = {
        micro_batch: len(replica.stage_of_chunk) - 1 for replica in replicas for micro_batch in replica.micro_batches
    }
    stuck = stuck_op(orders, last_chunk)
    if stuck is not None:
        raise PlanError(f"op {stuck} waits for an op that waits for it: ops must not wait in a circle")


def _orders(replicas: Sequence[Replica], explicit: Sequence[int]) -> Iterator[tuple[int, int, tuple[PlannedOp, ...]]]:
    for number in explicit:
        schedule = replicas[number].schedule
        for stage, order in enumerate(schedule.orders if schedule else ()):
            yield number, stage, order


def _owners(replicas: Sequence[Replica]) -> dict[int, int]:
    """The replica that owns each micro-batch."""
    return {micro_batch: number for number, replica in enumerate(replicas) for micro_batch in replica.micro_batches}


def _work(replicas: Sequence[Replica], migrations: Sequence[Migration]) -> dict[Place, set[tuple[int, int]]]:
    """The (chunk, micro-batch) pairs that each stage of each replica runs."""
    work: dict[Place, set[tuple[int, int]]] = {}
    for number, replica in enumerate(replicas):
        for stage in range(len(replica.stages)):
            work[number, stage] = set()
        for chunk, stage in enumerate(replica.stage_of_chunk):
            work[number, stage] |= {(chunk, micro_batch) for micro_batch in replica.micro_batches}
    owner = _owners(replicas)
    for micro_batch, chunk, helper in migrations:
        ours = owner[micro_batch]
        work[ours, replicas[ours].stage_of_chunk[chunk]].remove((chunk, micro_batch))
        work[helper, replicas[helper].stage_of_chunk[chunk]].add((chunk, micro_batch))
    return work
