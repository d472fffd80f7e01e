# SPDX-License-Identifier: Apache-2.0
"""Who died, how that was noticed, and how training went on.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_resihp.events import log as names
from megatron_resihp.events.log import Event
from megatron_resihp.events.nonfinite import number, optional_number
from megatron_resihp.report.run.steps import Step, rates_around


@dataclass(frozen=True)
class Death:
    worker: int
    node: int | str | None
    cause: str
    died_at: float | None
    noticed_at: float | None
    noticed_ms: float | None
    """From the death to the coordinator's knowing it; below zero where two nodes' clocks disagree."""
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
    """Seconds by phase, of the worker that took longest."""
    resumed_s: float | None = None
    """From the first death until all workers went on."""
    total_s: float | None = None
    """From the first death to the end of the first iteration completed after it; None: none was."""
    bytes_moved: int | None = None
    steps_redone: int | None = None
    samples_per_second_before: float | None = None
    samples_per_second_after: float | None = None


def find_deaths(events: Sequence[Event], steps: Sequence[Step]) -> tuple[list[Death], list[Recovery]]:
    """All deaths and all recoveries of a run, each death with the recovery that answered it."""
    recoveries = [e for e in events if e["event"] == names.RECOVERY]
    reports = list(_first_reports(events))
    answer = _answers(reports, recoveries)
    deaths = [_death(report, answer[index], steps) for index, report in enumerate(reports)]
    return deaths, [
        _recovery(recovery, [d for d, r in zip(deaths, answer, strict=True) if r is recovery], events, steps)
        for recovery in recoveries
    ]


def _first_reports(events: Iterable[Event]) -> Iterable[Event]:
    """The worker_dead events, one per worker and epoch: an exit and a lost connection are one death."""
    seen: set[tuple[int, int | None]] = set()
    for event in events:
        if event["event"] == names.WORKER_DEAD and (event["dead"], event.get("epoch")) not in seen:
            seen.add((event["dead"], event.get("epoch")))
            yield event


def _answers(reports: Sequence[Event], recoveries: Sequence[Event]) -> list[Event | None]:
    """For each death the first recovery that names its worker and ended after it was noticed."""
    return [next((r for r in recoveries if _answered_by(report, r)), None) for report in reports]


def _answered_by(report: Event, recovery: Event) -> bool:
    end = number(recovery["time"] if recovery.get("resumed_at") is None else recovery["resumed_at"])
    return report["dead"] in recovery["dead"] and _noticed_at(report) <= end


def _noticed_at(report: Event) -> float:
    return number(report["time"] if report.get("noticed_at") is None else report["noticed_at"])


def _death(report: Event, answer: Event | None, steps: Sequence[Step]) -> Death:
    died_at = optional_number(report.get("died_at"))
    noticed_at = _noticed_at(report)
    return Death(
        worker=report["dead"],
        node=report.get("node"),
        cause=report["cause"],
        died_at=died_at,
        noticed_at=noticed_at,
        noticed_ms=None if died_at is None else 1000 * (noticed_at - died_at),
        iteration=answer["resumed_iteration"] if answer else _applied_by(noticed_at, steps),
    )


def _applied_by(moment: float, steps: Sequence[Step]) -> int | None:
    done = [step.iteration for step in steps if step.ended_at is not None and step.ended_at <= moment]
    return max(done, default=None)


def _recovery(event: Event, deaths: Sequence[Death], events: Sequence[Event], steps: Sequence[Step]) -> Recovery:
    before, after = rates_around(steps, event["from_epoch"], event["to_epoch"])
    began = _began(event, deaths)
    resumed_at = optional_number(event.get("resumed_at"))
    return Recovery(
        from_epoch=event["from_epoch"],
        to_epoch=event["to_epoch"],
        resumed_iteration=event["resumed_iteration"],
        dead=(*deaths, *_unreported(event, events)),
        phases=_phases(events, event["to_epoch"]),
        resumed_s=None if began is None or resumed_at is None else resumed_at - began,
        total_s=_total(event, began, events, steps),
        bytes_moved=event.get("bytes_moved"),
        steps_redone=event.get("steps_redone"),
        samples_per_second_before=before,
        samples_per_second_after=after,
    )


def _began(event: Event, deaths: Sequence[Death]) -> float | None:
    """The first death, or the break of the epoch where nobody died or nobody knows when."""
    known = [death.died_at for death in deaths if death.died_at is not None]
    return min(known) if known else optional_number(event.get("broken_at"))


def _unreported(event: Event, events: Iterable[Event]) -> Iterable[Death]:
    reported = {e["dead"] for e in events if e["event"] == names.WORKER_DEAD}
    for worker in sorted(set(event["dead"]) - reported):
        yield Death(worker, None, "not recorded", None, None, None, event["resumed_iteration"])


def _phases(events: Iterable[Event], to_epoch: int) -> dict[str, float]:
    longest: dict[str, float] = {}
    for event in events:
        if event["event"] == names.PHASE and event["to_epoch"] == to_epoch:
            longest[event["phase"]] = max(number(event["seconds"]), longest.get(event["phase"], 0.0))
    return dict(sorted(longest.items(), key=_phase_order))


def _phase_order(item: tuple[str, Any]) -> tuple[int, str]:
    name = item[0]
    return (names.PHASES.index(name) if name in names.PHASES else len(names.PHASES), name)


def _total(event: Event, began: float | None, events: Iterable[Event], steps: Sequence[Step]) -> float | None:
    to_epoch = event["to_epoch"]
    first_steps = [e for e in events if e["event"] == names.FIRST_STEP and e["to_epoch"] == to_epoch]
    if first_steps:
        # Each worker may write one: the iteration is complete when the last of them is.
        last = max(first_steps, key=lambda e: number(e["time"]))
        own_count = optional_number(last.get("seconds_since_death"))
        return own_count if began is None else number(last["time"]) - began
    later = (s for s in steps if s.epoch == to_epoch and s.iteration > event["resumed_iteration"])
    ends = [s.ended_at for s in later if s.ended_at is not None]
    return min(ends) - began if ends and began is not None else None
