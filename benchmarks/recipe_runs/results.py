# SPDX-License-Identifier: Apache-2.0
"""The verdicts of a benchmark that may be cut off: a file for each, and what they say together. Pure but for files."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe_runs.shrinking.shrink import Shrunk
from recipe_runs.trial import EQUAL, FAILED, NO_CONTROL, UNEQUAL, Verdict


@dataclass(frozen=True)
class Line:
    """A command line, and the recipes that shrink to it."""

    shrunk: Shrunk
    names: tuple[str, ...]

    @property
    def key(self) -> str:
        text = json.dumps([self.shrunk.workers, self.shrunk.words])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def lines_of(recipes: Iterable[tuple[str, Shrunk]]) -> list[Line]:
    """Each distinct command line once, in the order of its first recipe."""
    names: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    first: dict[tuple[int, tuple[str, ...]], Shrunk] = {}
    for name, shrunk in recipes:
        key = (shrunk.workers, shrunk.words)
        names.setdefault(key, []).append(name)
        first.setdefault(key, shrunk)
    return [Line(first[key], tuple(found)) for key, found in names.items()]


class Results:
    """Verdicts in files named by command line and seed."""

    def __init__(self, directory: Path, seed: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._seed = seed

    def _path(self, line: Line) -> Path:
        return self._directory / f"{line.key}-{self._seed}.json"

    def read(self, line: Line) -> dict[str, Any] | None:
        """None: the line has not been tried."""
        path = self._path(line)
        return json.loads(path.read_text()) if path.exists() else None

    def write(self, line: Line, verdict: Verdict) -> None:
        record = {"names": line.names, "workers": line.shrunk.workers, "words": line.shrunk.words}
        path = self._path(line)
        unfinished = path.with_suffix(".new")
        unfinished.write_text(json.dumps(record | _plain(dataclasses.asdict(verdict)), indent=1))
        unfinished.replace(path)


def _plain(value: Any) -> Any:
    """JSON knows no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def summary(recipes: int, accepted: int, lines: Sequence[Line], results: Results) -> dict[str, Any]:
    """The figures of the benchmark's docstring."""
    verdicts = {line.key: results.read(line) for line in lines if not line.shrunk.lost}
    tried = [(line, verdict) for line in lines if (verdict := verdicts.get(line.key))]

    def those(*outcomes: str) -> list[tuple[Line, dict[str, Any]]]:
        return [(line, verdict) for line, verdict in tried if verdict["outcome"] in outcomes]

    def count(*outcomes: str) -> int:
        return sum(len(line.names) for line, _ in those(*outcomes))

    lost: dict[str, int] = {}
    for line in lines:
        for why in line.shrunk.lost:
            lost[why] = lost.get(why, 0) + len(line.names)
    return {
        "recipes": recipes,
        "accepted": accepted,
        "distinct": len(lines),
        "trained": count(EQUAL, UNEQUAL, NO_CONTROL),
        "equal": count(EQUAL),
        "kernel_replaced": sum(len(line.names) for line, _ in those(EQUAL) if line.shrunk.kernels),
        "not_run_on_cpu": lost,
        "not_tried": sum(len(line.names) for line in lines if not line.shrunk.lost and not verdicts[line.key]),
        "no_control": {name: verdict["reason"] for line, verdict in those(NO_CONTROL) for name in line.names},
        "failed": {name: verdict["reason"] for line, verdict in those(FAILED) for name in line.names},
        "unequal": {name: _said(verdict) for line, verdict in those(UNEQUAL) for name in line.names},
        "largest_loss_difference": max((verdict["loss"] for _, verdict in those(EQUAL)), default=None),
        "widest_tolerance": max((verdict["tolerance"] for _, verdict in those(EQUAL)), default=None),
        "smallest_control": min((verdict["control"] for _, verdict in those(EQUAL)), default=None),
        "seconds": round(sum(sum(verdict["seconds"].values()) for _, verdict in tried), 1),
    }


def _said(verdict: Mapping[str, Any]) -> list[str]:
    return [
        f"{found['tag']} at {found['step']}: {found['one']} and {found['other']}, relatively {found['relative']} "
        f"(at most {allowed:.2g})"
        for found, allowed in verdict["unequal"]
    ]
