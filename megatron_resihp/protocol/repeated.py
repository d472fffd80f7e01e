# SPDX-License-Identifier: Apache-2.0
"""Parts of texts that many senders say alike: a part is read once, and known by its text afterwards.

After a death thousands of survivors report the same of the iteration that they were in. May import `coding`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from megatron_resihp.coding import decode

MOST: Final = 16
"""How many parts of a field are known; survivors are in one iteration or the next, and report losses or don't."""
LONGEST: Final = 1 << 16
"""Characters of a part that is kept."""
_WORD: Final = secrets.token_hex(16)
"""What no text has."""
_JSON: Final = json.JSONDecoder()


class _Part(NamedTuple):
    text: str
    instance: Any


class Parts:
    """The known parts of texts of one kind.

    Args:
        fields: name → type, of those that are marked `coding.Repeated`.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = [(name, f', "{name}": ', f'"{_WORD}{name}"', kind) for name, kind in fields.items()]
        self._seen: dict[str, tuple[_Part, ...]] = dict.fromkeys(fields, ())

    def cut(self, text: str) -> tuple[str, dict[str, Any]]:
        """A text with a word in the place of each part that is known, and word → instance.

        A text that has no part, or is no JSON, is cut as well. What is read of the outcome holds if all words have been
        found where they may be, and is worthless otherwise.

        Raises:
            ValueError, RecursionError, WrongValueError: a part is malformed.
        """
        pieces, known, start = [], {}, 0
        for name, before, word, kind in self._fields:
            # A space comes before this quote, so it is not one within a string: the name is that of a field.
            at = text.find(before, start) + len(before)
            if at < len(before) or not text.startswith("{", at):
                continue
            part = self._part(name, kind, text, at)
            known[word[1:-1]] = part.instance
            pieces += [text[start:at], word]
            start = at + len(part.text)
        return "".join([*pieces, text[start:]]), known

    def _part(self, name: str, kind: Any, text: str, at: int) -> _Part:
        """The part that begins there. An object ends with its last brace, so none begins as another one does."""
        for part in self._seen[name]:
            if text.startswith(part.text, at):
                return part
        value, end = _JSON.raw_decode(text, at)
        part = _Part(text[at:end], decode(kind, value))
        if len(part.text) <= LONGEST:
            self._seen[name] = (part, *self._seen[name][: MOST - 1])
        return part
