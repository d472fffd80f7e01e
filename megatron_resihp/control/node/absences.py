# SPDX-License-Identifier: Apache-2.0
"""When a worker's process did not run, because it had been stopped: its agent, which is its parent, is told by the
kernel, and notes it on a page of memory that both have.

A process does not notice itself that it was stopped; to it, what it did or waited for has taken longer. Moments are
seconds of the monotonic clock, which all processes of a machine share. May import: the standard library.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from typing import Final

NOTED: Final = struct.Struct("Q")
"""How many absences have been noted, in all."""
ABSENCE: Final = struct.Struct("dd")
KEPT: Final = 256
"""The newest."""
SIZE: Final = NOTED.size + KEPT * ABSENCE.size

Absence = tuple[float, float]
"""From when to when."""


class Page:
    """The agent's end. `fd` is the worker's; it is to be closed here once the worker has it."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("resihp-absences")
        os.ftruncate(self.fd, SIZE)
        self._memory = mmap.mmap(self.fd, SIZE)
        self._noted = 0

    def note(self, absence: Absence) -> None:
        ABSENCE.pack_into(self._memory, NOTED.size + self._noted % KEPT * ABSENCE.size, *absence)
        self._noted += 1
        # Last: what is counted can be read.
        NOTED.pack_into(self._memory, 0, self._noted)

    def close(self) -> None:
        """Once the worker has ended."""
        self._memory.close()


class Watch:
    """Looks for stops of one child, whose end other code waits for."""

    def __init__(self, pid: int, page: Page) -> None:
        self._pid = pid
        self._page = page
        self._stopped_at: float | None = None

    def look(self, now: float) -> None:
        """Note what has happened since the last time; to be called at each SIGCHLD."""
        while (found := self._change()) is not None:
            if found == os.CLD_STOPPED:
                self._stopped_at = now
            elif self._stopped_at is not None:
                self._page.note((self._stopped_at, now))
                self._stopped_at = None

    def close(self) -> None:
        """Once the child has ended: nothing is noted any more."""
        self._page.close()

    def _change(self) -> int | None:
        try:
            result = os.waitid(os.P_PID, self._pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        except ChildProcessError:
            return None
        return None if result is None else result.si_code


class Seen:
    """The worker's end: what has been noted of this process."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)
        os.close(fd)

    def between(self, start: float, end: float) -> list[Absence]:
        """Absences that overlap this time, as far as they lie in it; only the newest are known."""
        (noted,) = NOTED.unpack_from(self._memory, 0)
        kept = memoryview(self._memory)[NOTED.size : NOTED.size + min(noted, KEPT) * ABSENCE.size]
        return overlapping(ABSENCE.iter_unpack(kept), start, end)


def overlapping(absences: Iterable[Absence], start: float, end: float) -> list[Absence]:
    """The parts of these that lie between two moments, in order."""
    return sorted((max(a, start), min(b, end)) for a, b in absences if a < end and b > start)
