# SPDX-License-Identifier: Apache-2.0
"""The state machine's state as plain values, for a snapshot, and back.

All fields of all its parts are in it, so that a part that gets another field needs nothing here. Pure; may import
`coding` and this package's `state_machine`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final, get_type_hints

from megatron_resihp.coding import WrongValueError, decode, encode_as
from megatron_resihp.control.coordination.actions import Limits
from megatron_resihp.control.coordination.state_machine.departures import Departures
from megatron_resihp.control.coordination.state_machine.links import FailedLinks
from megatron_resihp.control.coordination.state_machine.state import Job, State
from megatron_resihp.control.job_size import JobSize

_MADE_WITH: Final = {Departures: "joining", FailedLinks: "node_of"}
"""Fields that parts are made with, of other parts."""


def plain_state(state: State) -> dict[str, Any]:
    """The plain values of all fields."""
    return _plain(state)


def state_from(plain: Any) -> State:
    """The state that plain values stand for.

    Raises:
        WrongValueError: they stand for none.
    """
    try:
        size, limits = decode(JobSize, plain["job"]["size"]), decode(Limits, plain["limits"])
    except (LookupError, TypeError):
        raise WrongValueError("is not the state of a job") from None
    state = State(Job(size), limits)
    _fill(state, plain)
    return state


def _plain(part: Any) -> dict[str, Any]:
    return {name: _plain(value) if _is_part(value) else encode_as(kind, value) for name, kind, value in _fields(part)}


def _fill(part: Any, plain: Any) -> None:
    """Fill a part that was just made. Parts keep their identity: others know them."""
    fields = list(_fields(part))
    if not isinstance(plain, Mapping) or plain.keys() != {name for name, _, _ in fields}:
        raise WrongValueError(f"has other fields than {type(part).__name__}")
    for name, kind, value in fields:
        try:
            if _is_part(value):
                _fill(value, plain[name])
            else:
                setattr(part, name, decode(kind, plain[name]))
        except WrongValueError as error:
            error.where.insert(0, name)
            raise


def _is_part(value: Any) -> bool:
    """Whether a value is changed in place, field by field."""
    dataclass: Any = getattr(value, "__dataclass_params__", None)
    return dataclass is not None and not dataclass.frozen


def _fields(part: Any) -> Iterator[tuple[str, Any, Any]]:
    """The name, type and value of each field, but for what the part was made with."""
    kind: Any = type(part)
    return ((name, hint, getattr(part, name)) for name, hint in _hints(kind))


@cache
def _hints(part: Any) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(part, include_extras=True)
    made_with = _MADE_WITH.get(part)
    return tuple((each.name, hints[each.name]) for each in dataclasses.fields(part) if each.name != made_with)
