# SPDX-License-Identifier: Apache-2.0
"""A plan's memory on each worker: weights, gradients, optimizer, and the activations of its order of ops.

Imports numpy, `pipeline`, `plan` and this package.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import ceil

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.cost.model.layers import Layer, Model
from megatron_resihp.cost.model.parts import Part, ShardError
from megatron_resihp.cost.training import Recompute, Training
from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.pipeline.planned import known_program
from megatron_resihp.plan import Chunk, Coordinate, ParallelPlan, PlanError, Replica, Schedule, Shard, even_chunks
from megatron_resihp.plan.microbatches import filled_up
from megatron_resihp.plan.parallel_plan import rounds_of, shared_with
from megatron_resihp.plan.schedule import KINDS

_Ops = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Kinds and chunks of a stage's ops, in order."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one worker.

    Attributes:
        weights, gradients, optimizer: of the worker's parameters.
        activations: the most that the order of ops keeps alive from F to B (and W).
        working: extra memory of recomputation, for one layer at a time.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    working: int

    @property
    def state(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.state + self.activations + self.working


def _size(count: int) -> str:
    """Bytes as text in binary units, such as "80.0 GiB"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} bytes"


class MemoryExceededError(PlanError):
    """A worker needs more memory than its device has."""


def check_plan(plan: ParallelPlan, model: Model, training: Training, capacity: int | Mapping[int, int]) -> None:
    """Raises PlanError unless a plan can run with this model on these devices.

    Args:
        plan, model, training: the plan and its job.
        capacity: usable bytes of each worker's device: one number, or one for each worker id.

    Raises:
        PlanError: the plan's layers differ from the model's; members of a stage cannot share a layer, or share it
            unevenly in a plan that is not marked so; or memory is exceeded (the message names the worst worker and the
            excess).
    """
    over = {
        worker: use.total - (capacity if isinstance(capacity, int) else capacity[worker])
        for worker, use in memory_of(plan, model, training).items()
    }
    worst = max(over, key=lambda worker: (over[worker], -worker))
    if over[worst] > 0:
        raise MemoryExceededError(f"memory exceeded on worker {worst} by {_size(over[worst])}")
    uneven = any(model.uneven(degree) for replica in plan.replicas for degree in set(replica.shape) - {0})
    if uneven and not plan.uneven_shards:
        raise PlanError("members of a stage hold unequal shards, and the plan isn't marked so")


def memory_of(plan: ParallelPlan, model: Model, training: Training, kept_until_w: float = 1.0) -> dict[int, MemoryUse]:
    """Bytes on each worker of the plan. Standbys keep their shard and step, and hold no activations.

    The job's own schedule counts as 1F1B, or as interleaved 1F1B if a stage has several chunks.

    Args:
        plan, model, training: the plan and its job. A plan without layers has Megatron's even split.
        kept_until_w: the share of activations that an op order with W keeps from B to W; B frees the rest.

    Raises:
        PlanError: the plan's layers differ from the model's, or members of a stage cannot share a layer.
    """
    replicas = [with_layers(replica, model) for replica in plan.replicas]
    training = training.under(plan)
    if plan.expert_parallel > 1:
        training = training.as_plans_say(plan.expert_parallel)
    accountants = {
        context: _Accountant(model, replace(training, context_parallel=context), replicas, kept_until_w)
        for context in {plan.context_parallel, *plan.context_groups}
    }
    used: dict[int, MemoryUse] = {}
    alike: dict[tuple[object, ...], dict[Coordinate, MemoryUse]] = {}
    try:
        for number, replica in enumerate(replicas):
            rounds = rounds_of(plan, number)
            context = len(shared_with(plan, number))
            key = (replica.shape, replica.chunks, replica.schedule, rounds, context)
            if key not in alike:
                run = replace(replica, micro_batches=filled_up(replica.micro_batches, rounds))
                alike[key] = accountants[context].of_replica(run)
            used |= {worker: alike[key][coordinate] for worker, coordinate in replica.workers()}
        for worker, kept in plan.standbys.items():
            if isinstance(kept, Coordinate):
                shards = _shards(replicas[0], kept)
            else:
                shards = kept or ()
            used[worker] = accountants[plan.context_parallel].of_state(shards)
    except ShardError as error:
        raise PlanError(str(error)) from None
    return used


def state_in_both(one: ParallelPlan, other: ParallelPlan, model: Model, training: Training) -> dict[int, int]:
    """Bytes of weights, gradients and optimizer of the shards that a worker has under both plans, if it has any. A
    distributed optimizer is shared under both of them, or under neither.

    Raises:
        PlanError: as of `memory_of`.
    """
    one, other = (replace(each, replicas=tuple(with_layers(r, model) for r in each.replicas)) for each in (one, other))
    accountant = _Accountant(model, training.under(one), one.replicas, 1.0)
    both = {w: set(one.shards_of(w)) & set(other.shards_of(w)) for w in one.members if w in other.members}
    try:
        return {worker: accountant.of_state(sorted(shards)).state for worker, shards in both.items() if shards}
    except ShardError as error:
        raise PlanError(str(error)) from None


@dataclass(frozen=True)
class LayerBytes:
    """Bytes that each layer takes on the tensor-parallel member with the largest share, each [layers].

    Attributes:
        state: weights, gradients and optimizer.
        kept: activations of one micro-batch, from F to B.
        working: extra memory of recomputation while the layer's backward runs.
    """

    state: NDArray[np.float64]
    kept: NDArray[np.float64]
    working: NDArray[np.float64]


def layer_bytes(model: Model, training: Training, degree: int, copies: int = 1) -> LayerBytes:
    """The terms of `memory_of`, layer by layer, for searches; a tied head counts as if the embedding were elsewhere.

    Args:
        model, training: of the job.
        degree: tensor-parallel degree.
        copies: replicas that hold each layer and share a distributed optimizer's state.

    Raises:
        ShardError: this many members cannot share a layer.
    """
    accountant = _Accountant(model, training, [], 1.0, copies)
    return LayerBytes(*np.array([accountant.of_layer(number, degree) for number in range(len(model.layers))]).T)


def with_layers(replica: Replica, model: Model) -> Replica:
    """The replica with explicit layers; a replica without layers gets Megatron's even split.

    Raises:
        PlanError: the layers cannot be split evenly, or their number differs from the model's.
    """
    if not replica.chunks:
        return replace(replica, chunks=even_chunks(len(model.layers) - 2, len(replica.stages)))
    if replica.chunks[-1].end != len(model.layers):
        raise PlanError(f"the plan has {replica.chunks[-1].end} layers, the model {len(model.layers)}")
    return replica


class _Accountant:
    """Bytes of shards and chunks of one job."""

    def __init__(
        self, model: Model, training: Training, replicas: Sequence[Replica], kept_until_w: float, copies: int = 1
    ) -> None:
        self._model = model
        self._distinct, self._index = model.distinct
        self._kept_by: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._state_by: dict[tuple[int, int, int, int, bool], tuple[Fraction, Fraction]] = {}
        self._training = training
        self._kept_until_w = kept_until_w
        self._copies = [0] * len(model.layers)
        """For each layer: the number of replicas that hold it, at least `copies`."""
        for replica in replicas:
            for chunk in replica.chunks:
                for layer in range(chunk.first, chunk.end) if replica.stages[chunk.stage] else ():
                    self._copies[layer] += 1
        self._copies = [max(held, copies) for held in self._copies]

    def of_layer(self, number: int, degree: int) -> tuple[float, float, float]:
        """Bytes of state, of kept activations and of working memory, on the member with the largest share."""
        kept, whole = self._activations(self._index[number], degree, 0)
        return self.of_state((Shard(number, number + 1, 0, degree),)).total, kept, whole - kept

    def of_replica(self, replica: Replica) -> dict[Coordinate, MemoryUse]:
        used: dict[Coordinate, MemoryUse] = {}
        ops = _ops_of(replica.schedule, replica.chunks, len(replica.stages), len(replica.micro_batches))
        for stage, members in enumerate(replica.stages):
            alike = bool(members) and not self._uneven(len(members))
            for tp_rank in range(len(members)):
                first, place = used.get(Coordinate(stage, 0)) if alike else None, Coordinate(stage, tp_rank)
                used[place] = first or self._of_member(replica, place, ops[stage])
        return used

    def _of_member(self, replica: Replica, coordinate: Coordinate, ops: _Ops) -> MemoryUse:
        degree = len(replica.stages[coordinate.stage])
        rank = coordinate.tp_rank if self._uneven(degree) else 0
        sizes, again = [0.0] * len(replica.chunks), 0.0
        for number, chunk in enumerate(replica.chunks):
            for layer in range(chunk.first, chunk.end) if chunk.stage == coordinate.stage else ():
                kept, whole = self._activations(self._index[layer], degree, rank)
                sizes[number] += kept
                again = max(again, whole - kept)
        peak = self._peak(ops, sizes) + self._deferred(replica, coordinate, rank)
        state = self.of_state(_shards(replica, coordinate))
        return replace(state, activations=ceil(peak), working=ceil(again))

    def _deferred(self, replica: Replica, coordinate: Coordinate, rank: int) -> float:
        """Bytes that wait for the end of the pipeline. Plans with unlike replicas keep none, and are not told apart."""
        if replica.chunks[-1].stage != coordinate.stage:
            return 0.0
        count, most = len(replica.micro_batches), self._training.deferred
        kept, _ = self._activations(self._index[-1], len(replica.stages[coordinate.stage]), rank)
        return kept * (count if most is None else min(count, most))

    def _peak(self, ops: _Ops, sizes: Sequence[float]) -> float:
        kinds, chunks = ops
        splits = bool((kinds == OpKind.W).any())
        kept = self._kept_until_w if splits else 0.0
        change = np.array([1.0, kept - 1.0, -kept])[kinds] * np.asarray(sizes)[chunks]
        return float(change.cumsum().max(initial=0.0))

    def of_state(self, shards: Sequence[Shard]) -> MemoryUse:
        """Bytes of weights, gradients and optimizer. Layers that copy the embedding need no copy if it is there."""
        training = self._training
        held, optimizer = Fraction(0), Fraction(0)
        has_embedding = any(shard.first == 0 for shard in shards)
        for shard in shards:
            degree = shard.tp_degree
            rank = shard.tp_rank if self._uneven(degree) else 0
            for number in range(shard.first, shard.end):
                key = (self._index[number], degree, rank, self._copies[number], has_embedding)
                if key not in self._state_by:
                    self._state_by[key] = self._state(*key)
                parameters, with_optimizer = self._state_by[key]
                held += parameters
                optimizer += with_optimizer
        return MemoryUse(
            ceil(held * training.weight_bytes),
            ceil(held * training.gradient_bytes),
            ceil(optimizer * training.optimizer_bytes),
            0,
            0,
        )

    def _uneven(self, degree: int) -> bool:
        """Whether memory differs between the members of a group."""
        experts = self._training.expert_tensor_parallel
        return self._model.uneven(degree) or (experts is not None and self._model.uneven(experts))

    def _state(
        self, distinct: int, degree: int, rank: int, copies: int, has_embedding: bool
    ) -> tuple[Fraction, Fraction]:
        """Parameters of a layer that a member holds, and the number for which it holds optimizer state."""
        held, optimizer = Fraction(0), Fraction(0)
        for part in self._distinct[distinct].parts:
            if part.copy and has_embedding:
                continue
            parameters, sharers = self._parameters(part, degree, rank, copies)
            held += parameters
            instances = self._training.instances_of(copies, degree)
            optimizer += parameters * instances / sharers if self._training.distributed_optimizer else parameters
        return held, optimizer

    def _parameters(self, part: Part, degree: int, rank: int, copies: int) -> tuple[Fraction, Fraction]:
        """Parameters of a part on a member, and the number of workers that hold the same ones."""
        if not part.experts:
            return part.parameters * part.share(degree, rank), Fraction(copies)
        tensor = self._training.expert_tensor_parallel or degree
        parameters = part.parameters * part.share(tensor, rank % tensor) * self._training.fullest_share(part.experts)
        return parameters, self._training.with_same_experts(copies, degree)

    def _activations(self, distinct: int, degree: int, rank: int) -> tuple[float, float]:
        """Bytes of one micro-batch that a layer keeps from F to B; and the same without recomputation."""
        key = (distinct, degree, rank)
        if key not in self._kept_by:
            layer = self._distinct[distinct]
            whole = self._kept(layer, degree, rank), self._of_all(layer, degree, rank)
            shared = self._training.context_parallel
            self._kept_by[key] = whole[0] / shared, whole[1] / shared
        return self._kept_by[key]

    def _kept(self, layer: Layer, degree: int, rank: int) -> float:
        """Bytes of one micro-batch that a layer keeps from F to B."""
        training = self._training
        if training.recompute is Recompute.FULL and layer.recomputable:
            return layer.input_bytes * training.tokens / (degree if training.sequence_parallel else 1)
        return self._of_all(layer, degree, rank, with_scores=training.recompute is Recompute.NONE)

    def _of_all(self, layer: Layer, degree: int, rank: int, with_scores: bool = True) -> float:
        """Bytes of one micro-batch that a layer would keep without recomputation."""
        training = self._training
        total = 0.0
        for part in layer.parts:
            size = part.token_bytes * training.tokens + with_scores * part.square_bytes * training.squares
            size *= training.busiest_share(part.experts) if part.experts else 1.0
            alike = not part.units and training.sequence_parallel
            total += size * float(Fraction(1, degree) if alike else part.share(degree, rank))
        return total


def _shards(replica: Replica, coordinate: Coordinate) -> tuple[Shard, ...]:
    degree = len(replica.stages[coordinate.stage])
    return tuple(
        Shard(chunk.first, chunk.end, coordinate.tp_rank, degree)
        for chunk in replica.chunks
        if chunk.stage == coordinate.stage and chunk.end > chunk.first
    )


@lru_cache(maxsize=256)
def _ops_of(schedule: Schedule | None, chunks: tuple[Chunk, ...], stages: int, micro_batches: int) -> list[_Ops]:
    """Kinds and chunks of each stage's ops."""
    if schedule is not None and schedule.orders:
        pairs = [[(KINDS.index(op.kind), op.chunk) for op in order] for order in schedule.orders]
    else:
        program = known_program(schedule, stages, len(chunks), micro_batches)
        pairs = [[(int(op.kind), op.stage) for op in order] for order in program.ops]
    arrays = [np.array(of_stage, np.int64).reshape(-1, 2).T for of_stage in pairs]
    return [(kinds, chunk) for kinds, chunk in arrays]
