# SPDX-License-Identifier: Apache-2.0
"""How a type or a field may say that JSON has it otherwise than usual. May import the standard library."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

_OMITTED: Final = "megatron_resihp.coding.omitted"
_forms: Final[dict[type, Form]] = {}


@dataclass(frozen=True)
class Form:
    """A plain form of its own: for a class by `set_form`, for any type beside it: `Annotated[Kept, Form(…)]`.

    Attributes:
        to_plain: gives the plain value.
        from_plain: reads it, and raises WrongValueError where it can't.
    """

    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]


def set_form(kind: type, form: Form) -> None:
    """Give a class its form, where it is defined: before one is written or read."""
    _forms[kind] = form


def form_of(kind: object) -> Form | None:
    """The form that a class was given; None: it has none of its own."""
    return _forms.get(kind) if isinstance(kind, type) else None


def omitted_if(default: Any) -> Any:
    """The default of a dataclass' field that JSON leaves out where it has this value; it may always be missing."""
    return dataclasses.field(default=default, metadata={_OMITTED: True})


def may_be_omitted(field: dataclasses.Field[Any]) -> bool:
    """Whether the field was made by `omitted_if`."""
    return _OMITTED in field.metadata
