# SPDX-License-Identifier: Apache-2.0
"""docs/events.md, from the classes of events.

`python -m megatron_resihp.events.schema > docs/events.md` writes the page anew.
May import: the standard library and this package's modules.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable
from typing import Any, Final

from megatron_resihp.events.catalogue import EVENTS
from megatron_resihp.events.event import Event
from megatron_resihp.events.fields import Field, fields_of
from megatron_resihp.events.log import FILE_NAME

_ANY: Final[Any] = Event
_COMMON: Final = fields_of(_ANY)
_NAME: Final = "| `event` | string | yes | the event's name |"


def markdown() -> str:
    """docs/events.md."""
    parts = [_INTRODUCTION, _table(_COMMON, _NAME)]
    event: Any
    for event in EVENTS.values():
        meaning = " ".join((inspect.getdoc(event) or "").split())
        text = textwrap.fill(f"{meaning} Written by: {event.written_by}.", 120)
        parts += [f"## {event.name}\n\n{text}\n", _table(_own_fields(event))]
    return "\n".join(parts)


def _own_fields(event: Any) -> list[Field]:
    """What an event has beside what every event has, and what it says of that anew."""
    return [field for field in fields_of(event) if field not in _COMMON]


def _table(fields: Iterable[Field], *above: str) -> str:
    rows = [f"| `{f.name}` | {f.kind.label} | {'yes' if f.required else 'no'} | {f.meaning} |" for f in fields]
    return "\n".join(["| field | type | required | meaning |", "| --- | --- | --- | --- |", *above, *rows, ""])


_INTRODUCTION: Final = f"""\
# Events

<!-- Written by `python -m megatron_resihp.events.schema`; edit the classes in megatron_resihp/events/ instead. -->

A run's event log is `RUN_DIR/{FILE_NAME}`: one JSON object a line, appended as things happen. `resihp report` is made
from it; if a run's log has no end, the command also asks the launcher and looks at what survivors have saved. A line
that was cut off or damaged is skipped and reported, and so is an event that lacks a required field; an event of a name
that is not listed here is skipped. Fields that are not required may be null or missing. Numbers that JSON cannot spell
are the strings `"nan"`, `"inf"` and `"-inf"`.

Every event has:
"""


if __name__ == "__main__":
    print(markdown(), end="")
