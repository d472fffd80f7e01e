# SPDX-License-Identifier: Apache-2.0
"""Standard output and error of a process that must outlive them: a disk may be full, and a reader gone.

May import: the standard library.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Collection
from contextlib import suppress
from typing import Final, TextIO

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
ANY: Final = frozenset(errno.errorcode)


def let_no_full_disk_end_this() -> None:
    """For a worker, whose output is a file: what can't be written for want of room is lost from now on, and raises
    nothing."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    sys.stdout, sys.stderr = lenient(1, sys.stdout), lenient(2, sys.stderr)


def let_no_output_end_this() -> None:
    """For a launcher: whatever can't be written is lost from now on, and raises nothing."""
    sys.stdout, sys.stderr = unfailing(sys.stdout), unfailing(sys.stderr)


def lenient(file: int, like: TextIO) -> TextIO:
    """A stream to `file` that writes as `like` does, at once."""
    return io.TextIOWrapper(
        _Lenient(file, NO_ROOM), like.encoding, like.errors, line_buffering=True, write_through=True
    )


def unfailing(like: TextIO | None) -> TextIO:
    """A stream to the same file, of whole lines, that loses what it can't write. Characters that its encoding lacks
    become escapes. A stream to no file stays as it is. `like`: None where the process was started without it."""
    if like is None:
        return open(os.devnull, "w")
    try:
        file = like.fileno()
    except OSError:
        return like
    with suppress(OSError):
        like.flush()
    # Threads share it: a line that is written at once is not broken by that of another.
    return io.TextIOWrapper(_Lenient(file, ANY), like.encoding, "backslashreplace", line_buffering=True)


class _Lenient(io.BufferedWriter):
    """Not buffered: a text stream wants an object of this class. `lost`: errors at which what is written is lost."""

    def __init__(self, file: int, lost: Collection[int]) -> None:
        super().__init__(io.FileIO(file, "wb", closefd=False))
        self._lost = lost

    def write(self, data: object) -> int:
        left = memoryview(data).cast("B")  # type: ignore[arg-type]
        size = len(left)
        try:
            while left:
                # None: a reader that is late has made the file one at which nobody waits.
                written = self.raw.write(left)
                left = left[size if written is None else written :]
        except OSError as error:
            if error.errno not in self._lost:
                raise
        return size
