# SPDX-License-Identifier: Apache-2.0
"""What state must move to get from one plan to another, and how long that takes.

Imports numpy, `pipeline`, `plan` and `cost`.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.cost.job import Array, JobCost
from megatron_resihp.cost.memory import memory_of, with_layers
from megatron_resihp.pipeline.compiled import compiled
from megatron_resihp.plan import Chunk, Coordinate, ParallelPlan, Shard
from megatron_resihp.plan.experts import dealt_experts
from megatron_resihp.plan.replica import experts_of

Index = NDArray[np.int64]
Shards = tuple[Shard, ...]
_ROUNDING: Final = 1e-9
"""Share of the wanted bytes that counts as rounding error, from thirds and the like."""


def bytes_to_move(before: ParallelPlan, after: ParallelPlan, cost: JobCost) -> dict[int, float]:
    """Bytes of weights and optimizer state that each worker of the next plan lacks; workers that lack none are left
    out.

    A worker lacks what its new shards hold and its old shards do not. A shard is a rectangle: layers × share of a
    layer, from rank / degree to (rank + 1) / degree (uneven shards are treated as even). So is what it has of their
    experts: layers × numbers of experts × share of each.
    If the optimizer is distributed over copies, a worker receives its share of it. Into a plan that doesn't distribute
    it, holders first get the rest of it for what they hold, and then all of it for what they lack.

    Args:
        before: the plan whose workers hold the state; workers that are dead by now are ignored.
        after: the next plan.
        cost: of the job.

    Raises:
        PlanError: the layers of a plan differ from the model's.
    """
    size = prefix_bytes(cost, sharers_under(after, cost), after.expert_parallel)
    held, wanted = shards_held(before, cost), shards_held(after, cost)
    have = {shards: number for number, shards in enumerate({held.get(worker, ()): None for worker in wanted})}
    need = {shards: number for number, shards in enumerate(dict.fromkeys(wanted.values()))}
    lacking = lacking_bytes(list(have), list(need), size)
    found = {worker: float(lacking[have[held.get(worker, ())], need[shards]]) for worker, shards in wanted.items()}
    for worker, rest in _put_together(before, after, cost).items():
        found[worker] += rest
    return {worker: number for worker, number in found.items() if number > 0}


def sharers_under(plan: ParallelPlan, cost: JobCost) -> int:
    """How many replicas of a plan share a distributed optimizer's state."""
    return len(plan.replicas) if cost.training.under(plan).distributed_optimizer else 1


def _put_together(before: ParallelPlan, after: ParallelPlan, cost: JobCost) -> dict[int, int]:
    """Bytes of a distributed optimizer's state that each holder gets of the others before a plan without parts of it
    can be built; see `cost.room.put_together`."""
    part, rest = (cost.training.under(plan) for plan in (before, after))
    if not part.distributed_optimizer or rest.distributed_optimizer:
        return {}
    owned, whole = (memory_of(before, cost.model, training) for training in (part, rest))
    there = set(before.members) & set(after.members)
    return {worker: whole[worker].optimizer - owned[worker].optimizer for worker in there}


def seconds_to_get_there(before: ParallelPlan, after: ParallelPlan, cost: JobCost) -> float:
    """Seconds until a plan can run: new process groups, then the transfer to the worker that lacks the most bytes.

    All links work at once, one for each worker; every piece of state is assumed to have enough sources.

    Raises:
        PlanError: the layers of a plan differ from the model's.
    """
    return 0.0 if before == after else seconds_to_move(bytes_to_move(before, after, cost), cost)


def seconds_to_move(moved: Mapping[int, float], cost: JobCost) -> float:
    """Seconds to get to a different plan, from what `bytes_to_move` gives."""
    return cost.rebuild_s + max(moved.values(), default=0.0) / min(cost.device.bandwidth, cost.state_bandwidth)


def lacking_bytes(held: Sequence[Shards], wanted: Sequence[Shards], size: Array) -> Array:
    """Bytes that each holder lacks of each wanted set of shards, [held, wanted].

    Args:
        held: the shards of each holder, without overlap.
        wanted: the shards that each place needs.
        size: see `prefix_bytes`.
    """
    have, need = _Rectangles.of(held), _Rectangles.of(wanted)
    found = np.zeros((len(held), len(wanted)))
    _add_common(found, have, need, size)
    whole = np.zeros(len(wanted))
    rest, experts = size[:, need.end] - size[:, need.first]
    own = (need.expert_stop - need.expert_start) * (need.cut_stop - need.cut_start)
    np.add.at(whole, need.owner, (need.stop - need.start) * rest + own * experts)
    return np.where(found >= whole * (1 - _ROUNDING), 0.0, whole - found)


@compiled
def _add_common(found: Array, have: "_Rectangles", need: "_Rectangles", size: Array) -> None:
    """Add the bytes that the shards of each pair of owners have in common, [owners that have, owners that need]."""
    for i in range(len(have.owner)):
        for j in range(len(need.owner)):
            first, end = max(have.first[i], need.first[j]), min(have.end[i], need.end[j])
            if first < end:
                rest = min(have.stop[i], need.stop[j]) - max(have.start[i], need.start[j])
                experts = min(have.expert_stop[i], need.expert_stop[j]) - max(
                    have.expert_start[i], need.expert_start[j]
                )
                cut = min(have.cut_stop[i], need.cut_stop[j]) - max(have.cut_start[i], need.cut_start[j])
                found[have.owner[i], need.owner[j]] += max(rest, 0.0) * (size[0, end] - size[0, first])
                found[have.owner[i], need.owner[j]] += (
                    max(experts, 0.0) * max(cut, 0.0) * (size[1, end] - size[1, first])
                )


class _Rectangles(NamedTuple):
    """Shards of several owners: layers first, …, end − 1, of each layer the share start to stop, of its experts, in
    order, likewise, and of each of these the cut likewise; each [shards].
    """

    owner: Index
    first: Index
    end: Index
    start: Array
    stop: Array
    expert_start: Array
    expert_stop: Array
    cut_start: Array
    cut_stop: Array

    @classmethod
    def of(cls, shards_of: Sequence[Shards]) -> "_Rectangles":
        found = [(owner, shard) for owner, shards in enumerate(shards_of) for shard in shards]
        rows = np.array([(owner, shard.first, shard.end) for owner, shard in found], np.int64).reshape(-1, 3)
        shares = np.array([_shares(shard) for _, shard in found]).reshape(-1, 6)
        # Contiguous, or Numba compiles each function once more.
        return cls(*rows.T.copy(), *shares.T.copy())


@lru_cache(maxsize=4096)
def _shares(shard: Shard) -> tuple[float, ...]:
    """From where to where a shard has a share of each layer, of its experts, and of each of these."""
    part, all_experts = experts_of(shard), shard.uneven_experts
    own = dealt_experts(all_experts, part.degree)[part.rank] if all_experts else range(part.rank, part.rank + 1)
    experts = all_experts or part.degree
    return (
        shard.tp_rank / shard.tp_degree, (shard.tp_rank + 1) / shard.tp_degree,
        own.start / experts, own.stop / experts,
        part.cut / part.cuts, (part.cut + 1) / part.cuts,
    )  # fmt: skip


@lru_cache(maxsize=64)
def prefix_bytes(cost: JobCost, copies: int, expert_parallel: int = 1) -> Array:
    """Bytes of the layers before each layer, and of all: weights and a copy's optimizer share, without routed experts
    and of these alone, [2, layers + 1].
    """
    training, found = cost.training, []
    for experts, holders in ((False, copies), (True, copies / expert_parallel)):
        each = training.weight_bytes + training.optimizer_bytes / (holders if training.distributed_optimizer else 1)
        counts = (sum(part.parameters for part in layer.parts if not part.copy and bool(part.experts) == experts)
                  for layer in cost.model.layers)  # fmt: skip
        found.append(np.cumsum([0.0, *(count * each for count in counts)]))
    return np.array(found)


def shards_held(plan: ParallelPlan, cost: JobCost) -> dict[int, tuple[Shard, ...]]:
    """The shards that each worker of a plan holds, standbys included."""
    held: dict[int, tuple[Shard, ...]] = {}
    first = with_layers(plan.replicas[0], cost.model)
    for number, replica in enumerate(plan.replicas):
        experts = number % plan.expert_parallel, plan.expert_parallel, plan.expert_members, plan.uneven_experts
        shards = _shards_of(with_layers(replica, cost.model).chunks, replica.shape, experts)
        for members, of_stage in zip(replica.stages, shards, strict=True):
            held.update(zip(members, of_stage, strict=True))
    for worker, kept in plan.standbys.items():
        if isinstance(kept, Coordinate):
            degree = len(first.stages[kept.stage])
            own = _by_stage(first.chunks, len(first.stages))[kept.stage]
            held[worker] = tuple(Shard(chunk.first, chunk.end, kept.tp_rank, degree) for chunk in own)
        else:
            held[worker] = kept or ()
    return held


@lru_cache(maxsize=1024)
def _shards_of(chunks: Sequence[Chunk], degrees: Sequence[int], experts: tuple[int, ...]) -> list[list[Shards]]:
    """The shards that each member of each stage holds. `experts`: as of `shards_at`."""
    return [
        [tuple(Shard(chunk.first, chunk.end, rank, degree, *experts) for chunk in of_stage) for rank in range(degree)]
        for of_stage, degree in zip(_by_stage(chunks, len(degrees)), degrees, strict=True)
    ]


def _by_stage(chunks: Sequence[Chunk], stages: int) -> list[list[Chunk]]:
    of_stage: list[list[Chunk]] = [[] for _ in range(stages)]
    for chunk in chunks:
        if chunk.end > chunk.first:
            of_stage[chunk.stage].append(chunk)
    return of_stage
