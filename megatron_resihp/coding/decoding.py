# SPDX-License-Identifier: Apache-2.0
"""Reading: the instance that a plain value stands for. All of a type's code is made once.

It checks everything: types, rules, sizes, missing and unknown fields. May import this package's `errors`, `forms` and
`rules`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from enum import Enum
from functools import cache, lru_cache
from typing import Annotated, Any, Final, NamedTuple, Union, get_args, get_origin, get_type_hints

from megatron_resihp.coding.errors import MissingFieldError, WrongValueError, is_not
from megatron_resihp.coding.forms import Form, form_of, may_be_omitted
from megatron_resihp.coding.rules import Between, Holds, Matches, Repeated, Rule

MOST_CHARACTERS: Final = 1_000_000
"""The longest text that is read."""
MOST_ITEMS: Final = 1_000_000
"""The longest list or mapping that is read."""
INT_BITS: Final = 63


class Tolerance(NamedTuple):
    """What may be other than a type says.

    Attributes:
        unknown: fields that it does not have are left out.
        missing: fields that have a default may not be there.
        known: instances by words. Such a word may stand in the place of a value that is marked `Repeated`, once: it is
            taken out of here then.
    """

    unknown: bool = False
    missing: bool = False
    known: dict[str, Any] | None = None


EXACT: Final = Tolerance()
FILE: Final = Tolerance(unknown=True, missing=True)
"""Others may write files, or read them, too, and add what is of use to them."""

Decode = Callable[[Any, Tolerance], Any]


@dataclass(frozen=True)
class _Versioned:
    version: Any = None


def version_said(value: Any) -> Any:
    """What an object says of its version, whatever that is; None: nothing.

    Raises:
        WrongValueError: it is no object.
    """
    return decode(_Versioned, value, FILE).version


def decode(kind: Any, value: Any, tolerance: Tolerance = EXACT) -> Any:
    """The instance of a type that a plain value stands for.

    Args:
        kind: a dataclass, or any type that a field of one may have.
        tolerance: what may be other than the type says, wherever it is in the value.

    Raises:
        WrongValueError: it stands for none.
    """
    return _decoder(kind)(value, tolerance)


@cache
def _decoder(kind: Any) -> Decode:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _decode_annotated(*arguments)
    if origin in (Union, types.UnionType):
        (inner,) = (each for each in arguments if each is not types.NoneType)
        return _decode_or_none(_decoder(inner))
    if origin is tuple:
        return _decode_rows(_decoder(arguments[0])) if arguments[1:] == (...,) else _decode_row(arguments, None)
    if origin in (frozenset, set, list):
        rows = _decode_rows(_decoder(arguments[0]))
        return lambda value, tolerance: origin(rows(value, tolerance))
    if origin is not None and issubclass(origin, Mapping):
        if get_origin(arguments[0]) is tuple:
            items = _decode_rows(_decode_row(arguments, None))
            return lambda value, tolerance: dict(items(value, tolerance))
        return _decode_mapping(*arguments)
    if kind is Any:
        return lambda value, tolerance: value
    if isinstance(kind, type):
        return _decoder_of_class(kind)
    raise TypeError(f"{kind} has no plain form")


def _decoder_of_class(kind: Any) -> Decode:
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    form = form_of(kind)
    if form is not None:
        return _decode_form(form)
    if issubclass(kind, Enum):
        return _decode_enum(kind)
    if dataclasses.is_dataclass(kind):
        return _decode_object(kind)
    if issubclass(kind, tuple):
        hints = get_type_hints(kind, include_extras=True)
        return _decode_row(tuple(hints[name] for name in kind._fields), kind)
    raise TypeError(f"{kind} has no plain form")


def _decode_int(value: Any, tolerance: Tolerance) -> int:
    if type(value) is not int:
        raise is_not(value, "a whole number")
    if not -(1 << INT_BITS) <= value < 1 << INT_BITS:
        raise is_not(value, "a number that a job can have")
    return value


def _decode_int_between(low: float, high: float, rule: Rule) -> Decode:
    """In one function, as most numbers of messages are of this kind."""

    bottom, top = max(low, -(1 << INT_BITS)), min(high, (1 << INT_BITS) - 1)

    def decode_int_between(value: Any, tolerance: Tolerance) -> int:
        if type(value) is int and bottom <= value <= top:
            return value
        _decode_int(value, tolerance)
        raise is_not(value, rule)

    return decode_int_between


def _decode_float(value: Any, tolerance: Tolerance) -> float:
    if type(value) is float:
        return value
    if type(value) is not int:
        raise is_not(value, "a number")
    return float(_decode_int(value, tolerance))


def _decode_text(value: Any, tolerance: Tolerance) -> str:
    if type(value) is not str:
        raise is_not(value, "text")
    if len(value) > MOST_CHARACTERS:
        raise WrongValueError(f"has {len(value)} characters, more than {MOST_CHARACTERS}")
    return value


def _decode_flag(value: Any, tolerance: Tolerance) -> bool:
    if type(value) is not bool:
        raise is_not(value, "true or false")
    return value


_SIMPLE: Final[Mapping[Any, Decode]] = {
    int: _decode_int, float: _decode_float, str: _decode_text, bool: _decode_flag,
}  # fmt: skip


def _decode_annotated(kind: Any, *marks: Any) -> Decode:
    forms = [mark for mark in marks if isinstance(mark, Form)]
    decoder = _decode_form(forms[0]) if forms else _decoder(kind)
    for mark in marks:
        if isinstance(mark, Repeated):
            decoder = _decode_repeated(decoder)
        elif not isinstance(mark, Form):
            decoder = _with_rule(decoder, mark)
    return decoder


def _decode_repeated(decoder: Decode) -> Decode:
    def decode_repeated(value: Any, tolerance: Tolerance) -> Any:
        known = tolerance.known
        if known is not None and type(value) is str and value in known:
            return known.pop(value)
        return decoder(value, tolerance)

    return decode_repeated


def _decode_form(form: Form) -> Decode:
    return lambda value, tolerance: form.from_plain(value)


def _decode_enum(kind: type[Enum]) -> Decode:
    members = dict(kind.__members__)

    def decode_enum(value: Any, tolerance: Tolerance) -> Enum:
        if type(value) is not str or value not in members:
            raise is_not(value, f"one of {', '.join(members)}")
        return members[value]

    return decode_enum


def _with_rule(decoder: Decode, rule: Rule) -> Decode:
    match rule:
        case Matches(pattern):
            holds: Callable[[Any], Any] = re.compile(pattern, re.ASCII).fullmatch
        case Holds(predicate):
            holds = predicate
        case Between(least, most):
            low, high = -math.inf if least is None else least, math.inf if most is None else most
            if decoder is _decode_int:
                return _decode_int_between(low, high, rule)

            def holds(value: Any) -> Any:
                return low <= value <= high

    def decode_with_rule(value: Any, tolerance: Tolerance) -> Any:
        decoded = decoder(value, tolerance)
        if not holds(decoded):
            raise is_not(value, rule)
        return decoded

    return decode_with_rule


def _decode_or_none(decoder: Decode) -> Decode:
    return lambda value, tolerance: None if value is None else decoder(value, tolerance)


# Callers check lists and objects in line: a death in a large job brings tens of thousands of them at once.


def _is_no_list(value: Any) -> WrongValueError:
    return is_not(value, "a list") if type(value) is not list else _is_too_long(value)


def _is_no_dict(value: Any) -> WrongValueError:
    return is_not(value, "an object") if type(value) is not dict else _is_too_long(value)


def _is_too_long(value: Sized) -> WrongValueError:
    return WrongValueError(f"has {len(value)} items, more than {MOST_ITEMS}")


def _decode_rows(decoder: Decode) -> Decode:
    def decode_rows(value: Any, tolerance: Tolerance) -> tuple[Any, ...]:
        if type(value) is not list or len(value) > MOST_ITEMS:
            raise _is_no_list(value)
        rows = list[Any]()
        add = rows.append
        try:
            for each in value:
                add(decoder(each, tolerance))
        except WrongValueError as error:
            error.where.insert(0, str(len(rows)))
            raise
        return tuple(rows)

    return decode_rows


def _decode_row(kinds: tuple[Any, ...], named: Any) -> Decode:
    decoders = [_decoder(kind) for kind in kinds]
    whole, without = len(decoders), len(decoders) - (len(named._field_defaults) if named is not None else 0)

    def decode_row(value: Any, tolerance: Tolerance) -> Any:
        if type(value) is not list:
            raise _is_no_list(value)
        if not without <= len(value) <= whole:
            raise WrongValueError(f"has {len(value)} items, not {without}")
        items: list[Any] = []
        add = items.append
        try:
            for decoder, each in zip(decoders, value, strict=False):  # it may lack the last ones
                add(decoder(each, tolerance))
        except WrongValueError as error:
            error.where.insert(0, str(len(items)))
            raise
        return tuple(items) if named is None else named(*items)

    return decode_row


def _decode_any_object(value: Any, tolerance: Tolerance) -> dict[str, Any]:
    if type(value) is not dict or len(value) > MOST_ITEMS:
        raise _is_no_dict(value)
    return value


def _decode_mapping(key_kind: Any, value_kind: Any) -> Decode:
    if (key_kind, value_kind) == (str, Any):
        return _decode_any_object
    decoder, decode_key = _decoder(value_kind), _decoder(key_kind)
    numbered = key_kind is int or get_args(key_kind)[:1] == (int,)

    def decode_mapping(value: Any, tolerance: Tolerance) -> dict[Any, Any]:
        if type(value) is not dict or len(value) > MOST_ITEMS:
            raise _is_no_dict(value)
        found, key = {}, ""
        try:
            for key, each in value.items():
                known = decode_key(_number(key) if numbered else key, tolerance)
                found[known] = decoder(each, tolerance)
        except WrongValueError as error:
            error.where.insert(0, key[:60])
            raise
        return found

    return decode_mapping


def _number(key: str) -> Any:
    """JSON has text for keys. Whatever is no number stays text, which is then refused."""
    return _short_number(key) if len(key) < 20 else key


@lru_cache(4096)
def _short_number(key: str) -> Any:
    return int(key) if key.isascii() and key.isdecimal() else key


def _decode_object(kind: Any) -> Decode:
    hints = get_type_hints(kind, include_extras=True)
    fields = [(each.name, _decoder(hints[each.name]), _needed(each)) for each in dataclasses.fields(kind)]
    known = frozenset(hints)

    def decode_object(value: Any, tolerance: Tolerance) -> Any:
        if type(value) is not dict or len(value) > MOST_ITEMS:
            raise _is_no_dict(value)
        found = {}
        name = ""
        try:
            for name, decoder, needed in fields:
                if name in value:
                    found[name] = decoder(value[name], tolerance)
                elif needed or (needed is None and not tolerance.missing):
                    raise MissingFieldError
        except WrongValueError as error:
            error.where.insert(0, name)
            raise
        if len(found) < len(value) and not tolerance.unknown:
            raise WrongValueError("is unknown", min(value.keys() - known)[:60])
        return kind(**found)

    return decode_object


def repeated_fields(kind: Any) -> Mapping[str, Any]:
    """The fields of a dataclass, and of those that it holds as they are, which are marked `Repeated`: name → type."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if get_origin(hint) is Annotated and Repeated() in hint.__metadata__:
            found[name] = hint
        elif dataclasses.is_dataclass(hint):
            found |= repeated_fields(hint)
    return found


def _needed(field: dataclasses.Field[Any]) -> bool | None:
    """Whether it has to be there; None: it has a default, so that depends on the reader."""
    if may_be_omitted(field):
        return False
    has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    return None if has_default else True
