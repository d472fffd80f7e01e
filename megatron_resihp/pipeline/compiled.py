# SPDX-License-Identifier: Apache-2.0
"""Compiles the loops over ops. Imports numba."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

from numba import config, njit
from numba.core import event

COMPILING: Final = "compiling the planner, once for this installation; this takes up to a minute"
_COMPILE: Final = "numba:compile"
_CACHE_NAME: Final = "megatron-resihp"


def compiled[**P, R](function: Callable[P, R], without_lock: bool = False) -> Callable[P, R]:
    """`function` as machine code, kept on disk for later processes if a directory is writable.

    Division by zero gives infinity, as in numpy; a check for errors would take a fifth of the time.

    Args:
        without_lock: whether other threads may run Python, or this function, at the same time. Each has its own random
            numbers.
    """
    with _kept_outside_the_package():
        try:
            return njit(cache=True, nogil=without_lock, error_model="numpy")(function)
        except RuntimeError:
            # Numba raises this if no directory is writable.
            return njit(nogil=without_lock, error_model="numpy")(function)


@contextmanager
def _kept_outside_the_package() -> Iterator[None]:
    """Set numba's cache directory; beside the sources, the cache would survive the package's uninstallation."""
    settings: Any = config  # which makes its names when it is imported
    chosen = settings.CACHE_DIR
    settings.CACHE_DIR = chosen or str(_cache_directory())
    try:
        yield
    finally:
        settings.CACHE_DIR = chosen


@cache
def _cache_directory() -> Path:
    """The environment's own directory, which its users share and which is removed with it; otherwise the user's."""
    shared = Path(sys.prefix, "var", "cache", _CACHE_NAME)
    with suppress(OSError):
        shared.mkdir(parents=True, exist_ok=True)
        if os.access(shared, os.W_OK):
            return shared
    users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(users, _CACHE_NAME)


class PlanningClock(event.Listener):
    """A clock that, within its context, stands still while machine code is made, as that is no planning.

    Args:
        clock: seconds.
        on_compiling: called when the first function is compiled.
    """

    def __init__(self, clock: Callable[[], float], on_compiling: Callable[[], None] = lambda: None) -> None:
        self._clock = clock
        self._on_compiling = on_compiling
        self._began_at = 0.0
        self._depth = 0
        self._compiling_s = 0.0

    def __call__(self) -> float:
        """Seconds without the time spent compiling."""
        return self._clock() - self._compiling_s

    def __enter__(self) -> PlanningClock:
        event.register(_COMPILE, self)  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        event.unregister(_COMPILE, self)  # type: ignore[no-untyped-call]

    # Functions that others call are compiled within the compilation of those. One thread compiles at a time.

    def on_start(self, event: Any) -> None:
        if self._compiling_s == self._depth == 0:
            self._on_compiling()
        if self._depth == 0:
            self._began_at = self._clock()
        self._depth += 1

    def on_end(self, event: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._compiling_s += self._clock() - self._began_at
