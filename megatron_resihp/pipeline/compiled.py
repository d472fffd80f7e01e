"""Compilation of the loops over ops. Imports numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from numba import njit
from numba.core import event

COMPILING: Final = "compiling the planner, once for this installation; this takes up to a minute"
_COMPILE: Final = "numba:compile"


def compiled[**P, R](function: Callable[P, R], without_lock: bool = False) -> Callable[P, R]:
    """`function` as machine code, kept on disk for the next process wherever a directory can be written.

    Divided by zero, numbers are infinite as numpy's are: looking out for an error takes a fifth of the time.

    Args:
        without_lock: whether other threads may run Python, or this function, meanwhile. Each has random numbers of its
            own.
    """
    try:
        return njit(cache=True, nogil=without_lock, error_model="numpy")(function)
    except RuntimeError:
        # What numba raises if neither the package's directory nor the user's cache can be written.
        return njit(nogil=without_lock, error_model="numpy")(function)


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
        event.register(_COMPILE, self)
        return self

    def __exit__(self, *error: object) -> None:
        event.unregister(_COMPILE, self)

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
