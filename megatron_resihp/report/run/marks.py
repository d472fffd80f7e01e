# SPDX-License-Identifier: Apache-2.0
"""The marks in a picture of a run, their labels, and the layout of the labels.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from itertools import pairwise
from typing import NamedTuple

from megatron_resihp.report.run.epochs import PlanInForce
from megatron_resihp.report.run.recoveries import Death, Recovery
from megatron_resihp.report.run.run_summary import Finding, RunSummary
from megatron_resihp.report.words import duration, listing

MAX_ROWS = 6
MAX_LETTERS = 60


class MarkKind(Enum):
    """What happened at a mark."""

    DEATH = auto()
    CHANGE = auto()
    """Another plan was taken by choice."""
    VERDICT = auto()
    """A worker or link became slow, or recovered."""


class Mark(NamedTuple):
    """What happened between two iterations."""

    after: int
    """Last applied iteration before it."""
    kind: MarkKind
    label: str
    short_label: str
    """For a picture with too many marks for the full labels."""
    recovered: bool = False
    """Whether a recovery followed."""

    @property
    def position(self) -> float:
        return self.after + 0.5


def find_marks(summary: RunSummary) -> list[Mark]:
    """One mark for the deaths, the verdicts and the change by choice between two iterations, in ascending order."""
    marks = [*_deaths(summary), *_changes(summary.plans), *_verdicts(summary.verdicts)]
    return sorted(marks, key=lambda mark: (mark.after, mark.kind.value))


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


def _deaths(summary: RunSummary) -> list[Mark]:
    start = summary.job.first_iteration if summary.job else 0
    deaths: dict[int, list[Death]] = {}
    for death in summary.deaths:
        deaths.setdefault(start if death.iteration is None else death.iteration, []).append(death)
    return [_death(after, together, summary.recoveries) for after, together in deaths.items()]


def _death(after: int, deaths: Sequence[Death], recoveries: Sequence[Recovery]) -> Mark:
    times = [r.total_s for r in recoveries if r.resumed_iteration == after and r.total_s is not None]
    outcome = f"back in {duration(max(times))}" if times else "not recovered"
    names = _names(sorted({death.worker for death in deaths}))
    return Mark(after, MarkKind.DEATH, f"{names}: {_causes(deaths)}, {outcome}", names, bool(times))


def _names(workers: Sequence[int]) -> str:
    if len(workers) > 4:
        return f"{len(workers)} workers"
    return f"worker{'s' if len(workers) > 1 else ''} {listing(workers)}"


def _causes(deaths: Sequence[Death]) -> str:
    causes = ", ".join(dict.fromkeys(death.cause for death in deaths))
    return causes if len(causes) <= MAX_LETTERS else causes[: MAX_LETTERS - 1] + "…"


def _changes(plans: Sequence[PlanInForce]) -> list[Mark]:
    """One mark per change, with its effect; returning and joining workers are named, verdicts mark other reasons."""
    marks = []
    for before, plan in pairwise(plans):
        if plan.by_choice:
            arrival = [plan.why] if plan.why.endswith(("came back", "joined")) else []
            outcome = "the first plan again" if plan.like_the_first else _difference(before, plan)
            label = ": ".join([*arrival, outcome])
            marks.append(Mark(plan.after, MarkKind.CHANGE, label, f"plan {plan.epoch}"))
    return marks


def _difference(before: PlanInForce, plan: PlanInForce) -> str:
    layers = [f"layers {plan.layers}"] if plan.layers != before.layers else []
    shares = [f"micro-batches {plan.micro_batches}"] if plan.micro_batches != before.micro_batches else []
    return ", ".join([*layers, *shares]) or plan.shape


def _verdicts(verdicts: Sequence[Finding]) -> list[Mark]:
    together: dict[int, list[str]] = {}
    for found in verdicts:
        name = "link " if found.kind == "link" else "worker "
        name += "–".join(map(str, found.workers))
        now = "healthy again" if found.change == "recovery" else f"at {100 * found.speed:.0f} %"
        together.setdefault(found.since - 1, []).append(f"{name} {now}")
    return [
        Mark(after, MarkKind.VERDICT, ", ".join(told), told[0] if len(told) == 1 else f"{len(told)} verdicts")
        for after, told in together.items()
    ]
