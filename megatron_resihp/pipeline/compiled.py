# SPDX-License-Identifier: Apache-2.0
"""Compilation of the loops over ops. Imports numba."""

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
    """`function` as machine code, kept on disk for the next process wherever a directory can be written.

    Divided by zero, numbers are infinite as numpy's are: looking out for an error takes a fifth of the time.

    Args:
        without_lock: whether other threads may run Python, or this function, meanwhile. Each has random numbers of its
            own.
    """
    with _kept_outside_the_package():
        try:
            return njit(cache=True, nogil=without_lock, error_model="numpy")(function)
        except RuntimeError:
            # What numba raises if no directory can be written.
            return njit(nogil=without_lock, error_model="numpy")(function)


@contextmanager
def _kept_outside_the_package() -> Iterator[None]:
    """Beside the sources, as numba has it, it would outlive the package's uninstallation and stay importable."""
    settings: Any = config  # which makes its names when it is imported
    chosen = settings.CACHE_DIR
    settings.CACHE_DIR = chosen or str(_cache_directory())
    try:
        yield
    finally:
        settings.CACHE_DIR = chosen


@cache
def _cache_directory() -> Path:
    """The environment's own, which all its users share and which goes with it; or else the user's."""
    shared = Path(sys.prefix, "var", "cache", _CACHE_NAME)
    with suppress(OSError):
        shared.mkdir(parents=True, exist_ok=True)
        if os.access(shared, os.W_OK):
            return shared
    users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(users, _CACHE_NAME)


class PlanningClock(event.Listener):
    """Within its context, a clock that stands still while machine code is made: that is done once and is no planning.

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
        """Seconds that were not spent compiling."""
        return self._clock() - self._compiling_s

    def __enter__(self) -> PlanningClock:
        event.register(_COMPILE, self)  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        event.unregister(_COMPILE, self)  # type: ignore[no-untyped-call]

    # Functions that others call are compiled within those. One thread compiles at a time.

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
