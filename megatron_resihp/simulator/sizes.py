# SPDX-License-Identifier: Apache-2.0
"""From a job's sizes, on a command line or in a scenario, to its costs and the layout at the start.

Imports `plan`, `cost` and `planner`.
"""

from dataclasses import dataclass, replace
from typing import Final

from megatron_resihp.config import MEMORY_RESERVE
from megatron_resihp.cost.device import NETWORK_BANDWIDTH, Device
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.memory import MemoryExceededError, check_plan
from megatron_resihp.cost.model.layers import Model
from megatron_resihp.cost.model.parts import ShardError
from megatron_resihp.cost.room import usable
from megatron_resihp.cost.training import Training
from megatron_resihp.plan import Chunk, OwnSplit, ParallelPlan, PlanError, Replica, deal, even_counts
from megatron_resihp.plan.layers import chunks_from
from megatron_resihp.plan.rules import Sharing
from megatron_resihp.planner.job_shape import can_share_sequence, context_degrees, expert_degrees, sharings

A100_FLOPS: Final = 312e12
EFFICIENCY: Final = 0.45
"""Share of a device's peak that layers reach without tensor parallelism, if nothing was measured."""
TP_EFFICIENCY: Final = {1: 1.0, 2: 0.97, 4: 0.93, 8: 0.86}
"""Share of that rate in a tensor-parallel group inside a node, whose all-reduces are not hidden."""
LATENCY_S: Final = 20e-6
GBPS: Final = NETWORK_BANDWIDTH * 8 / 1e9
"""Gb/s from node to node for each GPU, as running jobs assume."""
NODE_GBPS: Final = 2400.0
"""Gb/s of an A100 to the others of its node (NVLink 3, in one direction)."""


class SizesError(ValueError):
    """Sizes that no job can have; the message is one line for the user."""


class NoRoomError(SizesError):
    """The devices have too little memory."""


def a100(
    flops: float = A100_FLOPS, efficiency: float = EFFICIENCY, memory_gib: float = 80.0, gbps: float = GBPS,
    reserve: float = MEMORY_RESERVE, node_gbps: float = NODE_GBPS,
) -> Device:  # fmt: skip
    """A GPU described by its data sheet; the defaults are an A100's. `reserve`: percent of the memory."""
    return Device(
        flops=flops,
        efficiency=efficiency,
        tp_efficiency=TP_EFFICIENCY,
        memory=usable(int(memory_gib * 2**30), reserve),
        latency=LATENCY_S,
        bandwidth=gbps * 1e9 / 8,
        node_bandwidth=node_gbps * 1e9 / 8,
    )


@dataclass(frozen=True)
class Sizes:
    """A job with a uniform layout.

    Attributes:
        model, training, device: the model, its training settings and the devices.
        tensor, pipeline: degrees of parallelism at the start.
        data: replicas at the start, among them those that share sequences.
        micro_batches: per global batch, over all replicas.
        workers_per_node: worker w lives on node w // workers_per_node.
        context, experts: how many replicas share each sequence, and each layer's experts.
        members: of a stage that have the same experts; 0: all have (see `ParallelPlan.expert_members`).
    """

    model: Model
    training: Training
    device: Device
    tensor: int
    pipeline: int
    data: int
    micro_batches: int
    workers_per_node: int = 8
    context: int = 1
    experts: int = 1
    members: int = 0

    @property
    def workers(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def title(self) -> str:
        """The layout in words."""
        context = f" × CP {self.context}" if self.context > 1 else ""
        expert = self.experts * self.groups
        experts = f", EP {expert} × ETP {self.tensor // self.groups}" if expert > 1 else ""
        layout = f"TP {self.tensor}{context} × PP {self.pipeline} × DP {self.data // self.context}{experts}"
        return f"{self.workers} GPUs, {layout}, {self.micro_batches} micro-batches"

    @property
    def groups(self) -> int:
        """Groups of a stage's members that have other experts each."""
        return self.tensor // (self.members or self.tensor)

    def cost(self) -> JobCost:
        sharings = self._sharings()
        return JobCost(
            model=self.model,
            training=replace(
                self.training,
                expert_groups=self.groups,
                shared_by=OwnSplit(start_chunks(self.model, self.pipeline), self.tensor),
            ),
            device=self.device,
            micro_batches=self.micro_batches,
            workers_per_node=self.workers_per_node,
            sharings=sharings,
            replica_workers=self.tensor * self.pipeline if sharings != (Sharing(),) else None,
        )

    def _sharings(self) -> tuple[Sharing, ...]:
        """As jobs take them: smaller numbers that divide experts or sequence, too, for when fewer replicas are left.

        Raises:
            SizesError: no job can have these.
        """
        members = self.tensor if self.training.sequence_parallel else 1
        contexts = context_degrees(self.context, self.training.sequence_length, members)
        experts = expert_degrees(self.experts, self.model.experts // self.groups)
        try:
            return sharings(contexts, experts, self.members)
        except ValueError as error:
            raise SizesError(str(error)) from None

    def plan(self) -> ParallelPlan:
        """Megatron's layout of ranks 0, 1, …: TP peers next to each other, then replicas, then stages.

        Raises:
            SizesError: the sizes don't fit each other, the model or the memory.
        """
        self._check()
        chunks = start_chunks(self.model, self.pipeline)
        shares = deal(even_counts(self.micro_batches, self.data // self.context))
        rows = (Replica(self._stages(r), shares[r // self.context], chunks) for r in range(self.data))
        try:
            plan = ParallelPlan(
                tuple(rows), context_parallel=self.context, expert_parallel=self.experts, expert_members=self.members
            )
            check_plan(plan, self.model, self.training, self.device.memory)
        except PlanError as error:
            kind = NoRoomError if isinstance(error, MemoryExceededError) else SizesError
            raise kind(f"the layout at the start can't be run: {error}") from None
        return plan

    def _stages(self, replica: int) -> tuple[tuple[int, ...], ...]:
        firsts = (self.tensor * (replica + self.data * stage) for stage in range(self.pipeline))
        return tuple(tuple(range(first, first + self.tensor)) for first in firsts)

    def _check(self) -> None:
        for name in ("tensor", "pipeline", "data", "micro_batches", "workers_per_node", "context", "experts"):
            if getattr(self, name) < 1:
                raise SizesError(f"{name.replace('_', ' ')} must be at least 1, got {getattr(self, name)}")
        if self.workers_per_node % self.tensor:
            raise SizesError(f"TP groups of {self.tensor} don't fit into nodes of {self.workers_per_node}")
        self._check_sharing()
        if self.micro_batches * self.context < self.data:
            raise SizesError(f"{self.micro_batches} micro-batches are fewer than {self.data} replicas")
        if self.pipeline > len(self.model.layers) - 2:
            raise SizesError(f"{self.pipeline} stages are more than the model's {len(self.model.layers) - 2} layers")
        try:
            self.cost().seconds(self.tensor)
        except ShardError as error:
            raise SizesError(str(error)) from None

    def _check_sharing(self) -> None:
        members = self.tensor if self.training.sequence_parallel else 1
        tokens = self.training.sequence_length
        if not can_share_sequence(self.context, tokens, members):
            raise SizesError(f"{self.context} replicas can't share the {tokens} tokens of a sequence evenly")
        expert = self.experts * self.groups
        if expert > 1 and (not self.model.experts or self.model.experts % expert):
            raise SizesError(f"EP {expert} can't share the {self.model.experts} experts of a layer evenly")
        loads = len(self.training.expert_loads)
        if loads and loads != self.model.experts:
            raise SizesError(f"there are loads of {loads} experts; a layer has {self.model.experts}")


def sharers_of_experts(expert: int, expert_tensor: int | None, tensor: int) -> tuple[int, int]:
    """Megatron's degrees → how many replicas share each layer's experts, and `Sizes.members`.

    Args:
        expert, expert_tensor: Megatron's; None: as `tensor`.
        tensor: tensor-parallel degree.

    Raises:
        SizesError: members of a stage would have the same experts, which no plan says.
    """
    if expert_tensor in (None, tensor):
        return expert, 0
    if tensor % expert_tensor:
        raise SizesError(f"ETP {expert_tensor} doesn't divide TP {tensor}")
    replicas, rest = divmod(expert, tensor // expert_tensor)
    if rest or not replicas:
        raise SizesError(f"EP {expert} x ETP {expert_tensor} isn't a multiple of TP {tensor}")
    return replicas, expert_tensor


def start_chunks(model: Model, stages: int) -> tuple[Chunk, ...]:
    """One chunk for each stage, with equal numbers of decoder layers, or one more in each of the first stages.

    The embedding is in the first chunk, and the head in the last.
    """
    counts = list(even_counts(len(model.layers) - 2, stages))
    counts[0] += 1
    counts[-1] += 1
    return chunks_from(counts, stages)
