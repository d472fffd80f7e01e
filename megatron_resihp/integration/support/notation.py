# SPDX-License-Identifier: Apache-2.0
"""The short notation of the support table: each function makes the rows of some arguments. Imports `row`.

Names of arguments are one text with spaces between. A supported one becomes a refused one, or the other way round, when
its name moves from one line to another.
"""

from collections.abc import Iterable
from typing import Any

from megatron_resihp.integration.support.row import Condition, Evidence, Only, Row

Rows = tuple[Row, ...]


def tested(test: str, names: str, *, device: str = "", condition: Condition | None = None, needed: str = "") -> Rows:
    """A test holds these: `file::function`, below tests/."""
    shown = f"tests/{test}"
    return _rows(names, evidence=Evidence.TEST, shown=shown, device=device, condition=condition, needed=needed)


def given_up(test: str, names: str, why: str) -> Rows:
    """Overlaps that a job does without, and why; a test holds that nothing else changes."""
    return _rows(names, evidence=Evidence.TEST, shown=f"tests/{test}", given_up=why)


def kernel(place: str, names: str, *, in_018: str = "", device: str = "", condition: Condition | None = None) -> Rows:
    """These change how something is computed, at that place, `module:function` below megatron."""
    return _rows(names, evidence=Evidence.KERNEL, **_shown(place, in_018), device=device, condition=condition)


def at_start(place: str, names: str) -> Rows:
    """These are read before the first step, at that place, and say what the job begins with."""
    return _rows(names, evidence=Evidence.START, **_shown(place, ""))


def inert(place: str, names: str, *, in_018: str = "", device: str = "", condition: Condition | None = None) -> Rows:
    """These change nothing that training computes, as that place shows."""
    return _rows(names, evidence=Evidence.INERT, **_shown(place, in_018), device=device, condition=condition)


def without(other: str, place: str, names: str, *, condition: Only | None = None) -> Rows:
    """These do nothing without another argument (or value, `name=value`) that is refused or given up, as that place
    shows."""
    return _rows(names, evidence=Evidence.INERT, shown=f"megatron.{place}", without=other, condition=condition)


def unread(place: str, names: str, *, in_018: str = "") -> Rows:
    """Nothing of Megatron's training code reads these; the place adds them to the parser. `in_018`: reads them there,
    without changing what training computes."""
    return _rows(names, evidence=Evidence.INERT, **_shown(place, in_018), unread=True)


def refused(names: str, why: str, instead: str = "leave out this flag or --resihp") -> Rows:
    """These are refused: why, and what to do instead."""
    return _rows(names, why=why, instead=instead)


def one_of(*values: Any, mend: str) -> Only:
    """A condition: only these values."""
    return Only(lambda value: value in values, mend)


def all_of(*values: Any, mend: str) -> Only:
    """A condition: a list of these values, or none."""
    return Only(lambda given: set([given] if isinstance(given, str) else given or ()) <= set(values), mend)


def joined(*groups: Iterable[Row]) -> Rows:
    """All rows of some groups."""
    return tuple(row for group in groups for row in group)


def _shown(place: str, in_018: str) -> dict[str, str]:
    return {"shown": f"megatron.{place}", "shown_in_018": f"megatron.{in_018}" if in_018 else ""}


def _rows(names: str, **fields: Any) -> Rows:
    return tuple(Row(name, **fields) for name in names.split())
