# SPDX-License-Identifier: Apache-2.0
"""Files that a coordinator takes over from another one. May import: the standard library."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path


def in_place_of[File](path: Path, make: Callable[[Path], File]) -> File:
    """Put a file of this process's own in the place of one.

    Another process that has written that one may not know yet that it must not, or be on another machine. It writes on
    where nobody reads.

    Args:
        make: makes and opens the new one, at the path that it is given.

    Raises:
        OSError: that can't be, and the file is as it was.
    """
    own = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        file = make(own)
        own.replace(path)
    except OSError:
        own.unlink(missing_ok=True)
        raise
    return file
