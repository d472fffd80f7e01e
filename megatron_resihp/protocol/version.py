# SPDX-License-Identifier: Apache-2.0
"""The version of the protocol, which each text says. Imports the standard library only."""

from __future__ import annotations

import re
from typing import Final

MAJOR: Final = 5
"""Another one means other things by the same fields, or has other kinds of texts: it is refused."""
MINOR: Final = 3
"""Goes up with every new field, which needs a default."""
VERSION: Final = f"{MAJOR}.{MINOR}"


def minor_of(version: str) -> int:
    """The minor version of a writer.

    Raises:
        ValueError: it can't be read; the message goes on after the version's name.
    """
    found = re.fullmatch(r"(\d{1,9})\.(\d{1,9})", version, re.ASCII)
    if found is None:
        raise ValueError("is not a version")
    if int(found[1]) != MAJOR:
        raise ValueError(f"is {version}, this process knows {VERSION}: give all nodes the same installation")
    return int(found[2])
