"""Where a picture of a run is marked, what stands at each mark, and how the labels keep clear of each other.

May import: the standard library and this room's modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_resihp.report.recoveries import Death, Recovery
from megatron_resihp.report.run_summary import RunSummary
from megatron_resihp.report.words import duration, listing

MAX_ROWS = 3
MAX_LETTERS = 60


class Mark(NamedTuple):
    """The deaths between two iterations, and what came of them."""

    after: int
    """Last applied iteration before them."""
    label: str
    short_label: str
    """For a picture with so many marks that the labels would not fit."""
    recovered: bool

    @property
    def position(self) -> float:
        return self.after + 0.5


def find_marks(summary: RunSummary) -> list[Mark]:
    """One mark for each iteration in which somebody died, in ascending order."""
    start = summary.job.first_iteration if summary.job else 0
    deaths: dict[int, list[Death]] = {}
    for death in summary.deaths:
        deaths.setdefault(start if death.iteration is None else death.iteration, []).append(death)
    return [_mark(after, together, summary.recoveries) for after, together in sorted(deaths.items())]


def label_rows(spans: Sequence[tuple[float, float]]) -> list[int | None]:
    """The lowest free row for each label, given its (left, right) in ascending order; None: all rows are full.

    Labels are placed from right to left, so that the stem of a label in a high row passes to the left of the
    labels below it and crosses none.
    """
    rows: list[list[tuple[float, float]]] = [[] for _ in range(MAX_ROWS)]
    placed: list[int | None] = []
    for left, right in reversed(spans):
        free = (n for n, row in enumerate(rows) if all(right <= other[0] or left >= other[1] for other in row))
        row = next(free, None)
        if row is not None:
            rows[row].append((left, right))
        placed.append(row)
    return placed[::-1]


def _mark(after: int, deaths: Sequence[Death], recoveries: Sequence[Recovery]) -> Mark:
    times = [r.total_s for r in recoveries if r.resumed_iteration == after and r.total_s is not None]
    outcome = f"back in {duration(max(times))}" if times else "not recovered"
    names = _names(deaths)
    return Mark(after, f"{names}: {_causes(deaths)}, {outcome}", names, bool(times))


def _names(deaths: Sequence[Death]) -> str:
    workers = sorted({death.worker for death in deaths})
    if len(workers) > 4:
        return f"{len(workers)} workers"
    return f"worker{'s' if len(workers) > 1 else ''} {listing(workers)}"


def _causes(deaths: Sequence[Death]) -> str:
    causes = ", ".join(dict.fromkeys(death.cause for death in deaths))
    return causes if len(causes) <= MAX_LETTERS else causes[: MAX_LETTERS - 1] + "…"
