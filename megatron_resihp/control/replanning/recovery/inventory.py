# SPDX-License-Identifier: Apache-2.0
"""What survivors hold, and what a planner of uniform plans makes of it. Pure; imports `plan`, `planner` and
`protocol`.

Workers say what they hold as shards, in whatever layout it came to be. Layers and their experts are thought of as cut
in so many equal shares that each shard is made of whole ones.
"""

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from typing import Any, NamedTuple

from megatron_resihp.plan import Chunk, Coordinate, ParallelPlan, Shard
from megatron_resihp.plan.copies import NodeOf, kept_expert_copies, lost_parts
from megatron_resihp.plan.rules import Sharing
from megatron_resihp.plan.slices import (
    NO_EXPERT,
    cuts_of,
    cuts_of_shard,
    expert_cuts_of_shard,
    shares_of,
    shares_of_shard,
)
from megatron_resihp.plan.spelling import coordinate_at, spelled_out
from megatron_resihp.planner import JobShape, NoPlanError, plan_uniform
from megatron_resihp.planner.job_shape import context_degrees, expert_degrees, sharings, uneven_sharings
from megatron_resihp.protocol.job import JobDescription
from megatron_resihp.protocol.planning import KnownJob

Held = Mapping[int, tuple[Shard, ...]]
"""For each living worker what it holds complete and current; empty: nothing."""
Cell = tuple[int, int, int]
"""A layer, one of its shares, and one share of its experts, or NO_EXPERT."""


class Grain(NamedTuple):
    """Into how many shares layers are cut, and into how many their experts; 1: all shards have all of them."""

    members: int
    experts: int


@dataclass(frozen=True)
class Survivors:
    """What a plan is made for.

    Attributes:
        shape, own: sizes of the job, and its own split into layers.
        held: what each survivor holds.
        previous: the plan that was published last, whether or not it was ever run.
        running: the plan that was run last.
        job: what workers have told of the job.
        arguments: Megatron's, of which the model is made; None: no worker has told them yet.
        slots: how many workers the job may have; see `plan.slots`.
        failed: the errors of plans whose first step failed, by `ParallelPlan.work_digest`.
        copied: what the owners hold of whose experts a survivor keeps a copy.
    """

    shape: JobShape
    own: tuple[Chunk, ...]
    held: Held
    previous: ParallelPlan
    running: ParallelPlan | None
    job: JobDescription
    arguments: dict[str, Any] | None
    slots: int
    failed: Mapping[str, str] = field(default_factory=dict)
    copied: tuple[Shard, ...] = ()

    @property
    def known(self) -> KnownJob:
        """What the costs of plans depend on."""
        return KnownJob.of(self.job, self.arguments, sharings_of(self.job))

    @property
    def in_parts(self) -> bool:
        """Whether the state is in the parts of a distributed optimizer and their copies."""
        return self.shape.distributed_optimizer and self.running is not None


def shape_of(job: JobDescription, workers_per_node: int) -> JobShape:
    """The sizes of a job, as its workers have told them."""
    return JobShape(
        job.tensor_parallel, job.pipeline_parallel, job.micro_batches, workers_per_node, job.micro_batch_group,
        job.distributed_optimizer, job.spread_replicas, sharings_of(job),
        bool(job.equal_rounds), job.expert_copies, unlike_context=not (job.keeps_context or job.experts),
    )  # fmt: skip


def sharings_of(job: JobDescription) -> tuple[Sharing, ...]:
    """How many replicas may share each sequence and each layer's experts, the job's own numbers first."""
    return even_sharings_of(job) + uneven_sharings_of(job)


def even_sharings_of(job: JobDescription) -> tuple[Sharing, ...]:
    """Those that share experts in equal numbers."""
    members = job.tensor_parallel if job.sequence_parallel else 1
    groups = job.tensor_parallel // (job.expert_members or job.tensor_parallel)
    context, sharers = job.context_parallel, job.expert_parallel
    contexts = (context,) if job.keeps_context else context_degrees(context, job.seq_length, members)
    keeps = sharers == 1 or job.keeps_experts
    experts = (sharers,) if keeps else expert_degrees(sharers, job.experts // groups)
    if job.powers_of_two:
        experts = tuple(each for each in experts if each.bit_count() == 1)
    return sharings(contexts, experts, job.expert_members, keeps_ratio(job))


def uneven_sharings_of(job: JobDescription) -> tuple[Sharing, ...]:
    """How many replicas may share each layer's experts in unequal numbers."""
    keeps = job.expert_parallel == 1 or job.keeps_experts or keeps_ratio(job)
    if keeps or job.even_experts or job.expert_members or job.context_parallel > 1:
        return ()
    return uneven_sharings(job.expert_parallel, job.experts)


def keeps_ratio(job: JobDescription) -> bool:
    """Whether experts must be shared by so many times as many replicas as sequences are, as in the job's own layout:
    Megatron then wants as many ranks of either kind of group in each stage."""
    return bool(job.experts) and not job.pipeline_last and job.pipeline_parallel > 1


def copied_experts(running: ParallelPlan, own: tuple[Chunk, ...], living: Container[int], node_of: NodeOf) -> Held:
    """By living worker that keeps a copy of experts, what their owner holds.

    Args:
        running: the plan that was run last.
        own: the job's own split into layers.
    """
    keepers = kept_expert_copies(running, node_of)
    full = spelled_out(running, own) if keepers else running
    return {keeper: full.shards_of(owner) for keeper, owner in sorted(keepers.items()) if keeper in living}


def lacking(held: Held, layers: int, in_parts: bool = False, copied: Iterable[Shard] = ()) -> tuple[Shard, ...]:
    """The parts of a model of so many layers that no worker holds.

    Args:
        held: what workers do.
        layers: of the model.
        in_parts: the state is in the parts of a distributed optimizer and their copies, and all of them are there.
            Parameters are what masters give when rounded, so parts have experts that no survivor has.
        copied: what the owners hold of whose experts living workers keep a copy.
    """
    copied = tuple(copied)
    if in_parts:
        held = {worker: without_experts(shards) for worker, shards in held.items()}
    grain = _grain((*held.values(), copied))
    everything = _cells([Shard(0, layers, 0, 1)], grain)
    there = _union(held, grain)
    # Experts alone are of no use: the rest of a layer is in every share of it.
    there |= {(layer, cut, of) for layer, cut, of in _expert_cells(copied, grain) if (layer, cut, NO_EXPERT) in there}
    return _as_shards(everything - there, grain)


def without_experts(shards: tuple[Shard, ...]) -> tuple[Shard, ...]:
    """What replicas that share experts hold of all else."""
    all_experts = {"expert_rank": 0, "expert_degree": 1, "expert_members": 0, "uneven_experts": 0}
    return tuple(each._replace(**all_experts) for each in shards)


def require_all_parts(running: ParallelPlan, survivors: Iterable[int], node_of: NodeOf) -> None:
    """Check that each part of a distributed optimizer has survived, with its owner or with the holder of its copy.

    Raises:
        NoPlanError: both the owner and the copy of some part are gone.
    """
    lost = lost_parts(running, set(survivors), node_of)
    if lost:
        shards = ", ".join(f"stage {stage} TP rank {tp_rank}" for stage, tp_rank in lost)
        raise NoPlanError(f"a part of the optimizer's state of {shards} died with its copy", lost)


def written_once(held: Held) -> dict[int, tuple[Shard, ...]]:
    """Which worker writes which shards: each held shard once. Workers with nothing to write are left out.

    Where replicas share experts, each worker writes all that it holds: no shard has experts only.
    """
    shares = _grain(held.values())
    if shares.experts > 1:
        return {worker: shards for worker, shards in held.items() if shards}
    written: set[Cell] = set()
    writers = {}
    for worker in sorted(held):
        own = _cells(held[worker], shares) - written
        if own:
            writers[worker] = _as_shards(own, shares)
        written |= own
    return writers


def each_writes_all(writers: Held, held: Held) -> bool:
    """Whether none of these writers holds more than it writes."""
    shares = _grain(held.values())
    return all(_cells(written, shares) == _cells(held[worker], shares) for worker, written in writers.items())


def plan_for_survivors(
    shape: JobShape, own: Sequence[Chunk], held: Held, previous: ParallelPlan, in_parts: bool = False,
    copied: tuple[Shard, ...] = (),
) -> ParallelPlan:  # fmt: skip
    """Complete replicas of the job's own layout, out of survivors that hold its state in any layout.

    Where no worker holds a shard of that layout as it is, but survivors hold its parts between them, one is taken
    for its holder: it fetches what it lacks.

    Args:
        shape, own: the job's sizes and its own split into layers.
        held: of all survivors.
        previous: the plan that they come from.
        in_parts: the state is in the parts of a distributed optimizer and their copies, and all of them are there.
        copied: as of `lacking`.

    Raises:
        NoPlanError: too few survivors for one replica, or state that no worker holds.
    """
    if shape.shares_experts:
        return _of_sharers(shape, own, held, previous, lacking(held, own[-1].end, in_parts, copied))
    places = {shards: coordinate_at(own, shards, shape.tensor_parallel) for shards in set(held.values())}
    exact = {worker: places[shards] for worker, shards in held.items()}
    taken = _stand_ins(shape, own, held, exact)
    try:
        plan = plan_uniform(shape, {**exact, **taken}, previous)
    except NoPlanError as error:
        if error.missing and not lacking(held, own[-1].end):
            raise NoPlanError(f"{len(held)} survivors are fewer than TP x PP = {shape.replica_size}") from None
        raise
    if taken.keys().isdisjoint(plan.standbys):
        return plan
    standbys = {worker: None if worker in taken else kept for worker, kept in plan.standbys.items()}
    return replace(plan, standbys=standbys)


def _of_sharers(
    shape: JobShape, own: Sequence[Chunk], held: Held, previous: ParallelPlan, lost: tuple[Shard, ...]
) -> ParallelPlan:
    """The same of survivors that hold shares of experts and all the rest of a shard. What is a share of the experts
    only is of no use to a standby. `lost`: what no survivor has."""
    plain = {shards: without_experts(shards) for shards in set(held.values())}
    places = {shards: coordinate_at(own, shards, shape.tensor_parallel) for shards in set(plain.values())}
    exact = {worker: places[plain[shards]] for worker, shards in held.items()}
    plan = plan_uniform(shape, exact, previous)
    if lost:
        first = lost[0]
        which = f"share {first.expert_rank} of {first.expert_degree} of the experts of layer {first.first}"
        grain = _grain((*held.values(), lost))
        gone = _cells(lost, grain)
        missing = [each for each in shape.coordinates() if gone & _cells(shape.shards_at(own, each), grain)]
        raise NoPlanError(f"{which} is held by no survivor", tuple(missing))
    whole = plan.expert_parallel == 1
    kept = {each: coordinate_at(own, held[each], shape.tensor_parallel) if whole else None for each in plan.standbys}
    return replace(plan, standbys=kept)


def _stand_ins(
    shape: JobShape, own: Sequence[Chunk], held: Held, exact: Mapping[int, Coordinate | None]
) -> dict[int, Coordinate]:
    """Workers that are to hold shards of the job's layout whose parts are there, but which no worker holds."""
    grain = _grain(held.values())
    shares = grain._replace(members=math.lcm(grain.members, shape.tensor_parallel))
    cells = {shards: _cells(shards, shares) for shards in set(held.values())}
    everything = set[Cell]().union(*cells.values())
    there = set(exact.values())
    taken: dict[int, Coordinate] = {}
    for coordinate in shape.coordinates():
        wanted = _cells(shape.shards_at(own, coordinate), shares)
        if coordinate in there or not wanted <= everything:
            continue
        holds = {**exact, **taken}
        holders = Counter(holds.values())
        spare = [
            worker
            for worker in sorted(held)
            if worker not in taken and (holds[worker] is None or holders[holds[worker]] > 1)
        ]
        if spare:
            overlap = {worker: len(cells[held[worker]] & wanted) for worker in spare}
            taken[max(spare, key=lambda worker: (exact[worker] is None, overlap[worker]))] = coordinate
    return taken


def _grain(held: Iterable[tuple[Shard, ...]]) -> Grain:
    shards = [shard for each in set(held) for shard in each]  # many workers hold the same
    return Grain(cuts_of(shards), shares_of(shards))


def _cells(shards: Sequence[Shard], grain: Grain) -> set[Cell]:
    found: set[Cell] = set()
    for shard in shards:
        layers = range(shard.first, shard.end)
        found |= set(product(layers, cuts_of_shard(shard, grain.members), (NO_EXPERT,)))
    return found | _expert_cells(shards, grain)


def _expert_cells(shards: Iterable[Shard], grain: Grain) -> set[Cell]:
    """Those of their experts only."""
    found: set[Cell] = set()
    for shard in shards if grain.experts > 1 else ():
        own = shares_of_shard(shard, grain.experts)
        found |= set(product(range(shard.first, shard.end), expert_cuts_of_shard(shard, grain.members), own))
    return found


def _union(held: Held, grain: Grain) -> set[Cell]:
    return {cell for shards in set(held.values()) for cell in _cells(shards, grain)}


def _as_shards(cells: set[Cell], grain: Grain) -> tuple[Shard, ...]:
    """The same cells as few shards, for each share of the experts where these are cut."""
    if grain.experts == 1:
        return _largest_first({(layer, share) for layer, share, _ in cells}, grain.members)
    return tuple(
        shard._replace(expert_rank=number, expert_degree=grain.experts)
        for number in range(grain.experts)
        for shard in _largest_first({(layer, share) for layer, share, of in cells if of == number}, grain.members)
    )


def _largest_first(cells: set[tuple[int, int]], shares: int) -> tuple[Shard, ...]:
    """Cells of layers as few shards, the largest shares first."""
    left = set(cells)
    found: list[Shard] = []
    for degree in (degree for degree in range(1, shares + 1) if shares % degree == 0):
        for rank in range(degree):
            part = range(rank * shares // degree, (rank + 1) * shares // degree)
            whole = sorted({layer for layer, _ in left if all((layer, share) in left for share in part)})
            for _, run in groupby(enumerate(whole), key=lambda pair: pair[1] - pair[0]):
                layers = [layer for _, layer in run]
                found.append(Shard(layers[0], layers[-1] + 1, rank, degree))
            left -= {(layer, share) for layer in whole for share in part}
    return tuple(sorted(found))
