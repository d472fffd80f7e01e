# SPDX-License-Identifier: Apache-2.0
"""What the coordinator knows: the job, its workers, the epoch, and what is under way.

Data with simple questions about it; the other modules of this package decide. May import `plan`, `planner`,
`protocol` and pure modules of `control`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_resihp.config import UNIFORM
from megatron_resihp.control.coordination.actions import Limits, Phase
from megatron_resihp.control.coordination.state_machine.accounts import Accounts
from megatron_resihp.control.coordination.state_machine.departures import Departures
from megatron_resihp.control.coordination.state_machine.first_step import FirstSteps
from megatron_resihp.control.coordination.state_machine.joining import JoiningWorkers
from megatron_resihp.control.coordination.state_machine.links import FailedLinks
from megatron_resihp.control.coordination.state_machine.log_pages import LogPages
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.replanning.change import Change
from megatron_resihp.control.slowness import SlownessDesk
from megatron_resihp.plan import Chunk, ParallelPlan, Shard
from megatron_resihp.plan.batch_steps import size_at
from megatron_resihp.planner import JobShape
from megatron_resihp.protocol.job import JobDescription
from megatron_resihp.protocol.messages import PlanRequest, Ready
from megatron_resihp.protocol.planning import KnownJob
from megatron_resihp.protocol.records import Commit, Record, Times

HeldShards = dict[int, tuple[Shard, ...]]
"""Worker → the shards that it holds."""


@dataclass
class Job:
    """What workers have told the coordinator about the job.

    Attributes:
        size: nodes and workers, at the start and at most.
        shape: sizes of its work; None until a worker has told them.
        own: the job's own split into layers.
        description: everything else; None until a worker has told it.
        arguments: Megatron's, of which the model is made; None until a worker has told them.
        trained: a worker has finished training.
        reached: the last iteration that a worker has finished.
        pages: of Megatron's log.
    """

    size: JobSize
    shape: JobShape | None = None
    own: tuple[Chunk, ...] = ()
    description: JobDescription | None = None
    arguments: dict[str, Any] | None = None
    trained: bool = False
    reached: int = 0
    pages: LogPages = field(default_factory=LogPages)

    def samples_after(self, consumed: int) -> int:
        """Samples of the global batch that follows so many."""
        steps = self.described.batch_steps
        return size_at(steps, consumed) if steps else self.samples_of_plan

    @property
    def samples_of_plan(self) -> int:
        """Samples of the global batches that plans are for."""
        told = self.described
        return told.micro_batches * (told.micro_batch_size or 1)

    def resize(self, samples: int) -> bool:
        """From now on global batches have so many samples; returns whether they had another number."""
        told = self.described
        count = samples // (told.micro_batch_size or 1)
        if count == told.micro_batches:
            return False
        assert self.shape is not None
        self.shape = replace(self.shape, micro_batches=count)
        self.description = replace(told, micro_batches=count, global_batch_size=samples)
        return True

    def progressed(self, iteration: int) -> None:
        """A worker has told that this iteration is done."""
        self.reached = max(self.reached, iteration)

    @property
    def distributed_optimizer(self) -> bool:
        return self.description is not None and self.description.distributed_optimizer

    @property
    def copies_experts(self) -> bool:
        """Whether experts that are held once are to have a copy with another worker."""
        return self.description is not None and self.description.expert_copies

    @property
    def plans_uniformly(self) -> bool:
        """Whether no strategy plans: complete replicas are all that is looked for."""
        return self.description is None or self.description.strategy == UNIFORM

    @property
    def described(self) -> JobDescription:
        """What a worker has told of the job, which is known once training has begun."""
        assert self.description is not None
        return self.description

    @property
    def known(self) -> KnownJob:
        """What the costs of plans depend on; likewise."""
        return KnownJob.of(self.described, self.arguments)


@dataclass
class Reports:
    """What survivors have reported since the epoch broke.

    Attributes:
        records: worker → how far it got.
        held: worker → the shards that it holds.
        times: worker → its counters that no other has.
        unreachable: worker → the workers that it could not reach.
        links: links that failed while both ends lived.
        accounts: members that were lost without a word.
    """

    links: FailedLinks
    records: dict[int, Record] = field(default_factory=dict)
    held: HeldShards = field(default_factory=dict)
    times: dict[int, Times] = field(default_factory=dict)
    unreachable: dict[int, tuple[int, ...]] = field(default_factory=dict)
    accounts: Accounts = field(default_factory=Accounts)

    def clear(self) -> None:
        """Forget what was reported: living members are to report anew."""
        self.records, self.held, self.times = {}, {}, {}


@dataclass
class Changes:
    """Changes by choice.

    Attributes:
        under_way: the change that workers have been told of.
        last: number of the last change.
        prepared: workers that have made the groups of the change under way.
        made_ahead: the change whose groups the plan that was published last runs in.
        waiting: requests for plans, to be answered once training goes on.
    """

    under_way: Change | None = None
    last: int = 0
    prepared: set[int] = field(default_factory=set)
    made_ahead: int | None = None
    waiting: list[PlanRequest] = field(default_factory=list)


@dataclass
class Ending:
    """How the job is to end.

    Attributes:
        stop_signal, stop_reason: the signal that asked for an orderly end, and why.
        save_reason: why the job ends once survivors have saved what they hold; empty: it doesn't.
        saving: workers that are writing an emergency checkpoint.
        saved_reason: why it was written.
        saves: number of the last order to write a checkpoint.
    """

    stop_signal: int | None = None
    stop_reason: str = ""
    save_reason: str = ""
    saving: set[int] = field(default_factory=set)
    saved_reason: str = ""
    saves: int = 0


@dataclass
class State:
    """All that the coordinator knows.

    Attributes:
        phase, epoch, plan: of the epoch that was published last.
        first: the plan of epoch 0.
        running: the plan that was run last: what it gave its members is what they hold.
        copies_kept: whether its members keep the copies of experts that it asks for.
        commit: the iteration that all agreed on when an epoch last ended.
        ready: members of the epoch that are ready to train.
        left_s: seconds left of the bounded wait that is under way; None: nothing is waited for.
        broken_at: Unix time at which the epoch broke.
        recoveries_here: recoveries since the last step.
        dead: worker → why it is.
        done: workers whose script has ended well.
        living: members of the current epoch that are neither dead nor done. Each message asks for them, and in a job of
            10,000 workers to find them anew each time would take longer than all else.
        joining: workers that were not there at the start.
        departures: nodes and workers that were told to leave.
        first_steps: plans that no step has been taken under yet.
        slowness: what is slowed on request.
    """

    job: Job
    limits: Limits
    phase: Phase = Phase.STARTING
    epoch: int = 0
    plan: ParallelPlan | None = None
    first: ParallelPlan | None = None
    running: ParallelPlan | None = None
    copies_kept: bool = False
    commit: Commit | None = None
    ready: dict[int, Ready] = field(default_factory=dict)
    left_s: float | None = None
    broken_at: float = 0.0
    recoveries_here: int = 0
    dead: dict[int, str] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    changes: Changes = field(default_factory=Changes)
    ending: Ending = field(default_factory=Ending)
    first_steps: FirstSteps = field(default_factory=FirstSteps)
    joining: JoiningWorkers = field(init=False)
    departures: Departures = field(init=False)
    reports: Reports = field(init=False)
    slowness: SlownessDesk = field(init=False)
    living: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.living = frozenset(range(self.job.size.workers))
        self.joining = JoiningWorkers(self.job.size)
        self.departures = Departures(self.joining)
        self.reports = Reports(FailedLinks(self.joining.node_of))
        self.slowness = SlownessDesk(self.job.size.workers)

    def adopt(self, plan: ParallelPlan) -> None:
        """Have its members be those of the epoch."""
        self.plan = plan
        self.living = frozenset(plan.members).difference(self.dead, self.done)

    def lose(self, causes: Mapping[int, str]) -> None:
        """These workers are dead. `causes`: worker → why."""
        self.dead.update(causes)
        self.living = self.living.difference(causes)

    def finish(self, worker: int) -> None:
        """The script of this worker has ended well."""
        self.done.add(worker)
        self.living -= {worker}

    def awaits_report(self, worker: int) -> bool:
        """Whether the epoch has broken, and this worker has not said yet what it has."""
        return self.phase is Phase.REPORTING and worker in self.living and worker not in self.reports.records

    @property
    def quiet_s(self) -> float:
        """In how much time that passes nothing is decided; infinite: nothing waits for it."""
        if self.left_s is not None or self.departures.left_s:
            return 0.0
        return self.reports.links.quiet_s

    @property
    def plan_and_shape(self) -> tuple[ParallelPlan, JobShape]:
        """The plan in force and the job's sizes, which are known once training has begun."""
        assert self.plan is not None and self.job.shape is not None
        return self.plan, self.job.shape
