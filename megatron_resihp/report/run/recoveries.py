# SPDX-License-Identifier: Apache-2.0
"""The deaths of a run, how each was noticed, and the recoveries.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_resihp.events import epochs as told
from megatron_resihp.events.epochs import PHASES, FirstStep, Phase
from megatron_resihp.events.event import Event
from megatron_resihp.events.workers import WorkerDead
from megatron_resihp.report.run.steps import Step, rates_around


@dataclass(frozen=True)
class Death:
    worker: int
    node: int | str | None
    cause: str
    died_at: float | None
    noticed_at: float | None
    noticed_ms: float | None
    """From the death until the coordinator knew of it; below zero where two nodes' clocks disagree."""
    iteration: int | None
    """Last applied iteration when it died."""


@dataclass(frozen=True)
class Recovery:
    from_epoch: int
    to_epoch: int
    resumed_iteration: int
    """Last applied iteration: training goes on with the next."""
    dead: tuple[Death, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase, each of the slowest worker."""
    resumed_s: float | None = None
    """From the first death until all workers continued."""
    total_s: float | None = None
    """From the first death to the end of the first iteration completed after it; None: no iteration was completed."""
    bytes_moved: int | None = None
    steps_redone: int | None = None
    samples_per_second_before: float | None = None
    samples_per_second_after: float | None = None


def find_deaths(events: Sequence[Event], steps: Sequence[Step]) -> tuple[list[Death], list[Recovery]]:
    """All deaths and all recoveries of a run, each death with the recovery that answered it."""
    recoveries = [event for event in events if isinstance(event, told.Recovery)]
    reports = list(_first_reports(events))
    answer = _answers(reports, recoveries)
    deaths = [_death(report, answer[index], steps) for index, report in enumerate(reports)]
    return deaths, [
        _recovery(recovery, [d for d, r in zip(deaths, answer, strict=True) if r is recovery], events, steps)
        for recovery in recoveries
    ]


def _first_reports(events: Iterable[Event]) -> Iterable[WorkerDead]:
    """One per worker and epoch: an exit and a lost connection are one death."""
    seen: set[tuple[int, int | None]] = set()
    for event in events:
        if isinstance(event, WorkerDead) and (event.dead, event.epoch) not in seen:
            seen.add((event.dead, event.epoch))
            yield event


def _answers(reports: Sequence[WorkerDead], recoveries: Sequence[told.Recovery]) -> list[told.Recovery | None]:
    """For each death the first recovery that names its worker and ended after it was noticed."""
    return [next((r for r in recoveries if _answered_by(report, r)), None) for report in reports]


def _answered_by(report: WorkerDead, recovery: told.Recovery) -> bool:
    end = recovery.time if recovery.resumed_at is None else recovery.resumed_at
    return report.dead in recovery.dead and _noticed_at(report) <= end


def _noticed_at(report: WorkerDead) -> float:
    return report.time if report.noticed_at is None else report.noticed_at


def _death(report: WorkerDead, answer: told.Recovery | None, steps: Sequence[Step]) -> Death:
    noticed_at = _noticed_at(report)
    return Death(
        worker=report.dead,
        node=report.node,
        cause=report.cause,
        died_at=report.died_at,
        noticed_at=noticed_at,
        noticed_ms=None if report.died_at is None else 1000 * (noticed_at - report.died_at),
        iteration=answer.resumed_iteration if answer else _applied_by(noticed_at, steps),
    )


def _applied_by(moment: float, steps: Sequence[Step]) -> int | None:
    done = [step.iteration for step in steps if step.ended_at is not None and step.ended_at <= moment]
    return max(done, default=None)


def _recovery(
    event: told.Recovery, deaths: Sequence[Death], events: Sequence[Event], steps: Sequence[Step]
) -> Recovery:
    before, after = rates_around(steps, event.from_epoch, event.to_epoch)
    began = _began(event, deaths)
    return Recovery(
        from_epoch=event.from_epoch,
        to_epoch=event.to_epoch,
        resumed_iteration=event.resumed_iteration,
        dead=(*deaths, *_unreported(event, events)),
        phases=_phases(events, event.to_epoch),
        resumed_s=None if began is None or event.resumed_at is None else event.resumed_at - began,
        total_s=_total(event, began, events, steps),
        bytes_moved=event.bytes_moved,
        steps_redone=event.steps_redone,
        samples_per_second_before=before,
        samples_per_second_after=after,
    )


def _began(event: told.Recovery, deaths: Sequence[Death]) -> float | None:
    """Time of the first death, or of the epoch's break where no worker died or no time of death is known."""
    known = [death.died_at for death in deaths if death.died_at is not None]
    return min(known) if known else event.broken_at


def _unreported(event: told.Recovery, events: Iterable[Event]) -> Iterable[Death]:
    reported = {each.dead for each in events if isinstance(each, WorkerDead)}
    for worker in sorted(set(event.dead) - reported):
        yield Death(worker, None, "not recorded", None, None, None, event.resumed_iteration)


def _phases(events: Iterable[Event], to_epoch: int) -> dict[str, float]:
    longest: dict[str, float] = {}
    for event in events:
        if isinstance(event, Phase) and event.to_epoch == to_epoch:
            longest[event.phase] = max(event.seconds, longest.get(event.phase, 0.0))
    return dict(sorted(longest.items(), key=_phase_order))


def _phase_order(item: tuple[str, Any]) -> tuple[int, str]:
    name = item[0]
    return (PHASES.index(name) if name in PHASES else len(PHASES), name)


def _total(event: told.Recovery, began: float | None, events: Iterable[Event], steps: Sequence[Step]) -> float | None:
    first_steps = [each for each in events if isinstance(each, FirstStep) and each.to_epoch == event.to_epoch]
    if first_steps:
        # Each worker may write one: the iteration is complete when the last of them is.
        last = max(first_steps, key=lambda each: each.time)
        return last.seconds_since_death if began is None else last.time - began
    later = (s for s in steps if s.epoch == event.to_epoch and s.iteration > event.resumed_iteration)
    ends = [s.ended_at for s in later if s.ended_at is not None]
    return min(ends) - began if ends and began is not None else None
