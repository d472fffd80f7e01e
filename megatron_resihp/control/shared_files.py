# SPDX-License-Identifier: Apache-2.0
"""Files that processes of other hosts write while this one reads, on a file system that may show late what is there.

NFS may show a directory as it was a minute ago until this host changes it, and a file that another host has replaced
meanwhile can't be read any more. So whoever looks here looks again, and concludes nothing from what is not there yet.
`read` and `names` are where tests delay what is seen. May import: the standard library.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Final

REPLACED: Final = (errno.ENOENT, errno.ESTALE)


def _names(directory: Path, pattern: str) -> list[Path]:
    return list(directory.glob(pattern))


read: Callable[[Path], str] = Path.read_text
names: Callable[[Path, str], list[Path]] = _names


def text_of(path: Path) -> str | None:
    """What is in a file; None: it is not there, not yet, or is being replaced.

    Raises:
        OSError: it can't be read.
    """
    try:
        return read(path)
    except OSError as error:
        if error.errno in REPLACED:
            return None
        raise


def texts_in(directory: Path, pattern: str) -> dict[Path, str]:
    """The files that are seen there, as far as they can be read now."""
    found = {path: text_of(path) for path in sorted(names(directory, pattern))}
    return {path: text for path, text in found.items() if text is not None}
