# SPDX-License-Identifier: Apache-2.0
"""Messages in a stream that nobody else can reach: each with its length before it. May import: the standard library."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

LENGTH: Final = struct.Struct(">I")


def framed(message: bytes) -> bytes:
    """A message as it is sent."""
    return LENGTH.pack(len(message)) + message


class Frames:
    """Cuts a stream into messages.

    Args:
        largest: bytes of a message. A longer one is none: its sender has gone mad.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._unread = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Whole messages so far; ValueError for what cannot be one."""
        self._unread += data
        while len(self._unread) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._unread)
            if length > self._largest:
                raise ValueError(f"a message of {length} bytes")
            end = LENGTH.size + length
            if len(self._unread) < end:
                return
            message = bytes(self._unread[LENGTH.size : end])
            del self._unread[:end]
            yield message
