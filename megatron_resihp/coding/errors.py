# SPDX-License-Identifier: Apache-2.0
"""What is raised for a value that is not what its type says. May import the standard library."""

from __future__ import annotations

import reprlib


class WrongValueError(Exception):
    """A value is not what its type says.

    Attributes:
        where: names and indices that lead to it, from the outside in.
        problem: what is wrong with it, to be read after its name.
    """

    def __init__(self, problem: str, *where: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.where = list(where)

    @property
    def path(self) -> str:
        """Where it is, with dots; empty: it is the whole."""
        return ".".join(self.where)

    def __str__(self) -> str:
        return f"{self.path!r} {self.problem}" if self.where else f"it {self.problem}"


class MissingFieldError(WrongValueError):
    """A field is not there."""

    def __init__(self, *where: str) -> None:
        super().__init__("is missing", *where)


def is_not(value: object, expected: object) -> WrongValueError:
    """The error that says what there is in place of what was expected."""
    return WrongValueError(f"is {shown(value)}, not {expected}")


def shown(value: object) -> str:
    """A value as errors show it: short, however large it is."""
    return _short.repr(value)


_short = reprlib.Repr(maxstring=60, maxother=60, maxlong=60, maxlevel=2)
