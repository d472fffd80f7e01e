# SPDX-License-Identifier: Apache-2.0
"""The door of the control plane: which messages reach the coordinator; malformed ones go no further. Pure.

All processes of a job write to one store, and a broken or foreign one may write anything. `protocol.wire` checks what
types say; here is checked what only this job knows: its workers and nodes, its layers, and which events are a worker's.
May import `coding`, `plan`, `protocol`, `events`, what `cost` knows of models, and this package's other pure modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.replanning.recovery.inventory import shape_of
from megatron_resihp.cost.model.layers import ModelError, model_from_arguments
from megatron_resihp.events.codec import UnusableEventError, read_event
from megatron_resihp.events.detection import Validation
from megatron_resihp.events.epochs import FirstStep, Phase
from megatron_resihp.events.event import Event, UnknownEvent
from megatron_resihp.events.injections import Drill
from megatron_resihp.events.training import (
    Checkpoint,
    Digest,
    EmergencyCheckpoint,
    Emulation,
    ExpertLoads,
    Iteration,
    OptimizerCopy,
    Samples,
)
from megatron_resihp.events.workers import Resources, WorkerStarted
from megatron_resihp.plan import PlanError
from megatron_resihp.plan.layers import check_chunks
from megatron_resihp.protocol.messages import (
    MESSAGES,
    DrainRequest,
    EndRequest,
    EventsReported,
    JobStarted,
    JoinRequest,
    LeaveRequest,
    Message,
    ModelBuilt,
    NodeLost,
    NodeReport,
    NodesDown,
    PlanRequest,
    SaveRequest,
    SlowdownRequest,
    StopRequest,
    WordOfAgent,
    WordOfCommand,
    WordOfWorker,
    WorkerRestarted,
)
from megatron_resihp.protocol.values import MOST_LAYERS
from megatron_resihp.protocol.wire import Letter, MalformedError


@dataclass(frozen=True)
class Reported:
    """Events of a worker. `again`: a coordinator that was lost may have written them."""

    worker: int
    events: tuple[Event, ...]
    again: bool = False


Heard = WordOfWorker | WordOfAgent | WordOfCommand | SlowdownRequest | Reported
"""What reaches the coordinator."""

_MOST: Final = 1 << 63
"""Numbers of a job are below this."""
_OF_WORKERS: Final = (
    Iteration, Samples, WorkerStarted, Phase, FirstStep, Drill, ExpertLoads, Emulation, OptimizerCopy,
    Resources, Digest, Checkpoint, EmergencyCheckpoint, Validation, UnknownEvent,
)  # fmt: skip
"""Events that workers write; those of a later version are only written down."""


def _are_arguments(value: Mapping[str, Any]) -> bool:
    """Whether these are Megatron's arguments of a model, even of one that this package doesn't know."""
    counts = [value.get(name) or 0 for name in ("num_layers", "mtp_num_layers", "num_experts")]
    if not all(type(count) is int and 0 <= count <= MOST_LAYERS for count in counts):
        return False
    try:
        model_from_arguments(value)
    except ModelError:
        return True
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return False
    return True


def _event(value: Mapping[str, Any]) -> Event:
    """An event that a worker has sent.

    Raises:
        UnusableEventError: what is wrong with it.
    """
    event = read_event(value)
    if not isinstance(event, _OF_WORKERS):
        raise UnusableEventError(f"no worker writes {event.name!r}")
    wrong = _out_of_bounds(event)
    if wrong is not None:
        raise UnusableEventError(f"{wrong!r} is {value.get(wrong)!r}")
    return event


def _out_of_bounds(event: Event) -> str | None:
    """The field that no code on node 0 can use. Fields that are only written to the log may hold anything."""
    epoch, worker = event.epoch, event.worker
    if not math.isfinite(event.time):
        return "time"
    if epoch is not None and not -1 <= epoch < _MOST:
        return "epoch"
    if worker is not None and not 0 <= worker < _MOST:
        return "worker"
    match event:
        case Iteration(iteration=number) | Validation(iteration=number) if not 0 <= number < _MOST:
            return "iteration"
        case Validation(number=number) if not 0 <= number < _MOST:
            return "number"
        case Validation() if worker is None:
            return "worker"
        case Validation(gemm_seconds=seconds) if not all(map(math.isfinite, seconds)):
            return "gemm_seconds"
        case Drill(target=target) if not (isinstance(target, int) and 0 <= target < _MOST):
            return "target"
    return None


def read_message(text: str, size: JobSize, may_exist: Callable[[int], bool]) -> Letter[Heard]:
    """A message to the coordinator.

    Args:
        may_exist: whether the job may have a worker of this id by now.

    Raises:
        MalformedError: the text is no such message; the error names sender and field.
    """
    letter = MESSAGES.read(text)
    message = letter.body
    wrong = _wrong_names(message, size, may_exist) or _wrong_content(message)
    if wrong is not None:
        raise MalformedError(f"{type(message).__name__} from {letter.sender}: {wrong}")
    if isinstance(message, EventsReported):
        return Letter(
            letter.sender, Reported(message.worker, _events(message, letter.sender), message.again), letter.id
        )
    return Letter(letter.sender, message, letter.id, letter.said)


def _events(message: EventsReported, sender: str) -> tuple[Event, ...]:
    events: list[Event] = []
    try:
        for value in message.events:
            events.append(_event(value))
    except UnusableEventError as error:
        raise MalformedError(f"EventsReported from {sender}: 'events.{len(events)}': {error}") from None
    return tuple(events)


def _wrong_names(message: Message, size: JobSize, may_exist: Callable[[int], bool]) -> str | None:
    """The worker or node in a message that is not this job's."""
    workers: tuple[int, ...] = ()
    match message:
        case NodeLost(node=node) | LeaveRequest(node=node):
            return f"'node' is {node}, which the job does not have" if node >= size.most_nodes else None
        case NodesDown(nodes=nodes):
            unknown = [node for node in nodes if node >= size.most_nodes]
            return f"'nodes' has {unknown[0]}, which the job does not have" if unknown else None
        case PlanRequest() | DrainRequest() | EndRequest() | SlowdownRequest() | StopRequest() | SaveRequest():
            return None  # commands are answered
        case WorkerRestarted():
            workers = (message.worker, message.instead_of)
        case NodeReport(survivors=survivors):
            workers = tuple(each.worker for each in survivors)
        case _:
            workers = (message.worker,)
    unknown = [worker for worker in workers if not may_exist(worker)]
    return f"'worker' is {unknown[0]}, which the job does not have" if unknown else None


def _wrong_content(message: Message) -> str | None:
    """What is wrong with a message beyond the types of its fields."""
    match message:
        case JobStarted(job=job) | JoinRequest(job=job):
            try:
                check_chunks(job.chunks, job.pipeline_parallel)
            except PlanError as error:
                return f"'job.chunks': {error}"
            try:
                shape_of(job, 1)
            except (ValueError, ArithmeticError) as error:
                return f"'job': {error}"
        case ModelBuilt(arguments=arguments):
            return None if _are_arguments(arguments) else "'arguments' are none that a model is made of"
    return None
