# SPDX-License-Identifier: Apache-2.0
"""Whether two runs have logged the same. Pure; imports the standard library only."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

Logged = Mapping[tuple[str, int], frozenset[float]]
"""What was logged under a tag at a step, by all workers and in all attempts."""

OF_THE_MACHINE: Final = ("mem-", "world-size", "throughput", "iter-energy", "power")
TIMES: Final = ("-time", "-time vs samples")
SKIPPED: Final = "skipped"


def read_logged(directory: Path) -> Logged:
    """What the workers of a run have logged, without times and memory, which no two runs have in common."""
    found: dict[tuple[str, int], set[float]] = {}
    for file in sorted(directory.glob("*.jsonl")):
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # the last line of one that was killed may be cut off
                tag, step, value = json.loads(line)
                if value is not None and not tag.startswith(OF_THE_MACHINE) and not tag.endswith(TIMES):
                    found.setdefault((tag, step), set()).add(value)
    return {key: frozenset(values) for key, values in found.items()}


@dataclass(frozen=True)
class Difference:
    """A difference of a tag between two runs, relative; inf: one run has no such number, or it isn't one."""

    tag: str
    step: int
    relative: float
    one: tuple[float, ...]
    other: tuple[float, ...]

    @classmethod
    def between(cls, tag: str, step: int, one: frozenset[float], other: frozenset[float]) -> "Difference":
        scale = max(map(abs, one | other), default=0.0) or 1.0
        return cls(tag, step, distance(one, other) / scale, _first(one), _first(other))


def differences(one: Logged, other: Logged) -> dict[str, Difference]:
    """The largest by tag."""
    largest: dict[str, Difference] = {}
    for key in sorted(one.keys() | other.keys()):
        found = Difference.between(*key, one.get(key, frozenset()), other.get(key, frozenset()))
        if found.tag not in largest or found.relative > largest[found.tag].relative:
            largest[found.tag] = found
    return largest


def _first(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(sorted(values)[:4])


def distance(some: frozenset[float], others: frozenset[float]) -> float:
    """How far a value of one run is from the nearest of the other. There may be several: a validation and a test."""
    if not some or not others or not all(map(math.isfinite, some | others)):
        return math.inf
    far = [min(abs(value - each) for each in others) for value in some]
    far += [min(abs(value - each) for each in some) for value in others]
    return max(far)
