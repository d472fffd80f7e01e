"""Iteration times in a CSV or JSON-lines file, for users without the plugin → observations. Imports numpy.

Columns: `seconds`, and optionally `iteration`, `worker`, and the workload as `tokens` (N) and `squares` (Σ l²). Without
`worker` a row is the whole job's iteration: then all that can be said is that some worker is slow.
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.observations import IterationObservations, Layout
from megatron_resihp.detector.records import SpanKind

SUFFIXES: Final = (".csv", ".jsonl")
COLUMNS: Final = ("seconds", "iteration", "worker", "tokens", "squares")


class TableError(Exception):
    """A file that cannot be used; the message is "cause; mend" in one line."""


@dataclass(frozen=True)
class Table:
    """Iteration times.

    Attributes:
        workers: [workers] ids; the single worker 0 stands for the job where there is no column of workers.
        iterations: [iterations] numbers, growing.
        seconds, tokens, squares: [iterations, workers], NaN where not given.
        has_workers: whether there is a column of workers.
        left_out: lines that could not be used, each with its reason.
    """

    workers: NDArray[np.int64]
    iterations: NDArray[np.int64]
    seconds: NDArray[np.float64]
    tokens: NDArray[np.float64]
    squares: NDArray[np.float64]
    has_workers: bool
    left_out: tuple[str, ...]

    def layout(self) -> Layout:
        """Every worker a replica of its own, on a machine of its own: nothing more is known."""
        rows = np.arange(len(self.workers))
        zero = np.zeros_like(rows)
        return Layout(0, self.workers, rows, zero, zero, rows, np.zeros((0, 2), np.int64))

    def observations(self) -> Iterator[IterationObservations]:
        """Each iteration as one op of each worker."""
        count = len(self.workers)
        for row, number in enumerate(self.iterations):
            compute = np.full((count, 3, 1, 1), np.nan)
            compute[:, 0, 0, 0] = self.seconds[row]
            yield IterationObservations(
                epoch=0, iteration=int(number), compute=compute, waited=np.full_like(compute, np.nan),
                tokens=self.tokens[row][:, None], squares=self.squares[row][:, None],
                transfer=np.zeros((0, 0)), transfer_bytes=np.zeros((0, 0)), spans=np.zeros((count, len(SpanKind))),
                seconds=self.seconds[row], reported=np.isfinite(self.seconds[row]),
            )  # fmt: skip


@dataclass(frozen=True)
class _Row:
    iteration: int
    worker: int
    seconds: float
    tokens: float
    squares: float


def read(path: Path) -> Table:
    """Read a file by its suffix.

    Raises:
        TableError: it is missing, of another kind, or holds no iteration times.
    """
    rows: list[_Row] = []
    left_out: list[str] = []
    next_of: dict[int, int] = {}
    has_workers = False
    for line, values in _lines(path):
        has_workers = has_workers or values.get("worker") not in (None, "")
        try:
            row = _row(values, next_of)
        except ValueError as error:
            left_out.append(f"line {line}: {error}")
            continue
        next_of[row.worker] = row.iteration + 1
        rows.append(row)
    if not rows:
        why = f" ({left_out[0]})" if left_out else ""
        raise TableError(f"{path} holds no iteration times{why}; give each line a positive number of `seconds`")
    return _table(rows, has_workers, left_out)


def _table(rows: list[_Row], has_workers: bool, left_out: list[str]) -> Table:
    workers, column = np.unique([row.worker for row in rows], return_inverse=True)
    iterations, place = np.unique([row.iteration for row in rows], return_inverse=True)
    seconds, tokens, squares = np.full((3, len(iterations), len(workers)), np.nan)
    for name, values in (("seconds", seconds), ("tokens", tokens), ("squares", squares)):
        values[place, column] = [getattr(row, name) for row in rows]
    return Table(workers, iterations, seconds, tokens, squares, has_workers, tuple(left_out))


def _row(values: Mapping[str, Any], next_of: Mapping[int, int]) -> _Row:
    """Raises ValueError with what is wrong."""
    worker = _whole(values, "worker", 0)
    seconds = _number(values, "seconds")
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"seconds is {values.get('seconds')!r}, not a positive number")
    iteration = _whole(values, "iteration", next_of.get(worker, 1))
    return _Row(iteration, worker, seconds, _number(values, "tokens"), _number(values, "squares"))


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    if value is None or value == "":
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {value!r}, not a number") from None


def _whole(values: Mapping[str, Any], name: str, default: int) -> int:
    number = _number(values, name)
    if math.isnan(number):
        return default
    if number < 0 or number != int(number):
        raise ValueError(f"{name} is {values[name]!r}, not a whole number from 0")
    return int(number)


def _lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line numbers and values. Raises TableError."""
    if path.suffix not in SUFFIXES:
        raise TableError(f"{path} is neither a directory nor a {' or '.join(SUFFIXES)} file; rename it to what it is")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            if path.suffix == ".jsonl":
                yield from ((number, _object(line)) for number, line in enumerate(file, 1) if line.strip())
            else:
                reader = csv.DictReader(file, skipinitialspace=True)
                _check_columns(path, reader.fieldnames or ())
                yield from ((reader.line_num, values) for values in reader)
    except OSError as error:
        raise TableError(f"{path} cannot be read ({error.strerror}); give another file") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"{path} is no text table ({error}); give another file") from None


def _check_columns(path: Path, names: Any) -> None:
    if "seconds" not in names:
        found = ", ".join(map(str, names)) or "nothing"
        raise TableError(
            f"{path} has no column `seconds` (its first line holds: {found[:200]}); "
            f"name the columns {', '.join(COLUMNS)}, of which all but the first may be left out"
        )


def _object(line: str) -> Mapping[str, Any]:
    """The line's JSON object; one without a value where it is none, so that it is counted like other bad lines."""
    try:
        value = json.loads(line)
    except ValueError:
        return {"seconds": line.strip()[:40]}
    return value if isinstance(value, dict) else {"seconds": line.strip()[:40]}
