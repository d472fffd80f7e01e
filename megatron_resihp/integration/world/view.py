# SPDX-License-Identifier: Apache-2.0
"""What one worker is under a plan, whichever mode runs it. May import `plan` only.

A view says nothing of groups or tensors, so there can be one of a plan that is still to come.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_resihp.plan import ParallelPlan, data_parallel_of, deal, even_share
from megatron_resihp.plan.microbatches import counts_by_size, filled_up
from megatron_resihp.plan.parallel_plan import group_number, rounds_of, shared_with


@dataclass(frozen=True)
class View(ABC):
    """A plan, seen by one worker.

    Attributes:
        plan: the plan.
        worker: whose view it is.
    """

    plan: ParallelPlan
    worker: int

    @property
    def works(self) -> bool:
        """Whether the plan gives this worker work (False: it is a standby)."""
        return self.plan.replica_of(self.worker) is not None

    @property
    def replica(self) -> int:
        """Index of the replica that this worker works in."""
        replica = self.plan.replica_of(self.worker)
        assert replica is not None, "a standby has no replica"
        return replica

    @property
    def tp_rank(self) -> int | None:
        """This worker's place in its tensor-parallel group; None for a standby."""
        coordinate = self.plan.coordinate_of(self.worker) if self.works else None
        return None if coordinate is None else coordinate.tp_rank

    @property
    @abstractmethod
    def rank_order(self) -> tuple[int, ...]:
        """The worker id of each torch rank."""

    @property
    @abstractmethod
    def read_order(self) -> tuple[int, ...]:
        """Indices in the global batch of the micro-batches that this worker runs forwards, in order."""

    @property
    def counted(self) -> tuple[int, ...]:
        """The first ones of `read_order`, or all. The others count nothing: this worker only runs as many rounds as
        those that share experts with it."""
        return self.read_order

    def counts(self, number: int) -> bool:
        """Whether a micro-batch number of this worker's ops is of one that counts."""
        return True

    @property
    def feeds_first(self) -> bool:
        """Whether this worker is to tell of the samples that it reads; others that share the sequences don't."""
        return True

    @abstractmethod
    def evaluation_order(self, count: int) -> Sequence[int]:
        """The micro-batches that this worker reads in an evaluation of `count`."""

    @property
    @abstractmethod
    def numbering(self) -> tuple[int, ...]:
        """The index in the global batch that each micro-batch number of this worker's ops stands for."""

    @property
    def op_numbers(self) -> tuple[int, ...]:
        """By what the detector is told of these ops: equal numbers for those that workers can only run together."""
        return self.numbering

    @property
    @abstractmethod
    def is_first_stage(self) -> bool:
        """Whether this worker works on the embedding."""

    @property
    @abstractmethod
    def is_last_stage(self) -> bool:
        """Whether this worker has the head."""

    @property
    @abstractmethod
    def reports(self) -> bool:
        """Whether this worker, and no other, writes the events of each iteration."""


@dataclass(frozen=True)
class UniformView(View):
    """A plan that Megatron's own groups can run.

    Attributes:
        pipeline_last: whether Megatron counts ranks through pipelines last (`--use-tp-pp-dp-mapping` is not given).
        micro_batch_group: how many go together in an interleaved pipeline, if the job has its way; None: it isn't one.
    """

    pipeline_last: bool
    micro_batch_group: int | None = None

    @property
    def fewest_micro_batches(self) -> int:
        """That Megatron's own schedule can run."""
        return 1 if self.micro_batch_group is None else self.plan.grid.pipeline_parallel

    @property
    def rank_order(self) -> tuple[int, ...]:
        return self.plan.grid.rank_order(pipeline_last=self.pipeline_last)

    @property
    def read_order(self) -> tuple[int, ...]:
        return filled_up(self.counted, rounds_of(self.plan, self.replica))

    @property
    def counted(self) -> tuple[int, ...]:
        return self.plan.replicas[self.replica].micro_batches

    def counts(self, number: int) -> bool:
        return number < len(self.counted)

    def evaluation_share(self, count: int) -> Sequence[int]:
        """Which of `count` micro-batches this worker's replica evaluates; those that share sequences have the same."""
        return self._evaluates(count, self.replica)

    def evaluation_runs(self, count: int) -> int:
        """How many of `count` micro-batches this worker runs: as many as all that share experts with it."""
        first = self.replica - self.replica % self.plan.expert_parallel
        return max(len(self._evaluates(count, first)), self.fewest_micro_batches)

    def _evaluates(self, count: int, replica: int) -> Sequence[int]:
        """Which micro-batches of an evaluation are a replica's; larger groups have more, as in training."""
        plan, group = self.plan, group_number(self.plan, replica)
        if not plan.context_groups:
            return even_share(count, data_parallel_of(plan), group)
        return deal(counts_by_size(count, plan.context_groups, plan.grid.pipeline_parallel))[group]

    def evaluation_order(self, count: int) -> Sequence[int]:
        # Where the share is too small, a replica runs others, too, that count nothing (`modes.uniform`).
        share = self.evaluation_share(count)
        return (*share, *[0] * (self.evaluation_runs(count) - len(share)))

    @property
    def feeds_first(self) -> bool:
        return self.replica == shared_with(self.plan, self.replica).start

    @property
    def numbering(self) -> tuple[int, ...]:
        return self.read_order

    @property
    def op_numbers(self) -> tuple[int, ...]:
        # Those that share experts run as many micro-batches, each its own: they count as those of one that has most.
        first, sharing = self.replica - self.replica % self.plan.expert_parallel, self.plan.expert_parallel
        return max((each.micro_batches for each in self.plan.replicas[first : first + sharing]), key=len)

    @property
    def is_first_stage(self) -> bool:
        return self._stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self._stage == self.plan.grid.pipeline_parallel - 1

    @property
    def reports(self) -> bool:
        return self.works and self.replica == 0 and self.is_last_stage and self.tp_rank == 0

    @property
    def _stage(self) -> int | None:
        coordinate = self.plan.coordinate_of(self.worker)
        return None if coordinate is None else coordinate.stage
