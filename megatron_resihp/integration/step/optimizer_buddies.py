# SPDX-License-Identifier: Apache-2.0
"""Where parts of a distributed optimizer and their copies are: gradients on their way to copies, parts to new owners.

The holders of a shard form a ring (`plan.copies`). On Megatron's own groups only: under a heterogeneous plan there is
none. May import megatron, `plan`, `executor` and this package.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megatron_resihp.events.training import OptimizerCopy
from megatron_resihp.executor.groups.side_group import MakeSideGroup, Post, SideGroup
from megatron_resihp.executor.transfer import receive_tensors, send_tensors, tell_all
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.state.expert_biases import share_counts
from megatron_resihp.integration.state.parameter_slices import EXPERT
from megatron_resihp.integration.state.shard import group_steps
from megatron_resihp.integration.step.buddies import keepers_of, nodes_of_job
from megatron_resihp.integration.step.loss_scale import ready_gradients
from megatron_resihp.integration.step.optimizer_copy import Kept, PartCopy
from megatron_resihp.integration.step.optimizer_shards import (
    Entry,
    Matrix,
    Part,
    Place,
    Tensors,
    digest_of,
    digest_of_parameters,
    digest_of_pieces,
    fill_buffers,
    fill_part,
    own_gradient,
    own_part,
    own_places,
    publish_parameters,
    whole_buffers,
)
from megatron_resihp.integration.trained import Trained
from megatron_resihp.plan import Coordinate, ParallelPlan, Shard
from megatron_resihp.plan.copies import Edge, copies_at, in_turns
from megatron_resihp.plan.ranges import Range, RangeMove, plan_range_moves
from megatron_resihp.plan.spelling import spelled_out

HOST = torch.device("cpu")


class Ring(NamedTuple):
    """This worker's edges of its ring, in the order in which gradients pass them."""

    edges: tuple[Edge, ...]
    group: SideGroup


def join_ring(plan: ParallelPlan, coordinate: Coordinate, me: int, make_group: MakeSideGroup) -> Ring | None:
    """This worker's edges; None if no worker keeps a copy of its shard's parts."""
    edges = copies_at(plan, coordinate, nodes_of_job())
    if not edges:
        return None
    group = make_group(f"copies/{coordinate.stage}/{coordinate.tp_rank}", plan.grid.holders_of(coordinate))
    return Ring(tuple(edge for edge in in_turns(edges) if me in edge), group)


def share_part_gradients(trained: Trained, kept: Kept, ring: Ring, worker: int) -> None:
    """Send the own part's summed gradient to the worker that keeps its copy, and get that of the copy kept here."""
    start, own = time.monotonic(), torch.empty(0)
    if kept.owns:
        ready_gradients(trained.optimizer)
        own = own_gradient(trained)
    transfers: list[Iterator[Post]] = []
    for owner, buddy in ring.edges:
        if owner == worker:
            transfers += [ring.group.sending(own, buddy)] * bool(own.numel())
        elif kept.copy is not None:
            kept.copy.gradient = gradient = torch.empty(kept.copy.elements)
            transfers += [ring.group.receiving(gradient, owner)] * bool(gradient.numel())
    ring.group.at_once(*transfers)
    if kept.copy is not None:
        kept.copy.cost.bytes_sent += own.nbytes
        kept.copy.cost.exchange_s += time.monotonic() - start


def share_counts_with_standbys(trained: Trained, plan: ParallelPlan, coordinate: Coordinate, ring: Ring) -> None:
    """Give the summed counts of tokens to the shard's holders without work, which keep its biases current."""
    keepers = keepers_of(plan, coordinate)
    if keepers:
        share_counts(trained.model, lambda counts: ring.group.broadcast(counts, keepers[0]))


def tell_cost(runtime: Runtime) -> None:
    """Write to the event log what keeping a copy has cost each step since the epoch began."""
    copy = runtime.held.copy
    if copy is None:
        return
    bytes_kept, cost = copy.nbytes, copy.cost  # in this order: the last step may still be under way
    if not cost.steps:
        return
    runtime.control.event(OptimizerCopy(
        owner=copy.owner, steps=cost.steps, bytes_kept=bytes_kept,
        bytes_per_step=cost.bytes_sent // cost.steps, exchange_s=cost.exchange_s / cost.steps,
        step_s=cost.step_s / cost.steps,
    ))  # fmt: skip


# ---- at the start of an epoch


def move_parts(runtime: Runtime, trained: Trained, copied: Mapping[int, int]) -> tuple[int, Kept | None]:
    """Give each worker its part of the optimizer's state, wherever it is, the parameters, and the copy that it keeps.

    Args:
        trained: freshly built objects to be filled, or the live ones where nothing is to be filled.
        copied: whose part each worker keeps a copy of; as of `kept_copies`.

    Returns:
        the bytes received from others, and what the worker has now.

    Raises:
        RuntimeError: a part and its copy are both gone, or what is there now isn't what it was before.
    """
    plan, worker, fresh = runtime.view.plan, runtime.worker, trained is not runtime.held.live
    coordinate = plan.coordinate_of(worker)
    members = runtime.job.own.expert_members
    has = current_part(runtime.held.live, runtime.held.kept, members)
    owns, buffers = _named_here(runtime, trained)
    fills = [*owns, *buffers] if fresh else []
    told = tell_all(runtime.mode.everybody, worker, {"has": list(has), "owns": list(owns.items()), "fills": fills})
    has_all = {each: [Range(*where) for where in said["has"]] for each, said in told.items()}
    owned = {each: places_said(said["owns"]) for each, said in told.items()}
    if not any(said["has"] for said in told.values()):  # before the first step owners have what they were built with
        has = _full_entries(coordinate, own_part(trained), members)
        has_all = {each: list(owned[each]) for each in told}
    wanted = {
        each: [*(Range(*where) for where in told[each]["fills"]), *(owned[copied[each]] if each in copied else ())]
        for each in told
    }
    moves, missing = plan_range_moves(has_all, wanted)
    if missing:
        raise RuntimeError(f"no worker holds the optimizer's state of {missing[0]}")
    collected = Collected(wanted[worker], steps_of(runtime))
    received = make_moves(runtime, moves, has, collected)
    collected.check()
    if fresh and runtime.view.works:
        fill_part(trained, {_bare(where): collected.tensors[where] for where in owns}, collected.steps)
        fill_buffers(trained, {_bare(where): collected.tensors[where] for where in buffers})
        publish_parameters(trained)
    if coordinate is None:
        return received, None
    copy = None
    if worker in copied:
        part = {
            _bare(where): Entry(place, collected.tensors[where])
            # As the owner orders them, and so its gradient.
            for where, place in sorted(owned[copied[worker]].items(), key=lambda each: _bare(each[0]))
        }
        copy = PartCopy(copied[worker], part, max(collected.steps, default=None))
    kept = Kept(coordinate, runtime.view.works, copy, shards_under(runtime, copied.get(worker)))
    now = current_part(trained, kept, members)
    collected.compare({where: entry.tensors for where, entry in now.items()})
    return received, kept


def shards_under(runtime: Runtime, worker: int | None) -> tuple[Shard, ...]:
    """What a worker holds under the plan in force."""
    return () if worker is None else spelled_out(runtime.view.plan, runtime.job.own.chunks).shards_of(worker)


def _named_here(runtime: Runtime, trained: Trained) -> tuple[dict[Range, Place], dict[Range, Place]]:
    """By full names what these objects step, and their buffers; nothing on a worker without work."""
    coordinate = runtime.view.plan.coordinate_of(runtime.worker)
    if coordinate is None or not runtime.view.works:
        return {}, {}
    members, buffers = runtime.job.own.expert_members, _places(whole_buffers(trained))
    return full_names(coordinate, own_places(trained), members), full_names(coordinate, buffers, members)


def part_digests(runtime: Runtime, trained: Trained, kept: Kept | None) -> dict[str, str]:
    """Digests of parameters, if all holders of the shard have the same, and of each part of the optimizer that this
    worker has, each with all buffers."""
    if kept is None:
        return {}
    owners = runtime.view.plan.grid.workers_at(kept.coordinate)
    stage, tp_rank = kept.coordinate
    found, buffers = {}, whole_buffers(trained)
    if kept.owns and runtime.view.plan.expert_parallel == 1:
        found[f"{stage}/{tp_rank}"] = digest_of_parameters(trained.model)
    if kept.owns:
        part = {**own_part(trained), **buffers}
        found[f"{stage}/{tp_rank}/{owners.index(runtime.worker)}/{len(owners)}"] = digest_of(part)
    if kept.copy is not None:
        part = {**kept.copy.part, **buffers}
        found[f"{stage}/{tp_rank}/{owners.index(kept.copy.owner)}/{len(owners)}"] = digest_of(part)
    return found


class Collected:
    """Wanted ranges, filled piece by piece, on the host."""

    def __init__(self, wanted: Sequence[Range], steps: Sequence[int]) -> None:
        self.tensors: dict[Range, Tensors] = {where: {} for where in wanted}
        self.steps = list(steps)
        self._left = {where: where.end - where.start for where in wanted}
        self._before: list[tuple[Sequence[Range], str]] = []
        self._by_name: dict[str, list[Range]] = {}
        for where in wanted:
            self._by_name.setdefault(where.name, []).append(where)

    def put(self, piece: Range, name: str, tensor: torch.Tensor) -> None:
        """One tensor of a piece."""
        where = self._whole(piece)
        whole = self.tensors[where]
        if not tensor.dim():
            whole[name] = tensor.detach().cpu().clone()
            return
        if name not in whole:
            whole[name] = torch.empty(where.end - where.start, dtype=tensor.dtype)
        whole[name][piece.start - where.start : piece.end - where.start] = tensor

    def count(self, pieces: Sequence[Range], digest: str) -> None:
        """All tensors of these pieces have come. `digest`: of what they are where they come from."""
        self._before.append((pieces, digest))
        for piece in pieces:
            self._left[self._whole(piece)] -= piece.end - piece.start

    def compare(self, now: Mapping[Range, Tensors]) -> None:
        """Raises RuntimeError if what is held now isn't what its former holders had before it moved."""
        by_name = ranges_by_name(now)
        for pieces, digest in self._before:
            if digest_of_pieces([_piece(by_name[each.name], now, each) for each in pieces]) != digest:
                raise RuntimeError(f"the optimizer's state of {pieces[0]} is not what it was before it moved")

    def _whole(self, piece: Range) -> Range:
        return next(each for each in self._by_name[piece.name] if piece.common(each) == piece)

    def check(self) -> None:
        """Raises RuntimeError if some range is not whole: a wrong state is worse than none."""
        unfilled = [where for where, left in self._left.items() if left]
        if unfilled:
            raise RuntimeError(f"the optimizer's state of {unfilled[0]} has not come whole")


def make_moves(runtime: Runtime, moves: Sequence[RangeMove], has: Part, collected: Collected) -> int:
    """Send and receive; returns the bytes received."""
    received, worker = 0, runtime.worker
    tensors_of, by_name = {where: entry.tensors for where, entry in has.items()}, ranges_by_name(has)
    for source, target, ranges in moves:
        if source == worker:
            pieces = [_piece(by_name[each.name], tensors_of, each) for each in ranges]
            digest = digest_of_pieces(pieces)
            if target == worker:
                for each, tensors in zip(ranges, pieces, strict=True):
                    for name, tensor in tensors.items():
                        collected.put(each, name, tensor)
                collected.count(ranges, digest)
                continue
            named = {f"{index}/{name}": tensor for index, tensors in enumerate(pieces)
                     for name, tensor in tensors.items()}  # fmt: skip
            send_tensors(runtime.mode.everybody, target, named, {"steps": steps_of(runtime), "digest": digest})
        elif target == worker:
            found, extra = receive_tensors(runtime.mode.everybody, source, HOST)
            for key, tensor in found.items():
                index, _, name = key.partition("/")
                collected.put(ranges[int(index)], name, tensor)
            collected.count(ranges, extra["digest"])
            collected.steps += extra["steps"]
            received += sum(tensor.nbytes for tensor in found.values())
        if worker in (source, target) and runtime.epoch:  # as the job begins copies move too, and no worker recovers
            runtime.reach("recovery-migrate")
    return received


def ranges_by_name(ranges: Iterable[Range]) -> dict[str, list[Range]]:
    """The ranges of each parameter."""
    found: dict[str, list[Range]] = {}
    for where in ranges:
        found.setdefault(where.name, []).append(where)
    return found


def _piece(ranges: Sequence[Range], tensors: Mapping[Range, Tensors], piece: Range) -> Tensors:
    """Views of a piece of one of these ranges."""
    where = next(each for each in ranges if piece.common(each) == piece)
    start, end = piece.start - where.start, piece.end - where.start
    return {name: tensor[start:end] if tensor.dim() else tensor for name, tensor in tensors[where].items()}


def current_part(trained: Trained, kept: Kept | None, members: int) -> Part:
    """What of the state this worker has, by ranges' full names. `members`: as of `full_names`."""
    if kept is None:
        return {}
    own = own_part(trained) if kept.owns else {}
    copied = kept.copy.part if kept.copy is not None else {}
    return _full_entries(kept.coordinate, {**own, **copied, **whole_buffers(trained)}, members)


def steps_of(runtime: Runtime) -> list[int]:
    """Counts of steps that some optimizers keep for each parameter group; all that are current are equal."""
    kept = runtime.held.kept
    counts: list[Any] = group_steps(runtime.held.live) if kept is None or kept.owns else []
    counts += [kept.copy.counted] if kept is not None and kept.copy is not None else []
    return [count for count in counts if count is not None]


def full_names(coordinate: Coordinate, places: Mapping[Range, Place], members: int) -> dict[Range, Place]:
    """Ranges named across shards. `members`: of a stage with a cut each of the same experts, as of `ParallelPlan`; an
    expert is with other members of a stage under other plans."""
    stage, tp_rank = coordinate
    cut = tp_rank % members if members else tp_rank

    def prefix(name: str) -> str:
        return f"{stage}/{cut if EXPERT.search(name) else tp_rank}"

    return {Range(f"{prefix(where.name)}|{where.name}", where.start, where.end): place
            for where, place in places.items()}  # fmt: skip


def _full_entries(coordinate: Coordinate | None, part: Part, members: int) -> Part:
    if coordinate is None:
        return {}
    names = full_names(coordinate, _places(part), members)
    return dict(zip(names, part.values(), strict=True))


def _places(part: Part) -> dict[Range, Place]:
    return {where: entry.place for where, entry in part.items()}


def _bare(where: Range) -> Range:
    return Range(where.name.partition("|")[2], where.start, where.end)


def places_said(said: Sequence[Any]) -> dict[Range, Place]:
    """What `tell_all` brings of a dictionary's items."""
    return {
        Range(*where): Place(index, group, matrix and Matrix(tuple(matrix[0]), matrix[1]))
        for where, (index, group, matrix) in said
    }
