# SPDX-License-Identifier: Apache-2.0
"""The door of the control plane: which messages reach the coordinator. What is malformed goes no further. Pure.

All processes of a job write to one store, and a broken or foreign one may write anything. `protocol.wire` checks what
types say; here is checked what only this job knows: its workers and nodes, its layers, and which events are a worker's.
May import `coding`, `plan`, `protocol`, what `cost` knows of models, and this package's other pure modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from megatron_resihp.coding import Between, Tolerance, WrongValueError, decode
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.cost.layers import ModelError, model_from_arguments
from megatron_resihp.plan import PlanError
from megatron_resihp.plan.layers import check_chunks
from megatron_resihp.protocol.messages import (
    MESSAGES,
    EventsReported,
    JobStarted,
    JoinRequest,
    LeaveRequest,
    Message,
    ModelBuilt,
    NodeLost,
    PlanRequest,
    SaveRequest,
    SlowdownRequest,
    StopRequest,
    WorkerRestarted,
)
from megatron_resihp.protocol.values import MOST_LAYERS, Natural, Seconds, UnixTime, Worker
from megatron_resihp.protocol.wire import Letter, MalformedError


@dataclass(frozen=True)
class _Event:
    """What each event of a worker has. Most are only written down; somebody on node 0 reacts to the ones below."""

    event: str
    time: UnixTime
    epoch: Annotated[int, Between(-1)] | None
    worker: Worker | None


@dataclass(frozen=True)
class _Iteration(_Event):
    iteration: Natural
    duration_s: float | None


@dataclass(frozen=True)
class _Validation(_Event):
    number: Natural
    iteration: Natural
    worker: Worker
    gemm_seconds: tuple[Seconds, ...]


@dataclass(frozen=True)
class _Injection(_Event):
    target: Natural
    action: str


_EVENTS: Final[Mapping[str, type[_Event]]] = {"iteration": _Iteration, "validation": _Validation, "drill": _Injection}
_WITH_OTHERS: Final = Tolerance(unknown=True)
"""Events have fields that nobody here knows of."""
_OTHERS_EVENTS: Final = frozenset({
    "run_started", "job", "model", "epoch_started", "epoch_broken", "recovery", "agreed", "plan_change",
    "change_refused", "reconfiguration", "worker_dead", "worker_failed", "worker_restarted", "worker_waiting",
    "node_left", "exposed", "run_finished", "verdict", "plan_failed",
})  # fmt: skip
"""Events that no worker writes, and to which somebody on node 0 reacts, or a reader of the log."""


def _are_arguments(value: Mapping[str, Any]) -> bool:
    """Of Megatron's, that a model is made of, or that are known to make one of which nothing is known here."""
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


def _wrong_event(event: Mapping[str, Any]) -> str | None:
    """What is wrong with an event that a worker has sent."""
    try:
        name = event.get("event")
        known = _EVENTS.get(name, _Event) if isinstance(name, str) else _Event
        if decode(known, event, _WITH_OTHERS).event in _OTHERS_EVENTS:
            return f"no worker writes {name!r}"
    except WrongValueError as error:
        return str(error)
    return None


def read_message(text: str, size: JobSize, may_exist: Callable[[int], bool]) -> Letter[Message]:
    """A message to the coordinator.

    Args:
        may_exist: whether the job may have a worker of this id by now.

    Raises:
        MalformedError: it is none; the message names sender and field.
    """
    letter = MESSAGES.read(text)
    message = letter.body
    wrong = _wrong_names(message, size, may_exist) or _wrong_content(message)
    if wrong is not None:
        raise MalformedError(f"{type(message).__name__} from {letter.sender}: {wrong}")
    return letter


def _wrong_names(message: Message, size: JobSize, may_exist: Callable[[int], bool]) -> str | None:
    """Which worker or node is none of this job's."""
    workers: tuple[int, ...] = ()
    match message:
        case NodeLost(node=node) | LeaveRequest(node=node):
            return f"'node' is {node}, which the job does not have" if node >= size.most_nodes else None
        case PlanRequest() | SlowdownRequest() | StopRequest() | SaveRequest():
            return None
        case WorkerRestarted():
            workers = (message.worker, message.instead_of)
        case _:
            workers = (message.worker,)
    unknown = [worker for worker in workers if not may_exist(worker)]
    return f"'worker' is {unknown[0]}, which the job does not have" if unknown else None


def _wrong_content(message: Message) -> str | None:
    """What is wrong by more than a field's type."""
    match message:
        case JobStarted(job=job) | JoinRequest(job=job):
            try:
                check_chunks(job.chunks, job.pipeline_parallel)
            except PlanError as error:
                return f"'job.chunks': {error}"
        case ModelBuilt(arguments=arguments):
            return None if _are_arguments(arguments) else "'arguments' are none that a model is made of"
        case EventsReported(events=events):
            wrong = ((number, _wrong_event(event)) for number, event in enumerate(events))
            return next((f"'events.{number}': {found}" for number, found in wrong if found is not None), None)
    return None
