# SPDX-License-Identifier: Apache-2.0
"""Which fields an event has: what types its class declares, and how a field of such a type is read from JSON.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, Final, NamedTuple, Union, get_args, get_origin, get_type_hints

from megatron_resihp.events.nonfinite import SPELLINGS


class WrongKindError(Exception):
    """A JSON value is not of the kind that its field has."""


class Kind(NamedTuple):
    """A type of value.

    Attributes:
        label: what docs/events.md calls it.
        read: makes the value from JSON. Raises WrongKindError.
    """

    label: str
    read: Callable[[Any], Any]


class Field(NamedTuple):
    name: str
    kind: Kind
    meaning: str
    required: bool
    """A reader ignores an event that lacks a required field; any other may be null or missing."""


@cache
def fields_of(event: Any) -> tuple[Field, ...]:
    """All fields of a class of events, those that every event has first."""
    hints = get_type_hints(event, include_extras=True)
    return tuple(
        Field(each.name, _kind_of(hints[each.name]), _meaning_of(hints[each.name]),
              each.name == "time" or each.default is MISSING)
        for each in fields(event)
    )  # fmt: skip


# ---- reading values


def _of_type(*expected: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) not in expected:
            raise WrongKindError
        return value

    return read


def _number(value: Any) -> float:
    if type(value) is float or type(value) is int:
        return value
    if isinstance(value, str) and value in SPELLINGS:
        return float(value)
    raise WrongKindError


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise WrongKindError
    return value


def _numbers_by_name(value: Any) -> dict[str, float]:
    return {name: _number(item) for name, item in _mapping(value).items()}


def _items(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise WrongKindError
    return tuple(value)


def _each(read: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    return lambda value: tuple(map(read, _items(value)))


_integer: Final = _of_type(int)
_integers: Final = _each(_integer)


def _row(length: int) -> Callable[[Any], tuple[int, ...]]:
    def read(value: Any) -> tuple[int, ...]:
        row = _integers(value)
        if len(row) != length:
            raise WrongKindError
        return row

    return read


def _range(value: Any) -> tuple[int, ...]:
    first, last = _row(2)(value)
    if first > last:
        raise WrongKindError
    return first, last


def _plan(value: Any) -> Mapping[str, Any]:
    """Check a plan as far as readers rely on it; a later version may have more in it."""
    for replica in _items(_mapping(value).get("replicas")):
        for stage in _items(_mapping(replica).get("stages")):
            _integers(stage)
    _mapping(value.get("standbys") or {})
    return _mapping(value)


# ---- types

Plan = Annotated[Mapping[str, Any], Kind("plan", _plan)]
"""A `plan.ParallelPlan` as it is written."""
Ranges = Annotated[tuple[tuple[int, int], ...], Kind("list of [first, last]", _each(_range))]

_KINDS: Final[Mapping[Any, Kind]] = {
    int: Kind("integer", _integer),
    float: Kind("number", _number),
    str: Kind("string", _of_type(str)),
    bool: Kind("true or false", _of_type(bool)),
    int | str: Kind("integer or string", _of_type(int, str)),
    tuple[int, ...]: Kind("list of integers", _integers),
    tuple[float, ...]: Kind("list of numbers", _each(_number)),
    tuple[str, ...]: Kind("list of strings", _each(_of_type(str))),
    tuple[tuple[int, int], ...]: Kind("list of [integer, integer]", _each(_row(2))),
    tuple[tuple[int, int, int], ...]: Kind("list of [integer, integer, integer]", _each(_row(3))),
    tuple[Mapping[str, Any], ...]: Kind("list of objects", _each(_mapping)),
    Mapping[str, float]: Kind("object of numbers", _numbers_by_name),
    Mapping[str, Any]: Kind("object", _mapping),
}


def _kind_of(hint: Any) -> Kind:
    if get_origin(hint) is Annotated:
        inner, *others = get_args(hint)
        return next((each for each in others if isinstance(each, Kind)), None) or _kind_of(inner)
    if get_origin(hint) in (Union, types.UnionType) and types.NoneType in get_args(hint):
        return _kind_of(reduce(or_, (each for each in get_args(hint) if each is not types.NoneType)))
    return _KINDS[hint]


def _meaning_of(hint: Any) -> str:
    return next(each for each in get_args(hint)[1:] if isinstance(each, str))
