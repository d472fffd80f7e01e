# SPDX-License-Identifier: Apache-2.0
"""A command line while rules change it, with notes on what they have changed. Imports the standard library only."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass
class Draft:
    """A recipe's flags by name.

    Attributes:
        options: values by flag, as the parser spells it first.
        workers: that the job is to have.
        kernels: what only GPUs compute in this way, and what does it instead.
        replaced: what else is not as in the recipe, besides sizes.
        lost: flags that mean nothing on CPUs: the recipe is not run.
    """

    options: dict[str, tuple[str, ...]]
    workers: int = 1
    kernels: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def has(self, flag: str) -> bool:
        return flag in self.options

    def text(self, flag: str, default: str = "") -> str:
        return " ".join(self.options[flag]) if flag in self.options else default

    def number(self, flag: str, default: int = 1) -> int:
        return int(self.options[flag][0]) if flag in self.options else default

    def real(self, flag: str, default: float = 0.0) -> float:
        return float(self.options[flag][0]) if flag in self.options else default

    def set(self, flag: str, *values: object) -> None:
        self.options[flag] = tuple(map(str, values))

    def change(self, flag: str, *values: object) -> None:
        """Set a flag that the recipe has."""
        if flag in self.options:
            self.set(flag, *values)

    def drop(self, *flags: str) -> list[str]:
        """Leave flags out; returns those that were there."""
        found = [flag for flag in flags if flag in self.options]
        for flag in found:
            del self.options[flag]
        return found

    def beginning(self, *prefixes: str) -> list[str]:
        return [flag for flag in self.options if flag.startswith(prefixes)]

    def words(self) -> tuple[str, ...]:
        return tuple(word for flag, values in self.options.items() for word in (flag, *values))


def read_options(words: Iterable[str], names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The values of each flag; as in argparse, the last of several counts.

    Args:
        names: a flag's name by each of its spellings.
    """
    options: dict[str, tuple[str, ...]] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            spelled, *value = word.split("=", 1)
            flag = names.get(spelled, spelled)
            options[flag] = tuple(value)
        elif flag:
            options[flag] = (*options[flag], word)
    return options


def nearest(value: float, multiple: int) -> int:
    """The positive multiple that is nearest."""
    return max(1, round(value / multiple)) * multiple
