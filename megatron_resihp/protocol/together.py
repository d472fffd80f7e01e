# SPDX-License-Identifier: Apache-2.0
"""Reports of a node's survivors, which their agent tells together: what they say alike is said once.

So a death costs the coordinator messages by the number of nodes, not of workers. May import `coding` and this package's
other modules.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import batched, count
from typing import Final

from megatron_resihp.coding import encode
from megatron_resihp.protocol.messages import MESSAGES, NodeReport, Survivor, SurvivorReport
from megatron_resihp.protocol.version import VERSION
from megatron_resihp.protocol.wire import Letter, MalformedError

LONGEST: Final = 1 << 16
"""Bytes of a text that is told with others."""
MOST: Final = 64
"""How many are told as one. So that one has fewer bytes than the store takes."""
SENDER: Final = "their agent"
_BEGINNING: Final = f'{{"protocol": "{VERSION}", "kind": "{SurvivorReport.__name__}", '.encode()

Told = tuple[tuple[int, ...], bytes]
"""Which texts, by their places, and the text that says all of them."""


def may_be_together(text: bytes) -> bool:
    """Whether this is a report, as this version writes it."""
    return text.startswith(_BEGINNING) and len(text) <= LONGEST


class Together:
    """Joins reports.

    Args:
        letterhead: no other sender's ids begin so.
    """

    def __init__(self, letterhead: str) -> None:
        self._letterhead = letterhead
        self._numbers = count(1)

    def told(self, texts: Sequence[bytes]) -> list[Told]:
        """What to send in place of these texts. Those that can't be joined stay as they are.

        Args:
            texts: as of `may_be_together`, in the order in which workers of one node have sent them.
        """
        try:
            return self._told(texts)
        except RecursionError:  # no worker of ours says what is so deep
            return [((place,), text) for place, text in enumerate(texts)]

    def _told(self, texts: Sequence[bytes]) -> list[Told]:
        letters = [_letter_in(text) for text in texts]
        records = {id(letter.body.record): letter.body.record for letter in letters if letter is not None}
        # By their texts, as numbers that are equal may be written otherwise. Most are one instance, as they are read.
        said = {key: json.dumps(encode(record)) for key, record in records.items()}
        alike: dict[tuple[object, ...], list[int]] = {}
        for place, letter in enumerate(letters):
            key = (place,) if letter is None else (letter.body.epoch, said[id(letter.body.record)])
            alike.setdefault(key, []).append(place)
        return [
            (some, self._joined([letters[place] for place in some]) if len(some) > 1 else texts[some[0]])
            for places in alike.values()
            for some in batched(places, MOST)
        ]

    def _joined(self, letters: Sequence[Letter[SurvivorReport] | None]) -> bytes:
        there = [letter for letter in letters if letter is not None]
        first = there[0].body
        report = NodeReport(first.epoch, first.record, tuple(map(_survivor, there)))
        return MESSAGES.write(report, SENDER, f"{self._letterhead}.{next(self._numbers)}").encode()


def _letter_in(text: bytes) -> Letter[SurvivorReport] | None:
    """The report in a text; None: there is none, or nothing by which it is known if it comes again."""
    try:
        letter = MESSAGES.read(text.decode())
    except (MalformedError, UnicodeDecodeError):
        return None
    match letter:
        case Letter(sender, SurvivorReport() as report, str(id)) if id:
            return Letter(sender, report, id)
    return None


def _survivor(letter: Letter[SurvivorReport]) -> Survivor:
    report = letter.body
    assert letter.id is not None
    return Survivor(report.worker, letter.id, report.held, report.times, report.unreachable)
