# SPDX-License-Identifier: Apache-2.0
"""How messages travel: as JSON text with the protocol's version, the kind, the sender, and the fields.

All texts are written and read here. A malformed text is refused by an error that names its sender and the field. Fields
that a newer minor version has added are ignored; another major version is refused.
May import `coding` and this package's `version` and `repeated`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from typing import Any, Final

from megatron_resihp.coding import EXACT, Tolerance, WrongValueError, decode, encode, repeated_fields
from megatron_resihp.protocol.repeated import Parts
from megatron_resihp.protocol.version import MINOR, VERSION, minor_of

LARGEST: Final = 8 * 1024 * 1024
"""Characters of a text; the store takes no more bytes."""
SHOWN: Final = 200
"""Characters of what was refused that the log shows."""
COORDINATOR: Final = "the coordinator"
NOBODY: Final = "somebody"
"""The sender of a text that does not name one."""


_NAMES: Final = frozenset({"protocol", "kind", "sender", "id", "body"})
_BEGINNING: Final = re.compile(r'\{"protocol": "([^"\\]*)", "kind": "(\w+)", ')
"""Of a text as it is written here: the protocol's version and the kind."""


class MalformedError(Exception):
    """A text that holds nothing of the expected kinds; the message names its sender and the field."""


@dataclass(frozen=True)
class Letter[T]:
    """What a text holds.

    Attributes:
        sender: a process, in words.
        body: what it says.
        id: that no other letter has; None: a letter that is not sent again.
        said: the text of the body, in one line, if it is one that this version reads without tolerance; empty: it is
            not. It says the same as the body.
    """

    sender: str
    body: T
    id: str | None = None
    said: str = field(default="", compare=False)


class Kinds[T]:
    """Dataclasses of which a text holds one, told apart by their names.

    Args:
        kinds: the classes.
        what: a text of these kinds, in a word.
        largest: characters of a text that is read.
    """

    def __init__(self, kinds: Iterable[type[T]], what: str, largest: int = LARGEST) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._what, self._largest = what, largest
        self._parts: dict[str, Parts | None] = {}

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
        parts = self._parts_of(text)
        if parts is not None:
            try:
                short, known = parts.cut(text)
                letter = self._read(short, text, known)
                if not known:
                    return letter
            except (ValueError, RecursionError, WrongValueError, MalformedError):
                pass  # It is read as a whole, which tells what is wrong with it.
        return self._read(text, text)

    def _parts_of(self, text: str) -> Parts | None:
        """What may be known of a text; None: nothing."""
        beginning = _BEGINNING.match(text)
        if beginning is None or beginning[1] != VERSION or len(text) > LARGEST:
            return None
        name = beginning[2]
        if name not in self._parts:
            fields = repeated_fields(self._kinds[name]) if name in self._kinds else {}
            self._parts[name] = Parts(fields) if fields else None
        return self._parts[name]

    def _read(self, text: str, whole: str, known: dict[str, Any] | None = None) -> Letter[T]:
        """As `read`. `known`: instances by the words that stand for them; `whole`: the text that has none."""
        who, what = NOBODY, self._what
        try:
            value = _parsed(text, self._largest)
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
            exact = tolerance == EXACT
            body = decode(self._kinds[name], value["body"], Tolerance(known=known) if known and exact else tolerance)
            return Letter(sender, body, id, _said(whole, name, sender, id) if exact else "")
        except WrongValueError as error:
            raise MalformedError(f"{what} from {who}: {error}") from None


def _said(text: str, kind: str, sender: str, id: str | None) -> str:
    """The text of a letter's body; see `Letter.said`."""
    before = f'{{"protocol": "{VERSION}", "kind": "{kind}", "sender": {_quoted(sender)}, "id": {_quoted(id)}, "body": '
    in_one_line = text.isascii() and "\n" not in text and "\r" not in text
    return text[len(before) : -1] if in_one_line and text.startswith(before) and text.endswith("}") else ""


def _quoted(text: str | None) -> str:
    return "null" if text is None else encode_basestring_ascii(text)


def _text_in(value: Mapping[str, Any], name: str) -> str:
    text = value.get(name)
    if not isinstance(text, str) or len(text) > SHOWN:
        raise WrongValueError("is missing" if text is None else "is not a short text", name)
    return text


def _parsed(text: str, largest: int) -> dict[str, Any]:
    if len(text) > largest:
        raise WrongValueError(f"has {len(text)} characters, more than {largest}")
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
