# SPDX-License-Identifier: Apache-2.0
"""Rules about values that a type alone does not hold, written beside the type: `Annotated[int, Between(0)]`.

Imports the standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Between:
    """A number from `least` to `most`, both included; None: unbounded on that side. Never NaN."""

    least: float | None = None
    most: float | None = None

    def holds(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        if self.least is None:
            return f"at most {self.most}"
        return f"at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"


@dataclass(frozen=True)
class Matches:
    """Text that a regular expression matches as a whole; `what` says in words what that is."""

    pattern: str
    what: str

    def holds(self, value: str) -> bool:
        return re.fullmatch(self.pattern, value, re.ASCII) is not None

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class Holds:
    """A value of which a predicate is true; `what` says in words what that is."""

    predicate: Callable[[Any], bool]
    what: str

    def holds(self, value: Any) -> bool:
        return self.predicate(value)

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class Repeated:
    """No rule, but a hint: many texts have the same value here, so a reader of texts may know it already
    (`decoding.Tolerance.known`)."""


Rule = Between | Matches | Holds
