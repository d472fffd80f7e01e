# SPDX-License-Identifier: Apache-2.0
"""A run directory is one job's at a time: node 0's launcher claims it with a file that names it.

There is no lock between hosts, and a job that was killed leaves its file behind. So a file is believed as long as the
process that it names lives, where that can be seen from here; otherwise if the job's store answers, or if the file is
still being touched. May import: the standard library and `coding`.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from megatron_resihp.coding import FILE, WrongValueError, decode

TOUCH_S: Final = 5.0
"""How often a claim is touched."""
FRESH_S: Final = 30.0
"""How long a file that is not touched any more may be of a job that lives, or is just starting."""
LOOK_S: Final = 0.2


class ClaimedError(Exception):
    """Another job has the run directory; the message names it."""


@dataclass(frozen=True)
class Owner:
    """A process, as others can tell it.

    Attributes:
        machine: what only processes that see the same process ids have in common; None: not known.
        started: when the process was started, in the kernel's ticks; None: not known.
    """

    host: str
    pid: int
    machine: str | None = None
    started: int | None = None

    @classmethod
    def this(cls) -> Self:
        """This process."""
        return cls(socket.gethostname(), os.getpid(), _machine(), _started(os.getpid()))

    @classmethod
    def of(cls, data: object) -> Self | None:
        """The owner that a file names; None: it names none."""
        try:
            owner: Self = decode(cls, data, FILE)
        except WrongValueError:
            return None
        return owner

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def here(self) -> bool:
        """Whether it is seen from here whether it lives."""
        return self.host == socket.gethostname() and self.machine in (None, _machine())

    def lives(self) -> bool:
        """Whether it does; only where it is `here`. Another process may have its number by now."""
        started = _started(self.pid)
        return started is not None and self.started in (None, started)


class Hold:
    """Whether a run directory is this process's, which it then clears of the job's own files in the end.

    Args:
        is_ours: whether nobody has taken it over.

    Attributes:
        is_followed: whether another process has, that goes on with the job.
    """

    def __init__(self, is_ours: Callable[[], bool], is_followed: Callable[[], bool] = lambda: False) -> None:
        self._is_ours = is_ours
        self.is_followed = is_followed
        self._left = False

    def __call__(self) -> bool:
        return not self._left and self._is_ours()

    def leave(self) -> None:
        """Leave all as it is, for another process that goes on with the job."""
        self._left = True


def living_owner(path: Path) -> Owner | None:
    """The process that has this file, if it can be seen from here that the process lives."""
    try:
        owner = Owner.of(json.loads(path.read_text()))
    except (OSError, ValueError):
        return None
    return owner if owner is not None and owner.here and owner.lives() else None


def _machine() -> str:
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"


def _started(pid: int) -> int | None:
    """None: there is no such process, or it is dead and its parent has not looked."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


@contextmanager
def claimed(
    path: Path, text: str, answers: Callable[[], bool], holds: Callable[[], bool] = lambda: True
) -> Iterator[None]:  # fmt: skip
    """Have the file `path`, with this text, for as long as this lasts.

    Args:
        answers: asks whether the job that the file of another machine names answers.
        holds: whether the file goes in the end.

    Raises:
        ClaimedError: a job that lives has it.
        OSError: it can't be written.
    """
    _take(path, text, answers)
    try:
        yield
    finally:
        # A job that believed this one to be dead may have it by now.
        if holds() and _text(path) == text:
            path.unlink(missing_ok=True)


@contextmanager
def taken_over(path: Path, text: str, holds: Callable[[], bool]) -> Iterator[Callable[[], None]]:
    """As `claimed`, in the place of a job's own process, from when what it gives is called: once it is known that the
    other one leads no more. That raises OSError if the file can't be written."""

    def take() -> None:
        unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        unfinished.write_text(text)
        unfinished.replace(path)

    try:
        yield take
    finally:
        if holds() and _text(path) == text:
            path.unlink(missing_ok=True)


@contextmanager
def touched(path: Path) -> Iterator[None]:
    """Tell other machines that the owner of this file lives, in a thread, for as long as this lasts."""
    over = threading.Event()

    def touch() -> None:
        while not over.wait(TOUCH_S):
            try:
                os.utime(path)
            except OSError:
                pass  # a file system that is full or away comes back

    thread = threading.Thread(target=touch, name="resihp-claim", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _take(path: Path, text: str, answers: Callable[[], bool]) -> None:
    while True:
        try:
            # Of those that come at the same moment only one creates it.
            with path.open("x") as file:
                file.write(text)
            return
        except FileExistsError:
            pass
        left = _text(path)
        if left is not None:
            holder = _holder(path, left, answers)
            if holder is not None:
                raise ClaimedError(holder)
            if _text(path) == left:
                _remove(path, left)


def _holder(path: Path, left: str, answers: Callable[[], bool]) -> str | None:
    """The owner of a file with this text; None: there is none any more."""
    try:
        data = json.loads(left)
    except ValueError:
        data = None  # it is being written
    owner = Owner.of(data)
    who = str(owner) if owner is not None else f"a job whose file {path} names nobody"
    if owner is not None and owner.here:
        return who if owner.lives() else None
    if data and answers():
        return who
    touched_at = modified(path)
    announced = False
    while (silent_s := age(path)) is not None and silent_s < FRESH_S:
        is_touched = modified(path) != touched_at
        if _text(path) != left:
            return None  # It is another job's, or one has just written it: a second look will tell.
        if is_touched:
            return who
        if not announced:
            said = f"{path.parent} belonged to {who} {silent_s:.0f} s ago; waiting to see whether it still does"
            print(f"resihp: {said}", flush=True)
            announced = True
        time.sleep(LOOK_S)
    return None


def _remove(path: Path, left: str) -> None:
    """Remove a dead job's file, if it is still that."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    if aside.read_text() != left and not path.exists():
        # Another launch was faster; this is its own.
        aside.rename(path)
    aside.unlink(missing_ok=True)


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


def modified(path: Path) -> float | None:
    """When it was touched last, by the file system's clock; opened, because NFS looks again only then."""
    try:
        with path.open() as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None


def age(path: Path) -> float | None:
    """Seconds since it was touched, by the file system's clock; None: it is gone."""
    touched_at = modified(path)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as file:
        file.write(b" ")
        file.flush()
        now = os.fstat(file.fileno()).st_mtime
    return None if touched_at is None else now - touched_at
