# SPDX-License-Identifier: Apache-2.0
"""Writing: an instance's plain value. All of a type's code is made once. May import this package's `forms`."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from megatron_resihp.coding.forms import Form, form_of, may_be_omitted

Encode = Callable[[Any], Any]


def encode(value: Any) -> Any:
    """The plain value of a dataclass."""
    return encode_as(type(value), value)


def encode_as(kind: Any, value: Any) -> Any:
    """The plain value of an instance of any type that a field of a dataclass may have."""
    encoder = _encoder(kind)
    return value if encoder is None else encoder(value)


@cache
def _encoder(kind: Any) -> Encode | None:
    """None: JSON has the value as it is."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        forms = [each for each in arguments[1:] if isinstance(each, Form)]
        return forms[0].to_plain if forms else _encoder(arguments[0])
    if origin in (Union, types.UnionType):
        (inner,) = (each for each in arguments if each is not types.NoneType)
        encoder = _encoder(inner)
        return None if encoder is None else _or_none(encoder)
    if origin is tuple:
        return _rows(_encoder(arguments[0])) if arguments[1:] == (...,) else _row(arguments)
    if origin is list:
        return _rows(_encoder(arguments[0]))
    if origin in (frozenset, set):
        return sorted
    if origin is not None and issubclass(origin, Mapping):
        if get_origin(arguments[0]) is tuple:
            row = _row(arguments)
            return lambda value: [row(item) for item in value.items()]
        encoder = _encoder(arguments[1])
        return None if origin is dict and arguments[0] is str and encoder is None else _mapping(encoder)
    return _encoder_of_class(kind) if isinstance(kind, type) else None


def _encoder_of_class(kind: type) -> Encode | None:
    form = form_of(kind)
    if form is not None:
        return form.to_plain
    if issubclass(kind, Enum):
        return lambda member: member.name
    if dataclasses.is_dataclass(kind):
        return _object(kind)
    if issubclass(kind, tuple):
        row = _row(tuple(get_type_hints(kind, include_extras=True).values()))
        defaults = tuple(getattr(kind, "_field_defaults", {}).values())
        return _without_defaults(row, defaults) if defaults else row
    return None


def _or_none(encoder: Encode) -> Encode:
    return lambda value: None if value is None else encoder(value)


def _rows(encoder: Encode | None) -> Encode:
    if encoder is None:
        return list
    return lambda value: [encoder(each) for each in value]


def _row(kinds: tuple[Any, ...]) -> Encode:
    encoders = [_encoder(kind) for kind in kinds]
    if not any(encoders):
        return list
    return lambda value: [
        each if encoder is None else encoder(each) for encoder, each in zip(encoders, value, strict=True)
    ]


def _without_defaults(row: Encode, defaults: tuple[Any, ...]) -> Encode:
    """A NamedTuple's row without its last items, where all that have defaults have these."""
    return lambda value: row(value)[: -len(defaults)] if tuple(value[-len(defaults) :]) == defaults else row(value)


def _mapping(encoder: Encode | None) -> Encode:
    """JSON has text for keys."""
    if encoder is None:
        return lambda value: {str(key): each for key, each in value.items()}
    return lambda value: {str(key): encoder(each) for key, each in value.items()}


def _object(kind: Any) -> Encode:
    hints = get_type_hints(kind, include_extras=True)
    fields = dataclasses.fields(kind)
    encoders = [(each.name, _encoder(hints[each.name])) for each in fields]
    omitted = {each.name: each.default for each in fields if may_be_omitted(each)}

    def encode_object(value: Any) -> dict[str, Any]:
        return {
            name: getattr(value, name) if encoder is None else encoder(getattr(value, name))
            for name, encoder in encoders
        }

    def encode_some(value: Any) -> dict[str, Any]:
        found = encode_object(value)
        for name, default in omitted.items():
            if getattr(value, name) == default:
                del found[name]
        return found

    return encode_some if omitted else encode_object
