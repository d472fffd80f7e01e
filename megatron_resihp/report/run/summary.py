# SPDX-License-Identifier: Apache-2.0
"""Events of a run -> RunSummary.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from megatron_resihp.events import log as names
from megatron_resihp.events.log import Event, EventFile
from megatron_resihp.events.nonfinite import number
from megatron_resihp.events.schema import EVENTS, problems
from megatron_resihp.report.run import shape
from megatron_resihp.report.run.epochs import find_plans
from megatron_resihp.report.run.recoveries import find_deaths
from megatron_resihp.report.run.run_summary import (
    LEAST_BOUND,
    REORDERED,
    Detection,
    Drill,
    Evaluation,
    Failure,
    Finding,
    Job,
    RunSummary,
    Salvage,
    Stall,
    Workers,
)
from megatron_resihp.report.run.samples import Feed, SampleCount, count_samples
from megatron_resihp.report.run.steps import Step, applied_attempts, applied_steps, usual_duration
from megatron_resihp.report.words import where

MARGIN: Final = 2.0
"""How much further than any two runs of other orders a third may be."""

__all__ = ["RunSummary", "compare", "summarize", "summarize_log", "with_reference"]


def summarize_log(log: EventFile) -> RunSummary:
    """Everything that a report says about the last run in a log, and what is wrong with the log."""
    return summarize(log.events, len(log.malformed) + log.truncated, log.damaged)


def summarize(events: Iterable[Event], unreadable_lines: int = 0, damaged: bool = False) -> RunSummary:
    """Everything that a report says about the last run in `events`.

    Args:
        unreadable_lines: of the log that they are from.
        damaged: some of those were of the last run, and may have said anything.
    """
    usable, ignored = _usable(events)
    run = _last_run(usable)
    job = _job(run)
    steps = applied_steps(run, job.global_batch_size if job else None)
    job = _with_start(job, run, steps)
    deaths, recoveries = find_deaths(run, steps)
    finish = _last(run, names.RUN_FINISHED) or {}
    checkpoint = _last(run, names.CHECKPOINT) or {}
    loss_name = next((name for step in steps for name in step.loss), None)
    counted = _count_samples(run, job, steps)
    lacking = _lacking(run, job, steps)
    missing = sum(event["events"] for event in _all(run, names.LOG_GAP))
    damaged = bool(damaged or ignored or lacking or missing)
    return RunSummary(
        completed=finish.get("exit_code") == 0,
        exit_code=finish.get("exit_code"),
        reason=finish.get("reason"),
        started_at=number(run[0]["time"]) if run else None,
        last_event_at=max((number(event["time"]) for event in run), default=None),
        iterations=_last_iteration(job, steps),
        job=job,
        workers_at_start=_workers_at_start(run),
        workers_at_end=_workers_at_end(run),
        places={e["worker"]: where(e) for e in _all(run, names.WORKER_STARTED) if e.get("worker") is not None},
        deaths=tuple(deaths),
        came_back=_taken_in(run, anew=True),
        joined=_taken_in(run, anew=False),
        recoveries=tuple(recoveries),
        plans=find_plans(run, recoveries, steps),
        loss_name=loss_name,
        loss={s.iteration: s.loss[loss_name] for s in steps if loss_name is not None and loss_name in s.loss},
        grad_norm={s.iteration: s.grad_norm for s in steps if s.grad_norm is not None},
        samples_per_second={s.iteration: s.samples_per_second for s in steps if s.samples_per_second is not None},
        skipped_iterations=tuple(s.iteration for s in steps if s.skipped),
        samples_consumed=counted.consumed if counted else None,
        samples_applied_twice=counted.applied_twice if counted and not damaged else None,
        samples_lost=counted.lost if counted and not damaged else None,
        samples_out_of_place=counted.out_of_place if counted and not damaged else None,
        evaluations=tuple(_evaluation(event) for event in _all(run, names.EVALUATION)),
        drills=tuple(_drill(event) for event in _all(run, names.DRILL)),
        failures=tuple(Failure(event["failed"], event["error"]) for event in _all(run, names.WORKER_FAILED)),
        salvages=tuple(_salvage(event) for event in _all(run, names.SALVAGE)),
        verdicts=tuple(_finding(event) for event in _all(run, names.VERDICT)),
        detection=_detection(_last(run, names.DETECTION)),
        stalls=_stalls(run),
        last_checkpoint=checkpoint.get("path"),
        last_checkpoint_iteration=checkpoint.get("iteration"),
        usual_iteration_s=usual_duration(steps),
        last_step_at=max((step.ended_at for step in steps if step.ended_at is not None), default=None),
        log_damaged=damaged,
        events_missing=missing,
        iterations_not_in_log=lacking,
        unreadable_lines=unreadable_lines,
        ignored_events=ignored,
    )


def compare(loss: Mapping[int, float], loss_reference: Mapping[int, float]) -> float | None:
    """Largest |loss - reference| / |reference| over the iterations that both have; None if there is none."""
    shared = loss.keys() & loss_reference.keys()
    return max((_relative_difference(loss[i], loss_reference[i]) for i in shared), default=None)


def with_reference(summary: RunSummary, reference: RunSummary, *others: RunSummary) -> RunSummary:
    """`summary` with its loss compared to the loss of an uninterrupted run.

    Args:
        others: uninterrupted runs of the same job which sum in other orders, as with another data-parallel degree. How
            far they are from `reference` is what the order alone can do in this job, and sets the bound.
    """
    apart = [apart for other in others if (apart := compare(other.loss, reference.loss)) is not None]
    return replace(
        summary,
        loss_reference=reference.loss,
        loss_max_relative_difference=compare(summary.loss, reference.loss),
        compared_iterations=len(summary.loss.keys() & reference.loss.keys()),
        loss_bound=max(MARGIN * max(apart), LEAST_BOUND) if apart else REORDERED,
    )


def _relative_difference(value: float, reference: float) -> float:
    if value == reference or (math.isnan(value) and math.isnan(reference)):
        return 0.0
    if not math.isfinite(value - reference) or reference == 0:
        return math.inf
    return abs(value - reference) / abs(reference)


def _usable(events: Iterable[Event]) -> tuple[list[Event], dict[str, int]]:
    usable: list[Event] = []
    ignored: Counter[str] = Counter()
    for event in events:
        wrong = problems(event)
        if wrong:
            ignored[wrong[0]] += 1
        elif event["event"] in EVENTS:
            usable.append(event)
    return usable, dict(ignored)


def _last_run(events: Sequence[Event]) -> list[Event]:
    starts = [index for index, event in enumerate(events) if event["event"] == names.RUN_STARTED]
    return list(events[starts[-1] :]) if starts else list(events)


def _all(events: Iterable[Event], name: str) -> list[Event]:
    return [event for event in events if event["event"] == name]


def _last(events: Iterable[Event], name: str) -> Event | None:
    return next(reversed(_all(events, name)), None)


def _job(events: Sequence[Event]) -> Job | None:
    event = next(iter(_all(events, names.JOB)), None)
    if event is None:
        return None
    known = {name: event[name] for name in (f.name for f in fields(Job)) if event.get(name) is not None}
    return Job(**known)


def _with_start(job: Job | None, events: Sequence[Event], steps: Sequence[Step]) -> Job | None:
    """`job` with the iteration that it began after: Megatron loads checkpoints only after the job event is written."""
    told = next((event.get("first_iteration") for event in _all(events, names.JOB)), None)
    if job is None or told is not None or not steps:
        return job
    return replace(job, first_iteration=steps[0].iteration - 1)


def _last_iteration(job: Job | None, steps: Sequence[Step]) -> int:
    return steps[-1].iteration if steps else job.first_iteration if job else 0


def _count_samples(events: Sequence[Event], job: Job | None, steps: Sequence[Step]) -> SampleCount | None:
    fed = _all(events, names.SAMPLES)
    if not fed or job is None:
        return None
    applied = applied_attempts(events)
    feeds = [Feed(e["iteration"], e["samples"]) for e in fed if (e["iteration"], e["epoch"]) in applied]
    return count_samples(feeds, job.first_iteration, _last_iteration(job, steps), job.global_batch_size)


def _lacking(events: Sequence[Event], job: Job | None, steps: Sequence[Step]) -> tuple[int, ...]:
    """Iterations that must have been done, as later ones were, and of which the log says nothing, or nothing of their
    samples where it says that of others."""
    if job is None or not steps:
        return ()
    told = {step.iteration for step in steps}
    fed = {event["iteration"] for event in _all(events, names.SAMPLES)}
    due = range(job.first_iteration + 1, _last_iteration(job, steps) + 1)
    return tuple(iteration for iteration in due if iteration not in told or (fed and iteration not in fed))


def _workers_at_start(events: Sequence[Event]) -> Workers | None:
    for event in events:
        if event["event"] == names.EPOCH_STARTED:
            return _workers(event["plan"], set())
    started = _last(events, names.RUN_STARTED)
    return Workers(started["world_size"], 0) if started else None


def _workers_at_end(events: Sequence[Event]) -> Workers | None:
    starts = [index for index, event in enumerate(events) if event["event"] == names.EPOCH_STARTED]
    if not starts:
        return _workers_at_start(events)
    died_since = {event["dead"] for event in _all(events[starts[-1] :], names.WORKER_DEAD)}
    return _workers(events[starts[-1]]["plan"], died_since)


def _taken_in(events: Sequence[Event], anew: bool) -> tuple[int, ...]:
    """Workers that were in no plan at first: those that are not the first in their places, or those that are."""
    waited = _all(events, names.WORKER_WAITING)
    asked = {event["waiting"] for event in waited if (event["waiting"] != event["place"]) is anew}
    plans = [event["plan"] for event in _all(events, names.EPOCH_STARTED)]
    return tuple(sorted({worker for plan in plans for worker in asked & (shape.working(plan) | shape.standbys(plan))}))


def _workers(plan: shape.Plan, dead: set[int]) -> Workers:
    working, standbys = shape.working(plan), shape.standbys(plan)
    in_force = not dead & working
    return Workers(len(working - dead), len(standbys - dead), shape.describe(plan) if in_force else None)


def _evaluation(event: Event) -> Evaluation:
    return Evaluation(event["iteration"], {name: number(value) for name, value in event["loss"].items()})


def _drill(event: Event) -> Drill:
    return Drill(event["action"], event["target"], event.get("iteration"), event.get("point"))


def _finding(event: Event) -> Finding:
    known: dict[str, Any] = {field.name: event.get(field.name) for field in fields(Finding)}
    return Finding(**{**known, "workers": tuple(event["workers"])})


def _detection(event: Event | None) -> Detection | None:
    if event is None:
        return None
    held_up_s = event.get("held_up_s") or {}
    return Detection(event["iterations"], event["records"], event["faults"], event["warm"], held_up_s)


def _stalls(events: Sequence[Event]) -> tuple[Stall, ...]:
    """Each once, as it was told last."""
    found: dict[int, Stall] = {}
    for event in _all(events, names.STALL):
        seconds, usual_s = number(event["seconds"]), number(event["usual_s"])
        found[event["iteration"]] = Stall(event["iteration"], seconds, usual_s, event["over"], event.get("meanwhile"))
    return tuple(found.values())


def _salvage(event: Event) -> Salvage:
    missing = tuple((stage, rank) for stage, rank in event.get("missing") or ())
    return Salvage(event["iteration"], event["path"], event["complete"], missing)
