# SPDX-License-Identifier: Apache-2.0
"""What every event is: a frozen dataclass with a name in the log, a time, an epoch and the worker that wrote it.

May import: the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final, dataclass_transform

NOT_YET: Final = 0.0
"""The time of an event that is not written down yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened in a run.

    A field's meaning stands beside its type. A field with a default may be null or missing in the log; a reader ignores
    an event that lacks any other, or the time.
    """

    name: ClassVar[str]
    written_by: ClassVar[str]

    time: Annotated[float, "when it happened, in Unix seconds"] = NOT_YET
    epoch: Annotated[int | None, "the epoch that the writer was in"] = None
    worker: Annotated[int | None, "id of the worker that wrote it; null: the coordinator"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownEvent(Event):
    """An event of a later version: it is passed on as it came, and read by no code."""

    given: Mapping[str, Any] = field(default_factory=dict)
    """All of it, as in the log."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def event[E: Event](name: str, written_by: str) -> Callable[[type[E]], type[E]]:
    """Make a class an event.

    Args:
        name: in the log.
        written_by: which process writes it, for readers.
    """

    def make(declared: type[E]) -> type[E]:
        made = dataclass(frozen=True, slots=True, kw_only=True)(declared)
        made.name, made.written_by = name, written_by
        return made

    return make


def stamped[E: Event](event: E, time: float, epoch: int | None = None, worker: int | None = None) -> E:
    """`event` with when, where and by which process it was written, as far as it does not say that itself."""
    return replace(
        event,
        time=time if event.time == NOT_YET else event.time,
        epoch=epoch if event.epoch is None else event.epoch,
        worker=worker if event.worker is None else event.worker,
    )
