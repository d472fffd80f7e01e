# SPDX-License-Identifier: Apache-2.0
"""What the replanner knows of the job, from its events. May import `plan`, `events`, `protocol` and `config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_resihp.config import HOST, MEMORY_RESERVE, UNIFORM
from megatron_resihp.events.epochs import EpochStarted
from megatron_resihp.events.event import Event
from megatron_resihp.events.job import BatchGrown, Job, Model
from megatron_resihp.events.training import ExpertLoads
from megatron_resihp.events.workers import NodeLeft, WorkerDead, WorkersLeft, WorkerWaiting
from megatron_resihp.plan import Chunk, ParallelPlan
from megatron_resihp.plan.rules import Sharing
from megatron_resihp.protocol.planning import KnownJob


class JobFacts:
    """Kept up to date event by event.

    Attributes:
        job: what a worker has told of the job; None: no worker has yet.
        plan: in force.
        joining: workers that are ready, and in no plan yet.
        dead: workers that have died or left.
    """

    def __init__(self) -> None:
        self.job: Job | None = None
        self.plan: ParallelPlan | None = None
        self.joining: set[int] = set()
        self.dead: set[int] = set()
        self._arguments: Mapping[str, Any] | None = None
        """Megatron's, from which the model follows."""
        self._busiest_shares: tuple[float, ...] = ()

    def note(self, event: Event) -> None:
        """Take an event in."""
        match event:
            case Job():
                self.job = event
            case BatchGrown() if self.job is not None:
                samples, count = event.global_batch_size, event.micro_batches
                self.job = replace(self.job, global_batch_size=samples, micro_batches=count)
            case Model():
                self._arguments = event.arguments
            case ExpertLoads():
                self._busiest_shares = event.busiest_shares
            case EpochStarted():
                self.plan = ParallelPlan.from_dict(event.plan)
                self.joining.difference_update(self.plan.members)
            case WorkerWaiting():
                self.joining.add(event.waiting)
            case WorkerDead():
                self._lose({event.dead})
            case WorkersLeft() | NodeLeft():
                self._lose(set(event.left))

    def _lose(self, workers: set[int]) -> None:
        self.joining -= workers
        self.dead |= workers

    @property
    def strategy(self) -> str:
        """The strategy that plans when workers die."""
        return (self.job.strategy if self.job is not None else None) or UNIFORM

    @property
    def sharings(self) -> tuple[Sharing, ...]:
        """How many replicas may share each sequence and each layer's experts; the job's own numbers first."""
        even, uneven = (self.job.sharings, self.job.uneven_sharings) if self.job is not None else (None, None)
        dealt = (Sharing(1, replicas, 0, experts) for replicas, experts in uneven or ())
        return (*(Sharing(*each) for each in even or ((),)), *dealt)

    def known(self) -> tuple[KnownJob, tuple[Chunk, ...]]:
        """What costs depend on, and the job's own split into layers."""
        job = self.job
        assert job is not None and job.chunks is not None, "a plan is asked for before there is a job"
        assert job.tensor_parallel is not None and job.micro_batches is not None
        arguments = None if self._arguments is None else dict(self._arguments)
        reserve = MEMORY_RESERVE if job.memory_reserve is None else job.memory_reserve
        known = KnownJob(
            job.tensor_parallel, job.micro_batches, arguments, job.emulated, job.device_memory, reserve,
            job.carrier or HOST, job.host_memory, self.sharings, bool(job.equal_rounds), job.pipeline_last is not False,
            self._busiest_shares,
        )  # fmt: skip
        return known, tuple(Chunk(*chunk) for chunk in job.chunks)
