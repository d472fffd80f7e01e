# SPDX-License-Identifier: Apache-2.0
"""Blanks all device code but one architecture's in libnccl, so that it compresses to a fifth. Only for the check.

A fat binary holds an entry for each architecture, and the driver reads only the one that fits: the others may hold
anything. Imports the standard library only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MAGIC: Final = struct.pack("<I", 0xBA55ED50)
VERSION: Final = 1
HEADER_BYTES: Final = 16
CUBIN: Final = 2
ARCHITECTURE_AT: Final = 28


def prune(library: Path, target: Path, architecture: int) -> tuple[int, int]:
    """Write a copy of `library` that has code for one architecture, such as 90, only.

    Returns:
        the bytes kept and blanked.

    Raises:
        ValueError: the library has no code for it.
    """
    data = bytearray(library.read_bytes())
    kept = blanked = 0
    for entry, header, size in _entries(data):
        (kind,) = struct.unpack_from("<H", data, entry)
        (found,) = struct.unpack_from("<I", data, entry + ARCHITECTURE_AT)
        if kind == CUBIN and found == architecture:
            kept += size
        else:
            data[entry + header : entry + header + size] = bytes(size)
            blanked += size
    if not kept:
        raise ValueError(f"{library} has no code for sm_{architecture}")
    target.write_bytes(data)
    return kept, blanked


def _entries(data: bytearray) -> Iterator[tuple[int, int, int]]:
    """Where each entry begins, and how long its header and its content are."""
    at = 0
    while (at := data.find(MAGIC, at)) >= 0:
        version, header, size = struct.unpack_from("<HHQ", data, at + len(MAGIC))
        end = at + header + size
        if version != VERSION or header != HEADER_BYTES or end > len(data):
            at += len(MAGIC)
            continue
        entry = at + header
        while entry < end:
            entry_header, content = struct.unpack_from("<IQ", data, entry + 4)
            yield entry, entry_header, content
            entry += entry_header + content
        at = end
