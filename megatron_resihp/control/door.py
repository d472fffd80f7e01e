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
from megatron_resihp.plan import Chunk, PlanError
from megatron_resihp.plan.layers import check_chunks
from megatron_resihp.protocol.records import Stage

MOST_LAYERS: Final = 10_000
MOST_SHARES: Final = 4096
MOST_MICRO_BATCHES: Final = 1_000_000
SHOWN: Final = 200
"""Characters of what was dropped that the log shows."""

Check = Callable[[Any], bool]
Fields = Mapping[str, Check]
"""By field; one that may be missing ends with a question mark."""


class MalformedError(Exception):
    """What came is no message; the text says why."""


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


def _is_anything(value: Any) -> bool:
    return True


def _none_or(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _one_of(*values: Any) -> Check:
    return lambda value: _is_text(value) and value in values


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _row_of(*checks: Check) -> Check:
    return lambda value: (
        isinstance(value, list) and len(value) == len(checks) and all(c(v) for c, v in zip(checks, value, strict=True))
    )


def _map_of(key: Check, value: Check) -> Check:
    return lambda found: isinstance(found, dict) and all(key(k) and value(v) for k, v in found.items())


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


def _is_count(text: Any) -> bool:
    return _is_text(text) and text.isascii() and text.isdecimal() and len(text) < 19


def _is_digest_key(text: Any) -> bool:
    """See `control.digests`."""
    numbers = text.split("/") if _is_text(text) else ()
    return len(numbers) in (2, 3, 4) and all(_is_count(number.removeprefix("-")) for number in numbers)


def _is_shard(value: Any) -> bool:
    if not _row_of(*4 * [_is_int(0, MOST_LAYERS)])(value):
        return False
    first, end, rank, degree = value
    return bool(first <= end and rank < degree <= MOST_SHARES)


_NATURAL = _is_int(0)
_POSITIVE = _is_int(1)

_OUTCOME: Final = _object_of({
    "epoch": _NATURAL, "grad_norm": _none_or(_is_number), "losses": _list_of(_row_of(_is_number, _is_number)),
    "loss_names": _list_of(_is_text), "stop": _is_flag, "save": _is_flag, "skipped": _is_flag,
    "experts": _list_of(_is_number),
})  # fmt: skip
_RECORD: Final = _object_of({
    "iteration": _NATURAL, "stage": _one_of(*(stage.name for stage in Stage)), "works": _is_flag,
    "outcomes": _map_of(_is_count, _OUTCOME),
    "counters": _map_of(_is_count, _object_of({"totals?": lambda value: isinstance(value, dict | list)})),
    "position": _NATURAL, "loss_names": _list_of(_is_text),
})  # fmt: skip
_JOB: Final[Fields] = {
    "tensor_parallel": _is_int(1, MOST_SHARES), "pipeline_parallel": _is_int(1, MOST_LAYERS),
    "micro_batches": _is_int(1, MOST_MICRO_BATCHES), "pipeline_last": _is_flag, "seq_length": _POSITIVE,
    "sequence_parallel": _is_flag, "chunks": _list_of(_row_of(*3 * [_is_int(0, MOST_LAYERS)])),
    "train_iters?": _none_or(_NATURAL), "ends_early?": _is_flag,
    "eval_interval?": _none_or(_NATURAL), "save_interval?": _none_or(_NATURAL),
    "distributed_optimizer?": _is_flag, "strategy?": _is_text, "act?": _is_text,
    "begins_with_a_plan?": _is_flag, "seconds_between_changes?": _is_number, "plan_wait?": _is_finite,
    "emulated?": _none_or(_is_text),
    "gemm?": _list_of(_NATURAL), "transfer_bytes?": _NATURAL, "false_alarms_per_job?": _is_number,
    "device_memory?": _none_or(_NATURAL), "memory_reserve?": _is_finite, "cost_model?": _none_or(_is_text),
}  # fmt: skip

# Messages


def _of_worker(**fields: Check) -> Fields:
    return {"worker": _NATURAL, **fields}


_ANSWERED: Final[Fields] = {"answer?": _none_or(_is_text)}
_FIELDS: Final[Mapping[str, Fields]] = {
    "job": _of_worker(**_JOB),
    "joining": _of_worker(**_JOB),
    "model": _of_worker(arguments=lambda value: _are_arguments(value)),
    "ready": _of_worker(
        epoch=_NATURAL, digests=_map_of(_is_digest_key, _is_text), ports=_list_of(_is_int(1, 65535)),
        bytes_received=_NATURAL, steps_redone=_NATURAL,
    ),
    "suspect": _of_worker(epoch=_is_int(-1), error=_is_text),
    "plan_failed": _of_worker(epoch=_NATURAL, error=_is_text),
    "muster": _of_worker(epoch=_NATURAL, record=_RECORD, held=_list_of(_is_shard),
        **{"unreachable?": _list_of(_NATURAL)},
    ),
    "prepared": _of_worker(number=_NATURAL),
    "trained": _of_worker(iteration=_NATURAL),
    "salvaged": _of_worker(),
    "done": _of_worker(),
    "failed": _of_worker(error=_is_text, code=_is_int(0, 255)),
    "event": _of_worker(event=lambda value: _is_event(value)),
    "events": _of_worker(events=_list_of(lambda value: _is_event(value))),
    "apply": {"plan": _is_anything, "why": _is_text, "patient?": _is_flag, **_ANSWERED},
    "slowdown": {
        "workers": _list_of(_NATURAL), "factor": _is_number, "iteration": _none_or(_NATURAL), "number?": _NATURAL,
        **_ANSWERED,
    },
    "exited": _of_worker(code=_is_int(-64, 255), time=_is_finite, **{"cause?": _none_or(_is_text)}),
    "silent": _of_worker(time=_is_finite, **{"silence_s?": _is_finite}),
    "lost": _of_worker(time=_is_finite),
    "restarted": _of_worker(instead_of=_NATURAL, time=_is_finite),
    "node_lost": {"node": _NATURAL, "cause": _is_text, "time": _is_finite},
    "stop": {"signal": _is_int(1, 64), "time": _is_finite},
    "leave": {"node": _NATURAL, "agent": _NATURAL, "time": _is_finite},
    "save": {"time": _is_finite},
}  # fmt: skip
TYPES: Final = frozenset(_FIELDS)
"""Of messages that the coordinator takes."""

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


def _is_event(value: Any) -> bool:
    if not _object_of(_COMMON)(value) or value["event"] in _OTHERS_EVENTS:
        return False
    return _wrong_field(value, _EVENTS.get(value["event"], {})) is None


def read_message(text: str, size: JobSize, may_exist: Callable[[int], bool]) -> dict[str, Any]:
    """A message to the coordinator.

    Args:
        may_exist: whether the job may have a worker of this id by now.

    Raises:
        MalformedError: it is none.
    """
    message = _read_object(text)
    _require(message, {"id?": _is_text}, "")
    kind = message.get("type")
    if not isinstance(kind, str) or kind not in TYPES:
        raise MalformedError(f"its type {_cut(repr(kind), 60)} is unknown")
    _require(message, _FIELDS[kind], f"{kind!r}: ")
    for name in ("worker", "instead_of"):
        if name in message and not may_exist(message[name]):
            raise MalformedError(f"{kind!r}: the job has no worker {message[name]}")
    if "node" in message and message["node"] >= size.most_nodes:
        raise MalformedError(f"{kind!r}: the job has no node {message['node']}")
    if kind in ("job", "joining"):
        try:
            check_chunks([Chunk(*chunk) for chunk in message["chunks"]], message["pipeline_parallel"])
        except PlanError as error:
            raise MalformedError(f"{kind!r}: {error}") from None
    return message


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


def shown(text: str) -> str:
    """What of a malformed text the log shows."""
    return _cut(text, SHOWN)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
