"""Compilation of the loops over ops. Imports numba."""

from collections.abc import Callable

from numba import njit


def compiled[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """`function` as machine code, kept on disk for the next process wherever a directory can be written."""
    try:
        return njit(cache=True)(function)
    except RuntimeError:
        # What numba raises if neither the package's directory nor the user's cache can be written.
        return njit(function)
