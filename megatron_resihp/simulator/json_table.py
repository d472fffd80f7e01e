# SPDX-License-Identifier: Apache-2.0
"""JSON objects whose keys are checked when they are read. Imports `config`."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from megatron_resihp.config import suggestion

_INFINITE: Final = float("inf")


class TableError(ValueError):
    """A value of the wrong kind, or an unknown key; the message is one line and names the place."""


class Table:
    """A JSON object whose keys are taken one by one; keys that remain are unknown."""

    def __init__(self, data: Any, place: str) -> None:
        if not isinstance(data, Mapping):
            raise TableError(f"{place} must be a JSON object, got {data!r}"[:200])
        self.data, self.place = data, place
        self._taken: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        self._taken.add(name)
        return self.data.get(name, default)

    def nothing_else(self) -> None:
        unknown = sorted(set(self.data) - self._taken)
        if unknown:
            mend = f"{suggestion(unknown[0], self._taken)}known are {', '.join(sorted(self._taken))}"
            raise TableError(f"{self.place}: {unknown[0]!r} is not known; {mend}")

    def number(
        self,
        name: str,
        default: float | None,
        least: float = -_INFINITE,
        above: float = -_INFINITE,
        most: float = sys.float_info.max,
    ) -> float:
        """A number; infinity, which Python reads from JSON, is allowed only if `most` is infinite."""
        value = self.take(name, default)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not (least <= value <= most and value > above):
            bounds = [f" above {above:g}"] * (above > -_INFINITE) + [f" of at least {least:g}"] * (least > -_INFINITE)
            bounds += [" and finite" if bounds else " that is finite"] * (most < _INFINITE)
            raise TableError(f"{self.place}: {name} must be a number{''.join(bounds)}, got {value!r}"[:200])
        return float(value)

    def whole(self, name: str, default: int) -> int:
        value = self.take(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise TableError(f"{self.place}: {name} must be a whole number of at least 1, got {value!r}")
        return value

    def text(self, name: str, default: str) -> str:
        value = self.take(name, default)
        if not isinstance(value, str):
            raise TableError(f"{self.place}: {name} must be a text, got {value!r}")
        return value

    def flag(self, name: str) -> bool:
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise TableError(f"{self.place}: {name} must be true or false, got {value!r}")
        return value

    def list(self, name: str) -> Sequence[Any]:
        value = self.take(name, [])
        if not isinstance(value, list):
            raise TableError(f"{self.place}: {name} must be a list, got {value!r}")
        return value

    def table(self, name: str, default: Any = None) -> "Table":
        place = name if self.place == "the scenario" else f"{self.place}.{name}"
        return Table(self.take(name, default), place)
