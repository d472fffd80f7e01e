"""The door of the control plane: which messages and notices are well formed. What is not goes no further. Pure.

All processes of a job write to one store, and a broken or foreign one may write anything. Behind the door, state
machine and threads take it that fields are there, have their types, and are of sizes that a job can have.
May import `plan`, what `cost` knows of models, and this room's other pure modules.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.messages import GIVEN_UP, LEFT, SAVE, SLOWNESS
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
from megatron_resihp.protocol.values import MOST_LAYERS
from megatron_resihp.protocol.wire import Letter, MalformedError

Check = Callable[[Any], bool]
Fields = Mapping[str, Check]
"""By field; one that may be missing ends with a question mark."""


# Values


def _is_int(least: float = -math.inf, most: float = 2**63) -> Check:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_int(-(2**63))(value)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _none_or(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _row_of(*checks: Check) -> Check:
    return lambda value: (
        isinstance(value, list) and len(value) == len(checks) and all(c(v) for c, v in zip(checks, value, strict=True))
    )


def _object_of(fields: Fields) -> Check:
    return lambda value: isinstance(value, dict) and _wrong_field(value, fields) is None


def _wrong_field(value: Mapping[str, Any], fields: Fields) -> str | None:
    """The first field that is missing or isn't what it has to be."""
    for name, check in fields.items():
        known = name.removesuffix("?")
        if known in value:
            if not check(value[known]):
                return f"its {known!r} is {_cut(repr(value[known]), 60)}"
        elif known == name:
            return f"it has no {known!r}"
    return None


_NATURAL = _is_int(0)
_POSITIVE = _is_int(1)

_COMMON: Final[Fields] = {
    "event": _is_text, "time": _is_finite, "epoch": _none_or(_is_int(-1)), "worker": _none_or(_NATURAL),
}  # fmt: skip
_EVENTS: Final[Mapping[str, Fields]] = {
    "iteration": {"iteration": _NATURAL, "duration_s": _none_or(_is_number)},
    "validation": {
        "number": _NATURAL, "iteration": _NATURAL, "worker": _NATURAL, "gemm_seconds": _list_of(_is_finite),
    },
    "drill": {"target": _NATURAL, "action": _is_text},
}  # fmt: skip
"""Events of workers that somebody on node 0 reacts to. All others are only written down."""
_OTHERS_EVENTS: Final = frozenset({
    "run_started", "job", "model", "epoch_started", "epoch_broken", "recovery", "agreed", "plan_change",
    "change_refused", "reconfiguration", "worker_dead", "worker_failed", "worker_restarted", "worker_waiting",
    "node_left", "exposed", "run_finished", "verdict", "plan_failed",
})  # fmt: skip
"""Events that no worker writes, and to which somebody on node 0 reacts, or a reader of the log."""


def _are_arguments(value: Any) -> bool:
    """Of Megatron's, that a model is made of, or that are known to make one of which nothing is known here."""
    counts = {f"{name}?": _none_or(_is_int(0, MOST_LAYERS)) for name in ("num_layers", "mtp_num_layers", "num_experts")}
    if not _object_of(counts)(value):
        return False
    try:
        model_from_arguments(value)
    except ModelError:
        return True
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return False
    return True


def _wrong_event(event: Any) -> str | None:
    """What is wrong with an event that a worker has sent."""
    wrong = _wrong_field(event, _COMMON)
    if wrong is None and event["event"] in _OTHERS_EVENTS:
        return f"no worker writes {event['event']!r}"
    return wrong or _wrong_field(event, _EVENTS.get(event["event"], {}))


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


# Notices


_NOTICES: Final[Mapping[str, Fields]] = {
    "broken": {"epoch": _NATURAL, "cause": _is_text, "probe?": _is_flag},
    "stop": {"signal": _is_int(1, 64)},
    "finishing": {},
    "end": {"code": _is_int(0, 255), "reason": _is_text},
    SLOWNESS: {
        "by_agents": _is_flag, "speeds": _list_of(_row_of(_NATURAL, _is_finite)),
        "links": _list_of(_row_of(_NATURAL, _NATURAL, _is_finite)),
    },
    "validate": {"number": _POSITIVE, "epoch": _NATURAL, "gemms": _list_of(_object_of({})),
                 "transfers": _list_of(_object_of({}))},
    "change": {"number": _POSITIVE, "epoch": _NATURAL, "plan": _object_of({})},
    "join": {"epoch": _NATURAL, "workers": _list_of(_NATURAL)},
    GIVEN_UP: {"workers": _list_of(_NATURAL), "reason": _is_text, "for_good?": _is_flag},
    "dismissed": {"worker": _NATURAL, "reason": _is_text},
    LEFT: {"agent": _NATURAL, "workers": _list_of(_NATURAL)},
    SAVE: {"number": _POSITIVE},
}  # fmt: skip
_END: Final[Fields] = {
    "code": _is_int(0, 255), "reason": _is_text, "grace_s": _is_finite, "members?": _none_or(_list_of(_NATURAL)),
    "terminate_s?": _is_finite,
}  # fmt: skip


def read_notice(text: str) -> dict[str, Any]:
    """A notice to workers and agents. Raises MalformedError: it is none."""
    notice = _read_object(text)
    kind = notice.get("kind")
    if not isinstance(kind, str) or kind not in _NOTICES:
        raise MalformedError(f"its kind {_cut(repr(kind), 60)} is unknown")
    _require(notice, _NOTICES[kind], f"{kind!r}: ")
    return notice


def read_end(text: str) -> dict[str, Any]:
    """What agents are told of the job's end. Raises MalformedError: it isn't that."""
    end = _read_object(text)
    _require(end, _END, "")
    return end


def _read_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"it is not JSON ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise MalformedError("it is no JSON object")
    return value


def _require(value: Mapping[str, Any], fields: Fields, where: str) -> None:
    wrong = _wrong_field(value, fields)
    if wrong is not None:
        raise MalformedError(where + wrong)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
