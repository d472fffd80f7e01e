# SPDX-License-Identifier: Apache-2.0
"""The key-value store that all processes of a job share: what it promises. May import: the standard library."""

from __future__ import annotations

from typing import Protocol, Self


class Store(Protocol):
    """Strings under keys, counters and queues, shared by every process of the job.

    One object is one connection, and a blocking call holds it: every thread has its own, from `clone`. When a call that
    writes has returned, every other connection sees what it wrote; but a worker's may be told what was there before if
    another of its node's asked for the same key earlier. Whatever fails for want of the store raises StoreError; what
    merely takes too long is told by TimeoutError, False or an empty list.
    """

    def set(self, key: str, value: str) -> None:
        """Store the value, whatever was there."""

    def get(self, key: str, timeout_s: float) -> str:
        """Wait for the key and return its value; TimeoutError when it does not come in time."""
        ...

    def wait(self, key: str, timeout_s: float) -> bool:
        """Wait until the key exists; False when it does not come in time."""
        ...

    def check(self, key: str) -> bool:
        """Whether the key exists now."""
        ...

    def compare_set(self, key: str, expected: str, desired: str) -> str | None:
        """Replace exactly `expected` ("" stands for no value yet) by `desired`; returns what is stored afterwards."""

    def set_once(self, key: str, value: str) -> str:
        """Store a non-empty value unless one is there: the first writer wins. Returns what is stored."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return its new value."""
        ...

    def push(self, queue: str, value: str) -> None:
        """Append to a queue."""

    def take(self, queue: str, timeout_s: float) -> list[str]:
        """Take values off a queue, the oldest first, each for one taker only: some of those that are there, or the
        first that comes; empty when none comes in time."""
        ...

    def delete(self, key: str) -> bool:
        """Remove a key, and say whether it was there."""
        ...

    def delete_all(self, beginning: str) -> None:
        """Remove the keys that begin so; queues stay."""

    def clone(self) -> Self:
        """Open another connection to the same store."""
        ...

    def close(self) -> None:
        """Let go of the connection; its server ends it for all."""
