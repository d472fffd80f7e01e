# SPDX-License-Identifier: Apache-2.0
"""A worker's standard output and error, which go to a file: that its disk is full is no reason to end a job.

May import: the standard library.
"""

from __future__ import annotations

import errno
import io
import sys
from typing import Final, TextIO

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def let_no_full_disk_end_this() -> None:
    """What can't be written to standard output and error for want of room is lost from now on, and raises nothing."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    sys.stdout, sys.stderr = lenient(1, sys.stdout), lenient(2, sys.stderr)


def lenient(file: int, like: TextIO) -> TextIO:
    """A stream to `file` that writes as `like` does, at once."""
    return io.TextIOWrapper(_Lenient(file), like.encoding, like.errors, line_buffering=True, write_through=True)


class _Lenient(io.BufferedWriter):
    """Not buffered: a text stream wants an object of this class."""

    def __init__(self, file: int) -> None:
        super().__init__(io.FileIO(file, "wb", closefd=False))

    def write(self, data: object) -> int:
        left = memoryview(data).cast("B")  # type: ignore[arg-type]
        size = len(left)
        try:
            while left:
                left = left[self.raw.write(left) or 0 :]
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        return size
