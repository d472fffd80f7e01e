# SPDX-License-Identifier: Apache-2.0
"""The costs of a plan's parts in one job, layer by layer: the planner's view of time and memory.

Imports numpy, `pipeline`, `plan` and this package.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.cost.device import Device, layer_work
from megatron_resihp.cost.exchange import exchange_seconds
from megatron_resihp.cost.host_sums import HostSums
from megatron_resihp.cost.memory import LayerBytes, layer_bytes
from megatron_resihp.cost.model.layers import Model
from megatron_resihp.cost.model.parts import ShardError
from megatron_resihp.cost.training import Training
from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.plan.rules import Sharing

Array = NDArray[np.float64]

UNTIL_NEXT_EVENT_S: Final = 3600.0
"""Default time to the next event; within the range of the intervals in arXiv 2605.06374 (ResiHP), section 8."""


@dataclass(frozen=True, eq=False)
class JobCost:
    """A job's work on its devices, for a typical micro-batch.

    Attributes:
        model, training, device: the model, its training settings and the devices. `device.latency` and
            `device.bandwidth` are those of a healthy link between nodes.
        micro_batches: per global batch, over all replicas.
        workers_per_node: worker w lives on node w // workers_per_node; tensor-parallel groups stay inside a node.
        squares: Σ l² of the documents of a typical micro-batch, tokens²; None if each sample is one document.
        alone: measured seconds of F, B and W of each layer for a micro-batch on one healthy device without tensor
            parallelism, [3, layers]; None derives them from the device's peak.
        measured: the same for members of groups, by degree, where known; it takes precedence.
        rebuild_s: seconds to build new process groups.
        until_next_event_s: expected seconds until the next change of health, within which a change of plan must pay for
            itself.
        unlike_bandwidth: bytes/s at most between stages of unlike degree, whose plans Megatron's own groups can't run.
        state_bandwidth: bytes/s at most at which a worker gets state of others while the job changes to another plan.
        host_sums: how such plans sum gradients, where that takes time of its own; None: nowhere.
        own_sums_s: measured seconds of an iteration in which Megatron's own groups sum gradients; 0: unknown.
        rest_s: measured seconds of an iteration outside its pipelines and beside sums of gradients; 0: unknown.
        beside: bytes that must stay free beside a plan's state on each device while nothing runs: those of the old
            state, which stays until the plan is in force.
        sharings: how many replicas may share each sequence and each layer's experts, the job's own numbers first.
        replica_workers: of each replica, in jobs whose replicas share; None: of any number.
        equal_rounds: replicas that share experts must have equally many micro-batches.
    """

    model: Model
    training: Training
    device: Device
    micro_batches: int
    workers_per_node: int = 8
    squares: float | None = None
    alone: Array | None = None
    measured: Mapping[int, Array] = field(default_factory=dict)
    rebuild_s: float = 2.0
    until_next_event_s: float = float("inf")
    unlike_bandwidth: float = float("inf")
    state_bandwidth: float = float("inf")
    host_sums: HostSums | None = None
    own_sums_s: float = 0.0
    rest_s: float = 0.0
    beside: int = 0
    sharings: tuple[Sharing, ...] = (Sharing(),)
    replica_workers: int | None = None
    equal_rounds: bool = False

    @property
    def layers(self) -> int:
        return len(self.model.layers)

    @property
    def shares(self) -> bool:
        """Whether replicas may share sequences or experts; then all have the job's own layers and sizes."""
        return self.sharings != (Sharing(),)

    def shared(self, context: int, experts: int) -> "JobCost":
        """The costs where so many replicas share each sequence and each layer's experts."""
        return self._shared(context, experts)

    def exchange(self, degree: int, near: int) -> Array:
        """Seconds of F, B and W of each layer in which members of replicas that share wait for each other's tokens, or
        keys and values, [3, layers]; read-only.

        Args:
            degree: tensor-parallel.
            near: how many of them the one with the fewest has on its node, itself included.
        """
        return self._exchange(degree, near)

    def seconds(self, degree: int) -> Array:
        """Seconds of F, B and W of each layer on the healthy member with the largest share, [3, layers]; read-only.

        If the layers cannot split their backward, W's time is in B.

        Raises:
            ShardError: this many members cannot share a layer.
        """
        return self._seconds(degree)

    def share_of_largest(self, degree: int, tp_rank: int, first: int, end: int) -> float:
        """A member's FLOPs in layers first, …, end − 1 over those of the member with the largest share; 1 for even
        shards.

        Raises:
            ShardError: this many members cannot share a layer.
        """
        if not self.uneven(degree):
            return 1.0
        own, largest = (self._work(degree, rank)[:, first:end].sum() for rank in (tp_rank, 0))
        return float(own / largest) if largest else 1.0

    def seconds_per_square(self, degree: int) -> Array:
        """Seconds that each token² of Σ l² adds to `seconds`, by its part of the FLOPs, [3, layers]; read-only.

        Raises:
            ShardError: this many members cannot share a layer.
        """
        return self._per_square(degree)

    def bytes(self, degree: int, copies: int = 1, plan: ParallelPlan | None = None) -> LayerBytes:
        """Memory of each layer on the member with the largest share; see `cost.memory.layer_bytes`. Read-only.

        Args:
            degree, copies: as there.
            plan: whose layers they are; None: of one that is to be found. That cuts layers otherwise than the job's own
                arguments do, so its replicas have whole optimizer state where Megatron's own groups must share it.
        """
        if plan is None:
            whole = self.training.shared_by is not None and not self.shares
        else:
            whole = not self.training.under(plan).distributed_optimizer
        return self._bytes(degree, copies, whole)

    @property
    def typical_squares(self) -> float:
        """Σ l² of a typical micro-batch, tokens²."""
        return self.training.squares if self.squares is None else self.squares

    def sums(self, plan: ParallelPlan) -> float:
        """Seconds of an iteration in which all workers sum gradients and do nothing else.

        Raises:
            PlanError: the plan's layers differ from the model's.
        """
        return 0.0 if self.host_sums is None else self.host_sums.seconds(plan, self.model, self.training)

    def outside(self, plan: ParallelPlan) -> float:
        """Seconds of an iteration under a plan in which neither pipelines nor `sums` run, as far as they were measured.

        Raises:
            PlanError: the plan's layers differ from the model's.
        """
        return self.rest_s + (0.0 if self.own_sums_s and self.sums(plan) else self.own_sums_s)

    def transfer(self, sender_degree: int, receiver_degree: int) -> float:
        """Seconds of a stage's result over a healthy link, in as many pieces as the larger group has members."""
        pieces = max(sender_degree, receiver_degree)
        size = self.model.hidden_bytes * self.training.tokens / self.training.context_parallel / pieces
        most = self.device.bandwidth if sender_degree == receiver_degree else self.unlike_bandwidth
        return self.device.latency + size / min(self.device.bandwidth, most)

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """The tensor-parallel degrees, up to a node's workers, with which the model's layers can be laid out."""
        return tuple(degree for degree in range(1, self.workers_per_node + 1) if _can_share(self, degree))

    def uneven(self, degree: int) -> bool:
        """Whether members of a group of this degree hold unequal shards, which an executor must know.

        With sequence parallelism, unequal parts of a sequence count too.
        """
        return self.model.uneven(degree) or not self.training.can_share(degree)

    @cached_property
    def _seconds(self) -> Callable[[int], Array]:
        return cache(lambda degree: _as_run(self._seconds_apart(degree), self.training))

    @cached_property
    def _bytes(self) -> Callable[[int, int, bool], LayerBytes]:
        return cache(self._bytes_apart)

    def _bytes_apart(self, degree: int, copies: int, whole: bool) -> LayerBytes:
        training = replace(self.training, distributed_optimizer=False) if whole else self.training
        return layer_bytes(self.model, training, degree, copies)

    @cached_property
    def _shared(self) -> Callable[[int, int], "JobCost"]:
        return cache(self._shared_apart)

    def _shared_apart(self, context: int, experts: int) -> "JobCost":
        if (context, experts) == (self.training.context_parallel, self.training.expert_parallel):
            return self
        training = replace(self.training.as_plans_say(experts), context_parallel=context)
        other = replace(self, training=training, alone=None, measured={})

        def scaled(seconds: Array, degree: int) -> Array:
            work, own = other._work(degree), self._work(degree)
            # What takes time without FLOPs, as lookups do, takes it for each token.
            of_tokens = np.full_like(work, self.training.context_parallel / context)
            return seconds * np.divide(work, own, out=of_tokens, where=own > 0)

        alone = None if self.alone is None else scaled(self.alone, 1)
        return replace(other, alone=alone, measured={k: scaled(each, k) for k, each in self.measured.items()})

    @cached_property
    def _exchange(self) -> Callable[[int, int], Array]:
        return cache(lambda degree, near: exchange_seconds(self.model, self.training, self.device, degree, near))

    @cached_property
    def _per_square(self) -> Callable[[int], Array]:
        return cache(self._per_square_of)

    def _per_square_of(self, degree: int) -> Array:
        work, per_square = self._work(degree), layer_work(self.model, self.training, degree)[..., 1]
        share = np.divide(per_square, work, out=np.zeros_like(work), where=work > 0)
        return _as_run(self._seconds_apart(degree) * share, self.training)

    def _seconds_apart(self, degree: int) -> Array:
        work = self._work(degree)
        if degree in self.measured:
            return self.measured[degree]
        if self.alone is None:
            return work / self.device.rate(degree)
        whole = self._work(1)
        share = np.full(whole.shape, 1 / degree)
        np.divide(work, whole, out=share, where=whole > 0)
        return self.alone * share * (self.device.rate(1) / self.device.rate(degree))

    def _work(self, degree: int, tp_rank: int = 0) -> Array:
        """FLOPs of a member in each layer for a typical micro-batch, [3, layers]; TP rank 0 has the largest share."""
        workload = np.array([self.training.tokens, self.typical_squares])
        work: Array = layer_work(self.model, self.training, degree, tp_rank) @ workload
        assert work.shape == (len(OpKind), self.layers)
        return work


def _can_share(cost: JobCost, degree: int) -> bool:
    if cost.training.only_degree not in (None, degree):
        return False
    try:
        cost.seconds(degree)
    except ShardError:
        return False
    return True


def _as_run(seconds: Array, training: Training) -> Array:
    """Separate seconds of F, B and W → those of the job's layers, which may not split the backward; read-only."""
    if not training.splits_backward:
        forward, backward, weight = seconds
        seconds = np.stack([forward, backward + weight, np.zeros_like(weight)])
    seconds.setflags(write=False)
    return seconds
