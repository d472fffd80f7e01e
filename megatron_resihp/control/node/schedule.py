# SPDX-License-Identifier: Apache-2.0
"""Calls to be made later. Pure; imports the standard library."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable


class Schedule:
    """Calls with their times, in seconds of any one clock."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, Callable[[], None]]] = []

    def add(self, at: float, call: Callable[[], None]) -> None:
        """Make a call at this time, besides the others."""
        insort(self._calls, (at, call), key=lambda each: each[0])

    def replace(self, *calls: tuple[float, Callable[[], None]]) -> None:
        """Make these calls, and none of the others."""
        self._calls = sorted(calls, key=lambda each: each[0])

    def run_due(self, now: float) -> None:
        """Make the calls whose time has come."""
        while self._calls and self._calls[0][0] <= now:
            self._calls.pop(0)[1]()
