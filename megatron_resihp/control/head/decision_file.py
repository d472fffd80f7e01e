# SPDX-License-Identifier: Apache-2.0
"""The log of decisions as a file in the run directory: RUN_DIR/decisions.jsonl, one entry a line.

Each line is with the system before anything of it is carried out, so that a killed coordinator has done nothing that
the file does not tell. May import: the standard library, `events` and this package's modules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Final

from megatron_resihp.control.coordination.decisions.reading import Decisions, Read, UnusableError, decisions_in
from megatron_resihp.control.terminal import warn
from megatron_resihp.events.own_file import in_place_of

FILE_NAME: Final = "decisions.jsonl"
MODE: Final = 0o600


class DecisionFile:
    """Appends to the file, which may hold earlier runs. One thread writes.

    Once a line can't be written the job goes on without: what comes after a gap would be of no use.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._file: int | None = None
        self._given_up = False

    def write(self, lines: Sequence[str]) -> None:
        """Append lines, as of `entries.line_of`."""
        self._try(partial(self._append, lines))

    def take_over(self, lines: Sequence[str]) -> None:
        """Go on with a run in a file of its own, in the place of this one, with what earlier runs have left there; see
        `events.own_file`.

        Args:
            lines: all of the run, as others know it. The file may have fewer.
        """
        self._try(partial(self._go_on, lines))

    def _append(self, lines: Sequence[str]) -> None:
        before = b""
        if self._file is None:
            self._file = _opened(self._path)
            if os.fstat(self._file).st_size:  # an earlier run may have been killed in the middle of a line
                before = b"\n"
        _write_all(self._file, before + _text(lines))

    def _go_on(self, lines: Sequence[str]) -> None:
        earlier = _before(self._path, _text(lines[:1]))

        def made(own: Path) -> int:
            file = _opened(own)
            _write_all(file, earlier + _text(lines))
            return file

        self._file = in_place_of(self._path, made)

    def _try(self, write: Callable[[], None]) -> None:
        if self._given_up:
            return
        try:
            write()
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


def _before(path: Path, first: bytes) -> bytes:
    """What a file has before a line, on lines of its own; all, if it doesn't have that one."""
    try:
        with path.open("rb") as file:
            before = b"".join(takewhile(lambda line: line != first, file))
    except FileNotFoundError:
        return b""
    return before if before.endswith(b"\n") or not before else before + b"\n"


def _text(lines: Sequence[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


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
    read = [Read(number, line) for number, line in enumerate(lines, 1)]
    return decisions_in(read, str(path), "line", bool(unfinished))
