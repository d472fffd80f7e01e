# SPDX-License-Identifier: Apache-2.0
"""Reads iteration times from a CSV or JSON-lines file, for users without the plugin. Imports numpy.

Columns: `seconds`, and optionally `iteration`, `worker`, and the workload as `tokens` (N) and `squares` (Σ l²). Without
`worker`, a row is the whole job's iteration; the detector can then only say that some worker is slow.

If the numbering starts over, the job was restarted: each start is a segment.
"""

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.detector.input.observations import IterationObservations, Layout
from megatron_resihp.detector.input.records import SpanKind

Array = NDArray[np.float64]

SUFFIXES: Final = (".csv", ".jsonl")
COLUMNS: Final = ("seconds", "iteration", "worker", "tokens", "squares")
LARGEST: Final = {"seconds": 1e9, "iteration": 2.0**53, "worker": 2.0**31, "tokens": 1e15, "squares": 1e30}
"""Largest valid values: 1e9 s are 30 years."""
SMALLEST: Final = 1e-9
"""Smallest valid value, apart from 0 where 0 is allowed."""
CHUNK: Final = 20_000
"""Rows that are read at once."""
OUT_OF_ORDER: Final = 0.05
"""Share of rows that may go back in their numbering; if more do and none is repeated, the rows are merely unsorted."""


class TableError(Exception):
    """The file cannot be used; the message is "cause; mend" in one line."""


@dataclass(frozen=True)
class Table:
    """Iteration times. A step is one iteration of one segment; steps are in order.

    Attributes:
        workers: [workers] ids; without a column of workers, the single worker 0 stands for the job.
        iterations: [steps] the file's numbers, ascending within a segment.
        segments: [steps] how often the numbering has started over before.
        rows: [steps] number of the step's first row in the file; the first row of data is 1.
        seconds, tokens, squares: [steps, workers], NaN where not given.
        has_workers: whether there is a column of workers.
        left_out: the unusable lines, each with its reason.
    """

    workers: NDArray[np.int64]
    iterations: NDArray[np.int64]
    segments: NDArray[np.int64]
    rows: NDArray[np.int64]
    seconds: Array
    tokens: Array
    squares: Array
    has_workers: bool
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, seconds: Array, workers: NDArray[np.int64] | None = None) -> "Table":
        """A table of times alone, [steps, workers], numbered from 1; without worker ids they are the job's times."""
        numbers = np.arange(1, len(seconds) + 1)
        unknown = np.full_like(seconds, np.nan)
        ids = np.zeros(1, np.int64) if workers is None else workers
        return cls(ids, numbers, np.zeros_like(numbers), numbers, seconds, unknown, unknown, workers is not None, ())

    @property
    def restarts(self) -> list[int]:
        """Rows of the file at which the numbering starts over."""
        return [int(self.rows[place]) for place in np.flatnonzero(np.diff(self.segments)) + 1]

    def layout(self, segment: int = 0) -> Layout:
        """A layout with every worker as its own replica on its own machine, since the file says no more."""
        rows = np.arange(len(self.workers))
        zero = np.zeros_like(rows)
        return Layout(segment, self.workers, rows, zero, zero, rows, np.zeros((0, 2), np.int64))

    def observations(self) -> Iterator[IterationObservations]:
        """Each iteration as one op of each worker; its segment is its epoch."""
        count = len(self.workers)
        none = np.zeros((0, 0))
        waited, spans = np.full((count, 3, 1, 1), np.nan), np.zeros((count, len(SpanKind)))
        for row, number in enumerate(self.iterations.tolist()):
            compute = np.full((count, 3, 1, 1), np.nan)
            compute[:, 0, 0, 0] = self.seconds[row]
            yield IterationObservations(
                epoch=int(self.segments[row]), iteration=number, compute=compute, waited=waited,
                tokens=self.tokens[row][:, None], squares=self.squares[row][:, None],
                transfer=none, transfer_bytes=none, spans=spans,
                seconds=self.seconds[row], reported=np.isfinite(self.seconds[row]),
            )  # fmt: skip

    def steps(self) -> Iterator[Layout | IterationObservations]:
        """The observations, with a layout before each segment."""
        segment = -1
        for observations in self.observations():
            if observations.epoch != segment:
                segment = observations.epoch
                yield self.layout(segment)
            yield observations


def read(path: Path, advance: Callable[[int], None] | None = None) -> Table:
    """Read a file of the format that its suffix names.

    Args:
        path: of the file.
        advance: called now and then with the number of further rows read.

        Raises:
            TableError: the file is missing, has another format, or holds no iteration times.
    """
    columns: dict[str, list[Array]] = {name: [] for name in COLUMNS}
    reasons: dict[int, str] = {}
    lines: list[int] = []
    for numbers, values in _chunks(path):
        for name in COLUMNS:
            columns[name].append(_numbers(values.get(name, ()), name, len(numbers), len(lines), reasons))
        lines += numbers
        if advance:
            advance(len(numbers))
    joined = {name: np.concatenate(parts) if parts else np.empty(0) for name, parts in columns.items()}
    has_workers = bool(np.isfinite(joined["worker"]).any())
    _number(joined, reasons)
    segment, repeated = _segments(joined, np.array([row not in reasons for row in range(len(lines))], dtype=bool))
    reasons |= dict.fromkeys(repeated, "its iteration came before; rows of several workers need a column `worker`")
    left_out = [f"line {lines[row]}: {reasons[row]}" for row in sorted(reasons)]
    if len(reasons) == len(lines):
        why = f" ({left_out[0]})" if left_out else ""
        raise TableError(f"{path} holds no iteration times{why}; give each line a positive number of `seconds`")
    used = np.ones(len(lines), dtype=bool)
    used[list(reasons)] = False
    return _table(joined, segment, np.flatnonzero(used), has_workers, left_out)


def _table(
    columns: Mapping[str, Array],
    segment: NDArray[np.int64],
    used: NDArray[np.int64],
    has_workers: bool,
    left_out: Sequence[str],
) -> Table:
    workers, column = np.unique(columns["worker"][used].astype(np.int64), return_inverse=True)
    numbers, parts = columns["iteration"][used].astype(np.int64), segment[used]
    order = np.lexsort((numbers, parts))
    new = np.ones(used.size, dtype=bool)
    new[1:] = (np.diff(numbers[order]) != 0) | (np.diff(parts[order]) != 0)
    place = np.empty(used.size, np.int64)
    place[order] = np.cumsum(new) - 1
    first = order[new]
    rows = np.full(first.size, len(segment), np.int64)
    np.minimum.at(rows, place, used)
    seconds, tokens, squares = np.full((3, first.size, workers.size), np.nan)
    for name, values in (("seconds", seconds), ("tokens", tokens), ("squares", squares)):
        values[place, column] = columns[name][used]
    return Table(
        workers, numbers[first], parts[first], rows + 1, seconds, tokens, squares, has_workers, tuple(left_out)
    )  # fmt: skip


# Numbers


def _numbers(values: Sequence[Any], name: str, count: int, first: int, reasons: dict[int, str]) -> Array:
    """A column's numbers, NaN if empty; `reasons` receives, by row, why a row cannot be used."""
    if not len(values):
        values = [None] * count
    try:
        result = np.array([math.nan if each is None or each == "" else float(each) for each in values])
    except (TypeError, ValueError):
        result = np.array([_one(each, name, first + row, reasons) for row, each in enumerate(values)])
    largest = LARGEST[name]
    with np.errstate(invalid="ignore"):
        bad = ~(np.isnan(result) | ((result >= 0) & (result <= largest)))
        if whole := name in ("iteration", "worker"):
            bad |= np.isfinite(result) & (result != np.floor(np.where(np.isfinite(result), result, 0.0)))
        bad |= (result > 0) & (result < SMALLEST)
        if name == "seconds":
            bad |= ~(result > 0)
    what = "not a whole number from 0" if whole else f"not a positive number from {SMALLEST:g} to {largest:g}"
    for row in np.flatnonzero(bad).tolist():
        reasons.setdefault(first + row, f"{name} is {values[row]!r}, {what}")
    result[bad] = np.nan
    return result


def _one(value: Any, name: str, row: int, reasons: dict[int, str]) -> float:
    try:
        return math.nan if value is None or value == "" else float(value)
    except (TypeError, ValueError):
        reasons[row] = f"{name} is {value!r}, not a number"
        return math.nan


def _number(columns: dict[str, Array], reasons: Mapping[int, str]) -> None:
    """Fill in missing values: worker 0, and the numbers of a worker's rows; rows that are left out count too."""
    worker, iteration = columns["worker"], columns["iteration"]
    worker[np.isnan(worker)] = 0
    missing = np.isnan(iteration)
    if not missing.any():
        return
    known = not missing.all()
    last: dict[float, float] = {}
    for row, (who, number) in enumerate(zip(worker.tolist(), iteration.tolist(), strict=True)):
        if math.isnan(number):
            # A row with neither a number nor a usable worker does not count for the other rows.
            if known and row in reasons:
                continue
            iteration[row] = number = last.get(who, 0.0) + 1
        last[who] = number


def _segments(columns: Mapping[str, Array], usable: NDArray[np.bool_]) -> tuple[NDArray[np.int64], list[int]]:
    """[rows] how often its worker's numbering has started over before, and the rows that only repeat a number."""
    worker, iteration = columns["worker"], columns["iteration"]
    rows = np.flatnonzero(usable)
    order = rows[np.argsort(worker[rows], kind="stable")]
    same = worker[order][1:] == worker[order][:-1]
    step = np.diff(iteration[order])
    back, again = same & (step < 0), same & (step == 0)
    most = OUT_OF_ORDER * max(order.size, 1)
    repeated: list[int] = []
    if again.sum() > most:
        repeated = order[1:][again].tolist()
        again[:] = False
    if back.sum() > most and np.unique(np.stack([worker[order], iteration[order]]), axis=1).shape[1] == order.size:
        back[:] = False
    begins = np.concatenate([[0], np.cumsum(back | again)]) if order.size else np.zeros(0, np.int64)
    starts = np.concatenate([[0], np.flatnonzero(~same) + 1]) if order.size else np.zeros(0, np.int64)
    of_worker = np.repeat(begins[starts], np.diff(np.append(starts, order.size)))
    segment = np.zeros(worker.size, np.int64)
    segment[order] = begins - of_worker
    return segment, repeated


# Lines


def _chunks(path: Path) -> Iterator[tuple[list[int], Mapping[str, Sequence[Any]]]]:
    """Line numbers, and values by column, of some rows at a time. Raises TableError."""
    if path.suffix not in SUFFIXES:
        raise TableError(f"{path} is neither a directory nor a {' or '.join(SUFFIXES)} file; rename it to what it is")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield from _json_chunks(file) if path.suffix == ".jsonl" else _csv_chunks(path, file)
    except OSError as error:
        raise TableError(f"{path} cannot be read ({error.strerror}); give another file") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"{path} is not a text table ({error}); give another file") from None


def _json_chunks(file: Iterator[str]) -> Iterator[tuple[list[int], Mapping[str, Sequence[Any]]]]:
    lines = ((number, _object(line)) for number, line in enumerate(file, 1) if line.strip())
    while chunk := list(islice(lines, CHUNK)):
        yield [number for number, _ in chunk], {name: [each.get(name) for _, each in chunk] for name in COLUMNS}


def _csv_chunks(path: Path, file: Iterator[str]) -> Iterator[tuple[list[int], Mapping[str, Sequence[Any]]]]:
    reader = csv.reader(file, skipinitialspace=True)
    names = next(reader, [])
    _check_columns(path, names)
    place = {name: names.index(name) for name in COLUMNS if name in names}
    rows = ((reader.line_num, row) for row in reader if row)
    while chunk := list(islice(rows, CHUNK)):
        yield (
            [number for number, _ in chunk],
            {name: [row[at] if at < len(row) else None for _, row in chunk] for name, at in place.items()},
        )


def _check_columns(path: Path, names: Sequence[str]) -> None:
    if "seconds" not in names:
        found = ", ".join(names) or "nothing"
        raise TableError(
            f"{path} has no column `seconds` (its first line holds: {found[:200]}); "
            f"name the columns {', '.join(COLUMNS)}, of which all but the first may be left out"
        )


def _object(line: str) -> Mapping[str, Any]:
    """The line's JSON object; for other lines, an object without a usable value, so that they count as bad lines."""
    try:
        value = json.loads(line)
    except ValueError:
        return {"seconds": line.strip()[:40]}
    return value if isinstance(value, dict) else {"seconds": line.strip()[:40]}
