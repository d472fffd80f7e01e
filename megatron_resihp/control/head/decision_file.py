# SPDX-License-Identifier: Apache-2.0
"""The log of decisions as a file in the run directory: RUN_DIR/decisions.jsonl, one entry a line.

Each line is with the system before anything of it is carried out, so that a killed coordinator has done nothing that
the file does not tell. May import: the standard library and this package's modules.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megatron_resihp.coding import WrongValueError, version_said
from megatron_resihp.control.coordination.decisions.entries import ENTRIES, Began, Entry, Step
from megatron_resihp.control.terminal import warn
from megatron_resihp.protocol.wire import COORDINATOR, MalformedError
from megatron_resihp.version import __version__

FILE_NAME: Final = "decisions.jsonl"
MODE: Final = 0o600
_BEGINS: Final = f'"kind": "{Began.__name__}"'
"""What a line with which a run begins has, among its first characters; likewise of other versions."""
_HEAD: Final = 80


class UnusableError(Exception):
    """There are no decisions to be read; the text is one line for people."""


class DecisionFile:
    """Appends to the file, which may hold earlier runs. One thread writes.

    Once a line can't be written the job goes on without: what comes after a gap would be of no use.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._file: int | None = None
        self._given_up = False

    def write(self, entry: Entry) -> None:
        """Append an entry."""
        if self._given_up:
            return
        line = f"{ENTRIES.write(entry, COORDINATOR)}\n".encode()
        try:
            if self._file is None:
                self._file = _opened(self._path)
                if os.fstat(self._file).st_size:  # an earlier run may have been killed in the middle of a line
                    line = b"\n" + line
            while line:
                line = line[os.write(self._file, line) :]
        except OSError as error:
            self._given_up = True
            warn(f"resihp: {self._path} can't be written ({error.strerror}); what is decided can't be replayed")

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _opened(path: Path) -> int:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)
    os.fchmod(file, MODE)
    return file


@dataclass(frozen=True)
class Decisions:
    """What a file holds of its last run.

    Attributes:
        problem: why steps are missing after these, in words; empty: none are.
    """

    began: Began
    steps: tuple[Step, ...]
    problem: str = ""


def read_decisions(run_dir: Path) -> Decisions:
    """The decisions of the last run in a directory, as far as they can be read.

    Raises:
        UnusableError: there are none, or they are of another version.
    """
    path = run_dir / FILE_NAME
    try:
        *lines, unfinished = path.read_text(errors="replace").split("\n")
    except OSError as error:
        raise UnusableError(f"{path} can't be read ({error.strerror}); give the run directory of a job") from error
    first = max((number for number, line in enumerate(lines) if _BEGINS in line[:_HEAD]), default=None)
    if first is None:
        raise UnusableError(f"{path} holds no decisions: its job has not begun")
    version = _version_in(lines[first])
    if version not in (None, __version__):
        raise UnusableError(f"{path} holds decisions of version {version}, this is {__version__}; replay them there")
    entries: list[Entry] = []
    problem = ""
    for number, line in enumerate(lines[first:], first + 1):
        try:
            entry = ENTRIES.read(line).body
        except MalformedError as error:
            problem = f"line {number} is damaged: {error}"
            break
        if isinstance(entry, Step) and entry.number != len(entries):
            problem = f"line {number} has step {entry.number}, and step {len(entries)} is missing"
            break
        entries.append(entry)
    if not entries or not isinstance(entries[0], Began):
        raise UnusableError(f"{path} holds no decisions: {problem}")
    if unfinished:
        problem = problem or "its last line is cut off"
    steps = tuple(entry for entry in entries if isinstance(entry, Step))
    return Decisions(entries[0], steps, problem and f"{path}: {problem}; what came before it is replayed")


def _version_in(line: str) -> Any:
    """Which version of this package a run was of; None: the line doesn't say it."""
    try:
        return version_said(json.loads(line)["body"])
    except (LookupError, TypeError, ValueError, WrongValueError):
        return None
