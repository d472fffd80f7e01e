# SPDX-License-Identifier: Apache-2.0
"""How messages travel: as JSON text with the protocol's version, the kind, the sender, and the fields.

All texts are written and read here. A malformed text is refused by an error that names its sender and the field. Fields
that a newer minor version has added are ignored; another major version is refused.
May import `coding` and this package's `version`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from megatron_resihp.coding import EXACT, Tolerance, WrongValueError, decode, encode
from megatron_resihp.protocol.version import MINOR, VERSION, minor_of

LARGEST: Final = 8 * 1024 * 1024
"""Characters of a text; the store takes no more bytes."""
SHOWN: Final = 200
"""Characters of what was refused that the log shows."""
COORDINATOR: Final = "the coordinator"
NOBODY: Final = "somebody"
"""The sender of a text that does not name one."""


_NAMES: Final = frozenset({"protocol", "kind", "sender", "id", "body"})


class MalformedError(Exception):
    """A text that holds nothing of the expected kinds; the message names its sender and the field."""


@dataclass(frozen=True)
class Letter[T]:
    """What a text holds.

    Attributes:
        sender: a process, in words.
        body: what it says.
        id: that no other letter has; None: a letter that is not sent again.
    """

    sender: str
    body: T
    id: str | None = None


class Kinds[T]:
    """Dataclasses of which a text holds one, told apart by their names.

    Args:
        kinds: the classes.
        what: a text of these kinds, in a word.
    """

    def __init__(self, kinds: Iterable[type[T]], what: str) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._what = what

    @property
    def classes(self) -> tuple[type[T], ...]:
        """All kinds."""
        return tuple(self._kinds.values())

    def write(self, body: T, sender: str, id: str | None = None) -> str:
        """The text that holds this."""
        return json.dumps({
            "protocol": VERSION, "kind": type(body).__name__, "sender": sender, "id": id,
            "body": encode(body),
        })  # fmt: skip

    def read(self, text: str) -> Letter[T]:
        """What a text holds.

        Raises:
            MalformedError: nothing of these kinds.
        """
        who, what = NOBODY, self._what
        try:
            value = _parsed(text)
            said = value.get("sender")
            who = said[:SHOWN] if isinstance(said, str) else who
            tolerance = _tolerance_for(value)
            name, id = _text_in(value, "kind"), value.get("id")
            sender = _text_in(value, "sender")
            if id is not None:
                _text_in(value, "id")
            if name not in self._kinds:
                raise WrongValueError(f"is {name[:60]!r}, which is unknown", "kind")
            what = name
            if "body" not in value:
                raise WrongValueError("is missing", "body")
            if len(value) > len(_NAMES) - ("id" not in value) and not tolerance.unknown:
                raise WrongValueError("is unknown", min(value.keys() - _NAMES)[:60])
            return Letter(sender, decode(self._kinds[name], value["body"], tolerance), id)
        except WrongValueError as error:
            raise MalformedError(f"{what} from {who}: {error}") from None


def _text_in(value: Mapping[str, Any], name: str) -> str:
    text = value.get(name)
    if not isinstance(text, str) or len(text) > SHOWN:
        raise WrongValueError("is missing" if text is None else "is not a short text", name)
    return text


def _parsed(text: str) -> dict[str, Any]:
    if len(text) > LARGEST:
        raise WrongValueError(f"has {len(text)} characters, more than {LARGEST}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WrongValueError(f"is not JSON ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise WrongValueError("is not a JSON object")
    return value


def _tolerance_for(value: Mapping[str, Any]) -> Tolerance:
    """A newer minor version may know fields that are unknown here, an older one may lack those that have a default.

    Raises:
        WrongValueError: the text can't be read.
    """
    version = value.get("protocol")
    if version == VERSION:
        return EXACT
    if not isinstance(version, str):
        raise WrongValueError("is missing" if version is None else "is not a version", "protocol")
    try:
        minor = minor_of(version)
    except ValueError as error:
        raise WrongValueError(str(error), "protocol") from None
    return Tolerance(unknown=minor > MINOR, missing=minor < MINOR)


def shown(text: str) -> str:
    """What of a malformed text the log shows."""
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
