# SPDX-License-Identifier: Apache-2.0
"""A host and a port, as people and environment variables write them.

May import: the standard library.
"""

from __future__ import annotations

from typing import NamedTuple


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read host:port or [IPv6 host]:port; ValueError says what is wrong with it."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r} is ambiguous: write an IPv6 host in brackets")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{text!r} is not host:port")
    return Address(host, int(port))
