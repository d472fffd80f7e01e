"""Compilation of the loops over ops. Imports numba."""

from collections.abc import Callable

from numba import njit


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
