# SPDX-License-Identifier: Apache-2.0
"""Dataclasses to plain JSON values and back, as their annotations say. All of a type's code is made once.

JSON has a row for a tuple or a NamedTuple, an object for a dataclass or a mapping, and a name for an enum's member.
Reading checks everything: types, rules (`checks`), sizes, missing and unknown fields.
May import `plan`, and this package's `checks` and `version`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import reprlib
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

from megatron_resihp.plan import ParallelPlan, PlanError
from megatron_resihp.protocol.checks import Between, Holds, Matches, Rule
from megatron_resihp.protocol.version import MINOR

MOST_CHARACTERS: Final = 1_000_000
"""Of one text."""
MOST_ITEMS: Final = 1_000_000
"""Of one list or mapping."""
INT_BITS: Final = 63

Encode = Callable[[Any], Any]
Decode = Callable[[Any, int], Any]
"""Takes a plain value, and the minor version of its writer."""


class WrongValueError(Exception):
    """A value is not what its type says.

    Attributes:
        where: names and indices that lead to it, from the outside in.
        problem: what is wrong with it, to be read after its name.
    """

    def __init__(self, problem: str, *where: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.where = list(where)

    def __str__(self) -> str:
        return f"{'.'.join(self.where)!r} {self.problem}" if self.where else f"it {self.problem}"


def encode(value: Any) -> Any:
    """The plain value of a dataclass."""
    kind: Any = type(value)
    encoder = _encoder(kind)
    return value if encoder is None else encoder(value)


def decode(kind: Any, value: Any, minor: int = MINOR) -> Any:
    """The instance of a type that a plain value stands for.

    Args:
        kind: a dataclass, or any type that a field of one may have.
        minor: version of the writer. A newer one may know fields that are unknown here, which are left out; an older
            one may lack fields that have a default.

    Raises:
        WrongValueError: it stands for none.
    """
    return _decoder(kind)(value, minor)


# Writing: an encoder is None where JSON has the value as it is


@cache
def _encoder(kind: Any) -> Encode | None:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _encoder(arguments[0])
    if origin in (Union, types.UnionType):
        (inner,) = (each for each in arguments if each is not types.NoneType)
        encoder = _encoder(inner)
        return None if encoder is None else _or_none(encoder)
    if origin is tuple:
        return _rows(_encoder(arguments[0])) if arguments[1:] == (...,) else None
    if origin is frozenset:
        return sorted
    if origin is not None and issubclass(origin, Mapping):
        encoder = _encoder(arguments[1])
        return None if origin is dict and encoder is None else _mapping(encoder)
    if kind is ParallelPlan:
        return ParallelPlan.to_dict
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda member: member.name
    return _object(kind) if dataclasses.is_dataclass(kind) else None


def _or_none(encoder: Encode) -> Encode:
    return lambda value: None if value is None else encoder(value)


def _rows(encoder: Encode | None) -> Encode | None:
    return None if encoder is None else lambda value: [encoder(each) for each in value]


def _mapping(encoder: Encode | None) -> Encode:
    if encoder is None:
        return dict
    return lambda value: {key: encoder(each) for key, each in value.items()}


def _object(kind: Any) -> Encode:
    hints = get_type_hints(kind, include_extras=True)
    encoders = [(each.name, _encoder(hints[each.name])) for each in dataclasses.fields(kind)]

    def encode_object(value: Any) -> dict[str, Any]:
        return {
            name: getattr(value, name) if encoder is None else encoder(getattr(value, name))
            for name, encoder in encoders
        }

    return encode_object


# Reading


@cache
def _decoder(kind: Any) -> Decode:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        decoder = _decoder(arguments[0])
        for rule in arguments[1:]:
            decoder = _with_rule(decoder, rule)
        return decoder
    if origin in (Union, types.UnionType):
        (inner,) = (each for each in arguments if each is not types.NoneType)
        return _decode_or_none(_decoder(inner))
    if origin is tuple:
        return _decode_rows(_decoder(arguments[0])) if arguments[1:] == (...,) else _decode_row(arguments, None)
    if origin is frozenset:
        rows = _decode_rows(_decoder(arguments[0]))
        return lambda value, minor: frozenset(rows(value, minor))
    if origin is not None and issubclass(origin, Mapping):
        return _decode_mapping(*arguments)
    if kind is Any:
        return lambda value, minor: value
    if isinstance(kind, type):
        return _decoder_of_class(kind)
    raise TypeError(f"messages can't hold {kind}")


def _decoder_of_class(kind: Any) -> Decode:
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if issubclass(kind, ParallelPlan):
        return _decode_plan
    if issubclass(kind, Enum):
        return _decode_enum(kind)
    if dataclasses.is_dataclass(kind):
        return _decode_object(kind)
    if issubclass(kind, tuple):
        hints = get_type_hints(kind, include_extras=True)
        return _decode_row(tuple(hints[name] for name in kind._fields), kind)
    raise TypeError(f"messages can't hold {kind}")


def _is_not(value: Any, expected: object) -> WrongValueError:
    return WrongValueError(f"is {_shown.repr(value)}, not {expected}")


_shown = reprlib.Repr(maxstring=60, maxother=60, maxlong=60, maxlevel=2)


def _decode_int(value: Any, minor: int) -> int:
    if type(value) is not int:
        raise _is_not(value, "a whole number")
    if not -(1 << INT_BITS) <= value < 1 << INT_BITS:
        raise _is_not(value, "a number that a job can have")
    return value


def _decode_float(value: Any, minor: int) -> float:
    if type(value) is float:
        return value
    if type(value) is not int:
        raise _is_not(value, "a number")
    return float(_decode_int(value, minor))


def _decode_text(value: Any, minor: int) -> str:
    if type(value) is not str:
        raise _is_not(value, "text")
    if len(value) > MOST_CHARACTERS:
        raise WrongValueError(f"has {len(value)} characters, more than {MOST_CHARACTERS}")
    return value


def _decode_flag(value: Any, minor: int) -> bool:
    if type(value) is not bool:
        raise _is_not(value, "true or false")
    return value


_SIMPLE: Final[Mapping[Any, Decode]] = {
    int: _decode_int, float: _decode_float, str: _decode_text, bool: _decode_flag,
}  # fmt: skip


def _decode_plan(value: Any, minor: int) -> ParallelPlan:
    try:
        return ParallelPlan.from_dict(value)
    except PlanError as error:
        raise WrongValueError(f"is no plan that can be run: {error}") from None


def _decode_enum(kind: type[Enum]) -> Decode:
    def decode_enum(value: Any, minor: int) -> Enum:
        if type(value) is not str or value not in kind.__members__:
            raise _is_not(value, f"one of {', '.join(kind.__members__)}")
        return kind[value]

    return decode_enum


def _with_rule(decoder: Decode, rule: Rule) -> Decode:
    match rule:
        case Matches(pattern):
            holds: Callable[[Any], Any] = re.compile(pattern, re.ASCII).fullmatch
        case Holds(predicate):
            holds = predicate
        case Between(least, most):
            low, high = -math.inf if least is None else least, math.inf if most is None else most

            def holds(value: Any) -> Any:
                return low <= value <= high

    def decode_with_rule(value: Any, minor: int) -> Any:
        decoded = decoder(value, minor)
        if not holds(decoded):
            raise _is_not(value, rule)
        return decoded

    return decode_with_rule


def _decode_or_none(decoder: Decode) -> Decode:
    return lambda value, minor: None if value is None else decoder(value, minor)


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise _is_not(value, "a list")
    if len(value) > MOST_ITEMS:
        raise WrongValueError(f"has {len(value)} items, more than {MOST_ITEMS}")
    return value


def _dict(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise _is_not(value, "an object")
    if len(value) > MOST_ITEMS:
        raise WrongValueError(f"has {len(value)} items, more than {MOST_ITEMS}")
    return value


def _decode_rows(decoder: Decode) -> Decode:
    def decode_rows(value: Any, minor: int) -> tuple[Any, ...]:
        given, rows = _list(value), list[Any]()
        try:
            for each in given:
                rows.append(decoder(each, minor))
        except WrongValueError as error:
            error.where.insert(0, str(len(rows)))
            raise
        return tuple(rows)

    return decode_rows


def _decode_row(kinds: tuple[Any, ...], named: Any) -> Decode:
    decoders = [_decoder(kind) for kind in kinds]

    def decode_row(value: Any, minor: int) -> Any:
        if len(_list(value)) != len(decoders):
            raise WrongValueError(f"has {len(value)} items, not {len(decoders)}")
        items: list[Any] = []
        try:
            for decoder, each in zip(decoders, value, strict=True):
                items.append(decoder(each, minor))
        except WrongValueError as error:
            error.where.insert(0, str(len(items)))
            raise
        return tuple(items) if named is None else named(*items)

    return decode_row


def _decode_mapping(key_kind: Any, value_kind: Any) -> Decode:
    if (key_kind, value_kind) == (str, Any):
        return lambda value, minor: _dict(value)
    decoder, decode_key = _decoder(value_kind), _decoder(key_kind)
    numbered = key_kind is int or get_args(key_kind)[:1] == (int,)

    def decode_mapping(value: Any, minor: int) -> dict[Any, Any]:
        given, found, key = _dict(value), {}, ""
        try:
            for key, each in given.items():
                known = decode_key(_number(key) if numbered else key, minor)
                found[known] = decoder(each, minor)
        except WrongValueError as error:
            error.where.insert(0, key[:60])
            raise
        return found

    return decode_mapping


def _number(key: str) -> Any:
    """JSON has text for keys. Whatever is no number stays text, which is then refused."""
    return int(key) if key.isascii() and key.isdecimal() and len(key) < 20 else key


def _decode_object(kind: Any) -> Decode:
    hints = get_type_hints(kind, include_extras=True)
    fields = [
        (each.name, _decoder(hints[each.name]),
         each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING)
        for each in dataclasses.fields(kind)
    ]  # fmt: skip
    known = frozenset(hints)

    def decode_object(value: Any, minor: int) -> Any:
        given = _dict(value)
        found = {}
        name = ""
        try:
            for name, decoder, needed in fields:
                if name in given:
                    found[name] = decoder(given[name], minor)
                elif needed or minor >= MINOR:
                    raise WrongValueError("is missing")
        except WrongValueError as error:
            error.where.insert(0, name)
            raise
        if len(found) < len(given) and minor <= MINOR:
            raise WrongValueError("is unknown", min(given.keys() - known)[:60])
        return kind(**found)

    return decode_object
