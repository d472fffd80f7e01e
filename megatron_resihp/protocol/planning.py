# SPDX-License-Identifier: Apache-2.0
"""What the coordinator's process and a planner's process tell each other, a line each.

May import `coding`, `config`, `plan` and this package's other modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Self, get_args

from megatron_resihp.coding import Between
from megatron_resihp.config import HOST, MEMORY_RESERVE
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.plan.rules import Sharing
from megatron_resihp.protocol.job import JobDescription
from megatron_resihp.protocol.values import (
    MOST_MICRO_BATCHES,
    Degree,
    Finite,
    LayerChunk,
    Natural,
    Positive,
    Sharers,
    Worker,
)
from megatron_resihp.protocol.wire import Kinds


@dataclass(frozen=True)
class KnownJob:
    """What is known of a job that the costs of its plans depend on.

    Attributes:
        tensor_parallel: the job's own degree.
        micro_batches: in a global batch.
        arguments: Megatron's, that the model is made of; None: no worker has told them yet.
        emulated: name of the emulated device; None: the clock is real.
        device_memory: bytes; None: unknown.
        memory_reserve: percent of it that plans leave free.
        carrier: what carries gradients and results under a heterogeneous plan, one of config.CARRIERS.
        host_memory: bytes that each worker may take of the host's for its state; None: unknown.
        sharings: how many replicas may share each sequence and each layer's experts, the job's own numbers first.
        equal_rounds: those that share experts must have equally many micro-batches.
        pipeline_last: Megatron's default order of ranks.
        busiest_shares: see `Training`; empty: not measured yet, or there are no experts.
    """

    tensor_parallel: Degree
    micro_batches: Annotated[int, Between(1, MOST_MICRO_BATCHES)]
    arguments: dict[str, Any] | None = None
    emulated: str | None = None
    device_memory: Natural | None = None
    memory_reserve: Finite = MEMORY_RESERVE
    carrier: str = HOST
    host_memory: Natural | None = None
    sharings: tuple[Sharers, ...] = (Sharing(),)
    equal_rounds: bool = False
    pipeline_last: bool = True
    busiest_shares: tuple[Finite, ...] = ()

    @property
    def shares(self) -> bool:
        """Whether replicas may share sequences or experts."""
        return self.sharings != (Sharing(),)

    @classmethod
    def of(
        cls, job: JobDescription, arguments: dict[str, Any] | None, sharings: tuple[Sharing, ...] = (Sharing(),)
    ) -> Self:
        """What workers have told of a job, and of its model's arguments. `sharings`: what follows from that."""
        return cls(
            job.tensor_parallel,
            job.micro_batches,
            arguments,
            job.emulated,
            job.device_memory,
            job.memory_reserve,
            job.carrier,
            job.host_memory,
            sharings,
            bool(job.equal_rounds),
            job.pipeline_last,
        )


@dataclass(frozen=True)
class PlannerRequest:
    """Find a plan.

    Attributes:
        strategy: by name.
        own: the job's own split into layers.
        workers, workers_per_node: of the job, with all its slots taken.
        plan: in force.
        speeds: of all live workers.
        links: slow ones: both ends, and the speed.
        cost_model: path of what the detector learns of costs; need not be there yet.
        rehearsal: no thread waits for the answer, and none is given.
    """

    strategy: str
    job: KnownJob
    own: tuple[LayerChunk, ...]
    workers: Positive
    workers_per_node: Positive
    plan: ParallelPlan
    speeds: dict[Worker, Finite]
    links: tuple[tuple[Worker, Worker, Finite], ...] = ()
    cost_model: str | None = None
    rehearsal: bool = False


PLANNER_REQUESTS = Kinds[PlannerRequest]([PlannerRequest], "a request to the planner")


@dataclass(frozen=True)
class PlanFound:
    """A strategy's plan.

    Attributes:
        plan: the next one, with layers; all live workers are in it.
        planning_s: how long the search took.
        iteration_s: seconds of an iteration: of its pipelines, and of what was measured outside them.
        current_s: the same of the plan in force as things are; None: it can't go on.
        healthy_s: the same of the plan in force if all its workers were well.
        moving_s: how long the job stands still to get there, for new process groups and for state that is sent.
        sending_s: the same for state only.
        bound_s: what no plan can beat.
    """

    plan: ParallelPlan
    planning_s: Finite
    iteration_s: Finite
    current_s: Finite | None
    healthy_s: Finite
    moving_s: Finite
    sending_s: Finite
    bound_s: Finite


@dataclass(frozen=True)
class NoPlan:
    """There is no plan.

    Attributes:
        reason: why, in words.
        unanswered: this is not of the planner, which has ended or taken too long.
    """

    reason: str
    unanswered: bool = False


PlannerAnswer = PlanFound | NoPlan
PLANNER_ANSWERS = Kinds[PlannerAnswer](get_args(PlannerAnswer), "an answer of the planner")
