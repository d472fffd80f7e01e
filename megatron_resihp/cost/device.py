# SPDX-License-Identifier: Apache-2.0
"""Seconds of a plan's ops on a device, from its peak rate, before any measurement.

Imports numpy, `plan` and this package.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_resihp.cost.memory import with_layers
from megatron_resihp.cost.model.layers import Layer, Model
from megatron_resihp.cost.training import Recompute, Training
from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.plan import Replica

Array = NDArray[np.float64]
F, B, W = OpKind
NETWORK_BANDWIDTH: Final = 25e9
"""Bytes/s from node to node for each device, if nothing else is known: a network card of 200 Gb/s for each GPU."""


@dataclass(frozen=True)
class Device:
    """Rates of a healthy device and its links.

    Attributes:
        flops: peak FLOP/s in the training's precision.
        efficiency: share of the peak that layers reach without tensor parallelism.
        tp_efficiency: share of that rate for each member of a group, by degree, for some degrees; linear between them,
            constant beyond the last.
        memory: bytes that training may use.
        host: bytes of host memory that a worker's state may take while it changes to another plan.
        latency, bandwidth: of a transfer between stages, in seconds and bytes/s.
        node_bandwidth: bytes/s of a worker to others of its node.
    """

    flops: float
    efficiency: float = 1.0
    tp_efficiency: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})
    memory: int = 80 * 2**30
    host: int = 0
    latency: float = 0.0
    bandwidth: float = float("inf")
    node_bandwidth: float = float("inf")

    def rate(self, degree: int) -> float:
        """FLOP/s of a healthy member of a tensor-parallel group."""
        degrees = sorted(self.tp_efficiency)
        shares = [self.tp_efficiency[each] for each in degrees]
        return self.flops * self.efficiency * float(np.interp(degree, degrees, shares))


def layer_work(model: Model, training: Training, degree: int, tp_rank: int = 0) -> Array:
    """FLOPs of a tensor-parallel member in each layer: [3 (F, B, W), layers, 2 (per token, per token² of a document)].

    Recomputation counts as B. Word lookups are assumed to cost nothing. TP rank 0 has the largest share. Of replicas
    that share sequences each has an equal part; of those that share experts, the one with the busiest experts counts.

    Raises:
        ShardError: this many members cannot share a layer.
    """
    distinct, index = model.distinct
    return np.stack([_work_of(layer, training, degree, tp_rank) for layer in distinct], axis=1)[:, list(index)]


def _work_of(layer: Layer, training: Training, degree: int, tp_rank: int) -> Array:
    work = np.zeros((len(OpKind), 2))
    for part in layer.parts:
        # Members that all hold a part share its tokens if the sequence is cut.
        alike = not part.units and training.sequence_parallel
        share = 1 / degree if alike else float(part.share(degree, tp_rank))
        share *= (training.busiest_share(part.experts) if part.experts else 1.0) / training.context_parallel
        forward = np.array([part.weight_flops + part.token_flops, part.square_flops])
        work[F] += share * forward
        work[B] += share * np.array([part.weight_flops + 2 * part.token_flops, 2 * part.square_flops])
        work[W] += share * np.array([part.weight_flops, 0.0])
    if training.recompute is Recompute.FULL and layer.recomputable:
        work[B] += work[F]
    elif training.recompute is Recompute.SELECTIVE:
        work[B, 1] += work[F, 1]
    return work


class _Work:
    """`layer_work` by member, each computed once on demand."""

    def __init__(self, model: Model, training: Training) -> None:
        self._model, self._training = model, training
        self._known: dict[tuple[int, int], Array] = {}

    def of(self, degree: int, tp_rank: int) -> Array:
        key = (degree, tp_rank if self._model.uneven(degree) else 0)
        if key not in self._known:
            self._known[key] = layer_work(self._model, self._training, *key)
        return self._known[key]


def durations(
    replica: Replica,
    model: Model,
    training: Training,
    device: Device,
    tokens: ArrayLike,
    squares: ArrayLike,
    speed: Mapping[int, float] | None = None,
) -> Array:
    """Seconds of each op of a replica, [3 (F, B, W), chunks, micro-batches], as `pipeline.simulate` takes them.

    A stage is as fast as its slowest member, with that member's share of the work.

    Args:
        replica: its stages and chunks; a stage without members takes infinitely long.
        model, training, device: of the job.
        tokens, squares: N and Σ l² of the micro-batches, each [micro-batches].
        speed: of workers that are not healthy, in (0, 1].

    Raises:
        PlanError: the replica's layers differ from the model's.
        ShardError: members of a stage cannot share a layer.
    """
    replica = with_layers(replica, model)
    workload = np.stack([np.asarray(tokens, np.float64), np.asarray(squares, np.float64)])
    seconds = np.full((len(OpKind), len(replica.chunks), workload.shape[1]), np.inf)
    work = _Work(model, training)
    for number, chunk in enumerate(replica.chunks):
        members = replica.stages[chunk.stage]
        each = []
        for tp_rank, worker in enumerate(members):
            own = work.of(len(members), tp_rank)[:, chunk.first : chunk.end].sum(axis=1)
            each.append(own / (device.rate(len(members)) * (speed or {}).get(worker, 1.0)))
        if each:
            seconds[:, number] = np.max(np.unique(each, axis=0) @ workload, axis=0)
    if not (training.splits_backward and replica.schedule and replica.schedule.splits_backward):
        seconds[B] += seconds[W]
        seconds[W] = 0.0
    return seconds


def transfers(replica: Replica, model: Model, device: Device, tokens: ArrayLike) -> Array:
    """Seconds of each transfer between chunks, [2 (activations, their gradients), chunks − 1, micro-batches].

    A result is cut into as many pieces as the larger of both groups has members; all pieces are sent once, in parallel.

    Raises:
        PlanError: the replica's layers differ from the model's.
    """
    replica = with_layers(replica, model)
    degrees = np.array([len(replica.stages[chunk.stage]) for chunk in replica.chunks])
    lanes = np.maximum(np.maximum(degrees[1:], degrees[:-1]), 1)
    pieces = model.hidden_bytes * np.asarray(tokens, np.float64) / lanes[:, np.newaxis]
    return np.broadcast_to(device.latency + pieces / device.bandwidth, (2, *pieces.shape)).copy()
