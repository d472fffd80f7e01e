# SPDX-License-Identifier: Apache-2.0
"""Reads a log of decisions, wherever it was kept: the last run in it, as far as it is whole.

Pure; may import `coding`, `protocol` and this package's modules.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from megatron_resihp.coding import WrongValueError, version_said
from megatron_resihp.control.coordination.decisions.entries import (
    ENTRIES,
    Began,
    Entry,
    Snapshot,
    Start,
    Step,
    began_of,
)
from megatron_resihp.protocol.wire import MalformedError
from megatron_resihp.version import __version__

_STARTS: Final = tuple(f'"kind": "{kind.__name__}"' for kind in (Began, Snapshot))
"""What an entry with which a log starts has, among its first characters; likewise of other versions."""
_HEAD: Final = 80


class UnusableError(Exception):
    """There are no decisions to be read; the text is one line for people."""


class NotBegunError(UnusableError):
    """No job has begun there."""


class Read(NamedTuple):
    """A line of the log, as its place holds it.

    Attributes:
        number: of what holds it there.
        text: what it says.
        damage: why that can't be read, in words.
    """

    number: int
    text: str
    damage: str = ""


@dataclass(frozen=True)
class Decisions:
    """What is known of the last run.

    Attributes:
        start: how the run began, or the last snapshot.
        steps: what has come since.
        problem: why steps are missing after these, in words; empty: none are.
        last: number of the last entry where they were read.
        characters: of the steps, where they were read.
    """

    start: Start
    steps: tuple[Step, ...]
    problem: str = ""
    last: int = field(default=0, compare=False)
    characters: int = field(default=0, compare=False)

    @property
    def began(self) -> Began:
        return began_of(self.start)


def decisions_in(read: Sequence[Read], place: str, unit: str, cut_off: bool = False) -> Decisions:
    """The decisions of the last run, as far as they can be read.

    Args:
        read: all that the place holds, in its order.
        unit: what the place calls an entry.
        cut_off: more was to come.

    Raises:
        UnusableError: there are none, or they are of another version.
    """
    first = max((index for index, each in enumerate(read) if _is_start(each.text)), default=None)
    if first is None:
        raise NotBegunError(f"{place} holds no decisions: its job has not begun")
    version = _version_in(read[first].text)
    if version not in (None, __version__):
        raise UnusableError(f"{place} holds decisions of version {version}, this is {__version__}; replay them there")
    entries, problem = _entries_of(read[first:], unit)
    if not entries or not isinstance(entries[0], Start):
        raise UnusableError(f"{place} holds no decisions: {problem}")
    if cut_off:
        problem = problem or f"its last {unit} is cut off"
    steps = tuple(entry for entry in entries if isinstance(entry, Step))
    told = problem and f"{place}: {problem}; what came before it is replayed"
    return Decisions(entries[0], steps, told, read[-1].number, sum(len(each.text) for each in read[first + 1 :]))


def _entries_of(read: Sequence[Read], unit: str) -> tuple[list[Entry], str]:
    """The entries of one run, and why those that come after them are missing; empty: none are."""
    entries: list[Entry] = []
    before = 0
    for number, text, damage in read:
        if damage:
            return entries, f"{unit} {number} is damaged: {damage}"
        try:
            entry = ENTRIES.read(text).body
        except MalformedError as error:
            return entries, f"{unit} {number} is damaged: {error}"
        if isinstance(entry, Step) and entry.number != before + len(entries):
            return entries, f"{unit} {number} has step {entry.number}, and step {before + len(entries)} is missing"
        if isinstance(entry, Snapshot):
            before = entry.number
        entries.append(entry)
    return entries, ""


def _is_start(line: str) -> bool:
    return any(kind in line[:_HEAD] for kind in _STARTS)


def _version_in(line: str) -> Any:
    """Which version of this package a run was of; None: the line doesn't say it."""
    try:
        body = json.loads(line)["body"]
        return version_said(body.get("began", body))
    except (AttributeError, LookupError, TypeError, ValueError, WrongValueError):
        return None
