# SPDX-License-Identifier: Apache-2.0
"""What the coordinator is told, by workers, agents and commands.

`control.coordination.state_machine` says what follows from each. May import `coding` and this package's other modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, get_args

from megatron_resihp.coding import Between, Repeated
from megatron_resihp.protocol.job import JobDescription
from megatron_resihp.protocol.logs import LogPage, LogsWanted
from megatron_resihp.protocol.records import Record, Times
from megatron_resihp.protocol.values import (
    DigestKey,
    Epoch,
    ExitCode,
    HeldShards,
    Json,
    LetterId,
    Natural,
    Node,
    Port,
    Seconds,
    Signal,
    UnixTime,
    Worker,
)
from megatron_resihp.protocol.wire import Kinds

# From workers


@dataclass(frozen=True)
class JobStarted:
    """A worker that was there at the start says what job this is."""

    worker: Worker
    job: Annotated[JobDescription, Repeated()]


@dataclass(frozen=True)
class JoinRequest:
    """A worker that was not there at the start is ready for a place in a plan; it holds nothing."""

    worker: Worker
    job: Annotated[JobDescription, Repeated()]


@dataclass(frozen=True)
class ModelBuilt:
    """What Megatron makes the model of: its arguments, by name."""

    worker: Worker
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Ready:
    """A member is ready for an epoch.

    Attributes:
        digests: of the state that it holds, by keys of `control.coordination.digests`.
        ports: at which its gloo groups listen.
        bytes_received: of state, from other holders.
        steps_redone: iterations that it computes again.
        keeps_copies: of experts, if its plan asks for any.
    """

    worker: Worker
    epoch: Epoch
    digests: dict[DigestKey, str]
    ports: tuple[Port, ...]
    bytes_received: Natural
    steps_redone: Natural
    keeps_copies: bool = True


@dataclass(frozen=True)
class CommunicationFailed:
    """A worker asks for a recovery: a collective of this epoch has failed, or NCCL is in error."""

    worker: Worker
    epoch: Annotated[int, Between(-1)]
    error: str


@dataclass(frozen=True)
class FirstStepFailed:
    """The first step under a plan on trial has failed by an error of the worker's own."""

    worker: Worker
    epoch: Epoch
    error: str


@dataclass(frozen=True)
class SurvivorReport:
    """What a worker has when its epoch is over, broken or left by choice.

    Attributes:
        held: complete and current to the record.
        unreachable: workers that did not answer when it tried to connect.
        times: at the start of the iterations that its record has counters of.
    """

    worker: Worker
    epoch: Epoch
    record: Annotated[Record, Repeated()]
    held: HeldShards
    unreachable: tuple[Worker, ...] = ()
    times: Times = field(default_factory=dict)


class Survivor(NamedTuple):
    """What a worker has said in its own `SurvivorReport`, but for what all of a `NodeReport` have said.

    Attributes:
        letter: the id of its text, by which that is known if it comes again.
    """

    worker: Worker
    letter: LetterId
    held: HeldShards
    times: Times
    unreachable: tuple[Worker, ...] = ()


@dataclass(frozen=True)
class NodeReport:
    """What workers of a node have said of the same epoch with the same record, as their agent tells it. It means the
    same as their own reports, one after the other."""

    epoch: Epoch
    record: Annotated[Record, Repeated()]
    survivors: tuple[Survivor, ...]

    @property
    def reports(self) -> Iterator[SurvivorReport]:
        """The workers' own."""
        for each in self.survivors:
            yield SurvivorReport(each.worker, self.epoch, self.record, each.held, each.unreachable, each.times)


@dataclass(frozen=True)
class StillSaving:
    """The epoch is broken, and a worker that has not reported is writing a checkpoint."""

    worker: Worker
    epoch: Epoch


@dataclass(frozen=True)
class GroupsPrepared:
    """A worker has made the groups of a change ahead of it.

    Attributes:
        number: of the change.
    """

    worker: Worker
    number: Natural


@dataclass(frozen=True)
class TrainingFinished:
    """A worker has left the training loop after this iteration; it may still evaluate and save."""

    worker: Worker
    iteration: Natural


@dataclass(frozen=True)
class EmergencyCheckpointWritten:
    """A worker has written what it was asked to of the emergency checkpoint."""

    worker: Worker


@dataclass(frozen=True)
class ScriptEnded:
    """The training script of a worker came to its end; its process is about to."""

    worker: Worker


@dataclass(frozen=True)
class ScriptFailed:
    """The training script of a worker ended by an error of its own, or its process with a code that says so."""

    worker: Worker
    error: str
    code: ExitCode


@dataclass(frozen=True)
class EventsReported:
    """Events for the run's log; see docs/events.md.

    Attributes:
        again: a coordinator that was lost may have written them.
    """

    worker: Worker
    events: tuple[dict[str, Any], ...]
    again: bool = False


# From workers and commands


@dataclass(frozen=True)
class PlanRequest:
    """A user or the replanner asks for a change to a plan.

    Attributes:
        plan: as JSON. If it is no plan, the answer says so. None, of the replanner: complete uniform replicas that have
            work for joining workers.
        why: in words.
        patient: to have it as soon as it can be, if not now.
        answer: key of the store under which the answer is awaited; None: no one waits.
    """

    plan: Json
    why: str
    patient: bool = False
    answer: str | None = None


@dataclass(frozen=True)
class SlowdownRequest:
    """A user or a worker asks for a slowdown to be injected, or ended.

    Attributes:
        workers: one, two (their link), or none: all that was injected ends.
        factor: of speed or bandwidth.
        iteration: for which it was scheduled; None: now.
        number: of a scheduled slowdown, for which all workers ask; None: it was not scheduled.
        answer: as in `PlanRequest`.
    """

    workers: tuple[Worker, ...]
    factor: float
    iteration: Natural | None = None
    number: Natural | None = None
    answer: str | None = None


@dataclass(frozen=True)
class DrainRequest:
    """A user asks for workers, or all workers of nodes, to leave in order. The job goes on, if there is a plan.

    Attributes:
        deadline_s: what has not left by then counts as dead; None: as the job was launched with.
        answer: as in `PlanRequest`.
    """

    nodes: tuple[Node, ...]
    workers: tuple[Worker, ...]
    deadline_s: Seconds | None = None
    answer: str | None = None


@dataclass(frozen=True)
class EndRequest:
    """A user asks for the job to end in order after an iteration.

    Attributes:
        must_save: refuse if nothing would be saved.
        answer: as in `PlanRequest`.
    """

    must_save: bool = False
    answer: str | None = None


# From agents. Each says when it happened


@dataclass(frozen=True)
class ProcessExited:
    """A worker's process has ended.

    Attributes:
        code: its exit code, or minus the signal that ended it.
        cause: what is known beside that.
    """

    worker: Worker
    code: Annotated[int, Between(-64, 255)]
    time: UnixTime
    cause: str | None = None


@dataclass(frozen=True)
class HeartbeatsMissing:
    """A worker that still has its process has not been heard of for so long."""

    worker: Worker
    silence_s: Seconds
    time: UnixTime


@dataclass(frozen=True)
class NoticeUnheard:
    """A worker has shown no life for so long since it was to hear that this epoch is broken."""

    worker: Worker
    epoch: Epoch
    silence_s: Seconds
    time: UnixTime


@dataclass(frozen=True)
class ConnectionLost:
    """A worker has closed its liveness connection."""

    worker: Worker
    time: UnixTime


@dataclass(frozen=True)
class WorkerRestarted:
    """An agent has started a worker in the slot of another."""

    worker: Worker
    instead_of: Worker
    time: UnixTime


@dataclass(frozen=True)
class NodeLost:
    """Another node than the coordinator's is gone, with all its workers."""

    node: Node
    cause: str
    time: UnixTime


@dataclass(frozen=True)
class NodesDown:
    """What the cluster's manager says of nodes that it was asked about; none, if there is no manager."""

    nodes: tuple[Node, ...]
    time: UnixTime


@dataclass(frozen=True)
class StopRequest:
    """The job is to end in order after an iteration."""

    signal: Signal
    time: UnixTime


@dataclass(frozen=True)
class LeaveRequest:
    """A node is to be taken away.

    Attributes:
        agent: the name of its agent.
        ordered: the coordinator has told it to, by a `DrainOrder`; otherwise a signal has.
    """

    node: Node
    agent: Natural
    time: UnixTime
    ordered: bool = False


@dataclass(frozen=True)
class SaveRequest:
    """A checkpoint is to be written after the next iteration."""

    time: UnixTime


WordOfWorker = (
    JobStarted | JoinRequest | ModelBuilt | Ready | CommunicationFailed | FirstStepFailed | SurvivorReport | NodeReport
    | StillSaving | GroupsPrepared | TrainingFinished | EmergencyCheckpointWritten | ScriptEnded | ScriptFailed
    | LogsWanted | LogPage
)  # fmt: skip
WordOfAgent = (
    ProcessExited | HeartbeatsMissing | NoticeUnheard | ConnectionLost | WorkerRestarted | NodeLost | NodesDown
    | StopRequest | LeaveRequest | SaveRequest
)  # fmt: skip
WordOfCommand = PlanRequest | DrainRequest | EndRequest
Message = WordOfWorker | WordOfAgent | WordOfCommand | SlowdownRequest | EventsReported
MESSAGES = Kinds[Message](get_args(Message), "a message")
"""To the coordinator."""
