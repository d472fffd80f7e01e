# SPDX-License-Identifier: Apache-2.0
"""Events to the objects that the log holds, and back.

A reader takes logs of later versions: it leaves out fields that it does not know. May import: the standard library and
this package's modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any, Final

from megatron_resihp.events.catalogue import EVENTS
from megatron_resihp.events.event import NOT_YET, Event, UnknownEvent
from megatron_resihp.events.fields import WrongKindError, fields_of

_ANY: Final[Any] = Event


class UnusableEventError(Exception):
    """An event lacks what a reader needs, or has it of another kind; the message says what, "iteration lacks time"."""


def plain(event: Event, time: float = NOT_YET, epoch: int | None = None, worker: int | None = None) -> dict[str, Any]:
    """The object that the log holds; numbers may not be finite yet.

    Args:
        time, epoch, worker: for an event that does not say them itself. `stamped` does the same, at twice the cost.
    """
    if isinstance(event, UnknownEvent):
        return dict(event.given)
    kind: Any = type(event)
    line = _writer(kind)(event)
    if event.time == NOT_YET:
        line["time"] = time
    if event.epoch is None:
        line["epoch"] = epoch
    if event.worker is None:
        line["worker"] = worker
    return line


def read_event(value: Mapping[str, Any]) -> Event:
    """The event that an object of the log stands for.

    Raises:
        UnusableEventError: a reader has to ignore it.
    """
    name = value.get("event")
    if not isinstance(name, str):
        raise UnusableEventError("an event lacks its name")
    kind: Any = EVENTS.get(name)
    if kind is None:
        return UnknownEvent(**_reader(_ANY)(name, value), given=value)
    found: Event = kind(**_reader(kind)(name, value))
    return found


@cache
def _writer(kind: Any) -> Callable[[Event], dict[str, Any]]:
    names = [field.name for field in fields_of(kind)]
    values_of = attrgetter(*names)

    def write(event: Event) -> dict[str, Any]:
        return {"event": kind.name, **dict(zip(names, values_of(event), strict=True))}

    return write


@cache
def _reader(kind: Any) -> Callable[[str, Mapping[str, Any]], dict[str, Any]]:
    fields = [(field.name, field.kind.read, field) for field in fields_of(kind)]

    def read(event: str, value: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name, read_value, field in fields:
            given = value.get(name)
            if given is not None:
                try:
                    found[name] = read_value(given)
                except WrongKindError:
                    wrong = f"the wrong type of {name}: expected {field.kind.label}"
                    raise UnusableEventError(f"{event} has {wrong}") from None
            elif field.required:
                raise UnusableEventError(f"{event} lacks {name}")
        return found

    return read
