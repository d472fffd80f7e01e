# SPDX-License-Identifier: Apache-2.0
"""Events of a run -> RunSummary.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from megatron_resihp.events import detection, injections, training
from megatron_resihp.events import job as job_events
from megatron_resihp.events.epochs import EpochStarted
from megatron_resihp.events.event import Event, UnknownEvent
from megatron_resihp.events.job import LogGap, RunFinished, RunStarted
from megatron_resihp.events.log import EventFile
from megatron_resihp.events.training import Checkpoint, Samples
from megatron_resihp.events.workers import WorkerDead, WorkerFailed, WorkerStarted, WorkerWaiting
from megatron_resihp.report.run import shape
from megatron_resihp.report.run.epochs import find_plans
from megatron_resihp.report.run.recoveries import find_deaths
from megatron_resihp.report.run.run_summary import (
    LEAST_BOUND,
    REORDERED,
    Detection,
    Drill,
    EmergencyCheckpoint,
    Failure,
    Finding,
    Job,
    RunSummary,
    Stall,
    Workers,
)
from megatron_resihp.report.run.samples import Feed, SampleCount, count_samples
from megatron_resihp.report.run.steps import Step, applied_attempts, applied_steps, usual_duration
from megatron_resihp.report.words import where

MARGIN: Final = 2.0
"""The factor by which a run with a third order may differ more than two runs with other orders."""

__all__ = ["RunSummary", "compare", "summarize", "summarize_log", "with_reference"]


def summarize_log(log: EventFile) -> RunSummary:
    """The summary of the last run in a log, with the log's faults."""
    return summarize(log.events, len(log.malformed) + log.truncated, log.damaged, log.ignored)


def summarize(
    events: Iterable[Event],
    unreadable_lines: int = 0,
    damaged: bool = False,
    ignored: Mapping[str, int] = MappingProxyType({}),
) -> RunSummary:
    """The summary of the last run in `events`.

    Args:
        unreadable_lines: the number of such lines in the log of these events.
        damaged: whether some of these lines belong to the last run; their contents are unknown.
        ignored: the number of unusable events in the log, by their fault.
    """
    run = _last_run([event for event in events if not isinstance(event, UnknownEvent)])
    job = _job(run)
    steps = applied_steps(run, job.global_batch_size if job else None)
    job = _with_start(job, steps, _all(run, Samples))
    deaths, recoveries = find_deaths(run, steps)
    finish, checkpoint = _last(run, RunFinished), _last(run, Checkpoint)
    loss_name = next((name for step in steps for name in step.loss), None)
    counted = _count_samples(run, job, steps)
    lacking = _lacking(run, job, steps)
    missing = sum(gap.events for gap in _all(run, LogGap))
    damaged = bool(damaged or ignored or lacking or missing)
    return RunSummary(
        completed=finish is not None and finish.exit_code == 0,
        exit_code=finish.exit_code if finish else None,
        reason=finish.reason if finish else None,
        started_at=run[0].time if run else None,
        last_event_at=max((event.time for event in run), default=None),
        iterations=_last_iteration(job, steps),
        job=job,
        workers_at_start=_workers_at_start(run),
        workers_at_end=_workers_at_end(run),
        places={each.worker: where(each) for each in _all(run, WorkerStarted) if each.worker is not None},
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
        drills=tuple(_drill(event) for event in _all(run, injections.Drill)),
        failures=tuple(Failure(event.failed, event.error) for event in _all(run, WorkerFailed)),
        salvages=tuple(_emergency_checkpoint(event) for event in _all(run, training.EmergencyCheckpoint)),
        verdicts=tuple(_finding(event) for event in _all(run, detection.Verdict)),
        detection=_detection(_last(run, detection.Detection)),
        stalls=_stalls(run),
        last_checkpoint=checkpoint.path if checkpoint else None,
        last_checkpoint_iteration=checkpoint.iteration if checkpoint else None,
        usual_iteration_s=usual_duration(steps),
        last_step_at=max((step.ended_at for step in steps if step.ended_at is not None), default=None),
        log_damaged=damaged,
        events_missing=missing,
        iterations_not_in_log=lacking,
        unreadable_lines=unreadable_lines,
        ignored_events=dict(ignored),
    )


def compare(loss: Mapping[int, float], loss_reference: Mapping[int, float]) -> float | None:
    """Largest |loss - reference| / |reference| over the iterations that both have; None if there is none."""
    shared = loss.keys() & loss_reference.keys()
    return max((_relative_difference(loss[i], loss_reference[i]) for i in shared), default=None)


def with_reference(summary: RunSummary, reference: RunSummary, *others: RunSummary) -> RunSummary:
    """`summary` with its loss compared to the loss of an uninterrupted run.

    Args:
        others: uninterrupted runs of the same job that sum in other orders, as with another data-parallel degree. Their
            distance from `reference` is the effect of the order alone in this job, and sets the bound.
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


def _last_run(events: Sequence[Event]) -> list[Event]:
    starts = [index for index, event in enumerate(events) if isinstance(event, RunStarted)]
    return list(events[starts[-1] :]) if starts else list(events)


def _all[E: Event](events: Iterable[Event], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def _last[E: Event](events: Iterable[Event], kind: type[E]) -> E | None:
    return next(reversed(_all(events, kind)), None)


def _job(events: Sequence[Event]) -> Job | None:
    told = next(iter(_all(events, job_events.Job)), None)
    if told is None or told.global_batch_size is None or told.train_iters is None:
        return None
    return Job(
        told.global_batch_size, told.train_iters, 0, told.tensor_parallel,
        told.pipeline_parallel, told.micro_batch_size, told.micro_batches, told.seq_length,
        told.batch_steps or (),
    )  # fmt: skip


def _with_start(job: Job | None, steps: Sequence[Step], fed: Iterable[Samples]) -> Job | None:
    """`job` with what was before its first iteration: Megatron loads checkpoints after the job event is written."""
    if job is None or not steps:
        return job
    first = steps[0].iteration
    consumed = next((each.consumed for each in fed if each.iteration == first), None)
    return replace(job, first_iteration=first - 1, consumed_at_start=consumed)


def _last_iteration(job: Job | None, steps: Sequence[Step]) -> int:
    return steps[-1].iteration if steps else job.first_iteration if job else 0


def _count_samples(events: Sequence[Event], job: Job | None, steps: Sequence[Step]) -> SampleCount | None:
    fed = _all(events, Samples)
    if not fed or job is None:
        return None
    applied = applied_attempts(events)
    feeds = [Feed(each.iteration, each.samples) for each in fed if (each.iteration, each.epoch) in applied]
    return count_samples(feeds, job.first_iteration, _last_iteration(job, steps), job.samples_before)


def _lacking(events: Sequence[Event], job: Job | None, steps: Sequence[Step]) -> tuple[int, ...]:
    """Iterations before the last one that the log lacks, or whose samples it lacks although it has other iterations'
    samples.
    """
    if job is None or not steps:
        return ()
    told = {step.iteration for step in steps}
    fed = {event.iteration for event in _all(events, Samples)}
    due = range(job.first_iteration + 1, _last_iteration(job, steps) + 1)
    return tuple(iteration for iteration in due if iteration not in told or (fed and iteration not in fed))


def _workers_at_start(events: Sequence[Event]) -> Workers | None:
    epoch = next(iter(_all(events, EpochStarted)), None)
    if epoch is not None:
        return _workers(epoch.plan, set())
    started = _last(events, RunStarted)
    return Workers(started.world_size, 0) if started else None


def _workers_at_end(events: Sequence[Event]) -> Workers | None:
    plan, died_since = None, set[int]()
    for event in events:
        if isinstance(event, EpochStarted):
            plan, died_since = event.plan, set()
        elif isinstance(event, WorkerDead):
            died_since.add(event.dead)
    return _workers_at_start(events) if plan is None else _workers(plan, died_since)


def _taken_in(events: Sequence[Event], anew: bool) -> tuple[int, ...]:
    """Workers that were in no plan at first: with `anew` restarted workers, otherwise the first of their places."""
    asked = {each.waiting for each in _all(events, WorkerWaiting) if (each.waiting != each.place) is anew}
    plans = [event.plan for event in _all(events, EpochStarted)]
    return tuple(sorted({worker for plan in plans for worker in asked & (shape.working(plan) | shape.standbys(plan))}))


def _workers(plan: shape.Plan, dead: set[int]) -> Workers:
    working, standbys = shape.working(plan), shape.standbys(plan)
    in_force = not dead & working
    return Workers(len(working - dead), len(standbys - dead), shape.describe(plan) if in_force else None)


def _drill(event: injections.Drill) -> Drill:
    return Drill(event.action, event.target, event.iteration, event.point)


def _finding(event: detection.Verdict) -> Finding:
    return Finding(
        event.kind, event.change, event.workers, event.speed, event.since, event.iteration, event.speed_low,
        event.speed_high,
    )  # fmt: skip


def _detection(event: detection.Detection | None) -> Detection | None:
    if event is None:
        return None
    return Detection(event.iterations, event.records, event.faults, event.warm, event.held_up_s or {})


def _stalls(events: Sequence[Event]) -> tuple[Stall, ...]:
    """Each stall once, from its latest event."""
    found = {
        event.iteration: Stall(event.iteration, event.seconds, event.usual_s, event.over, event.meanwhile)
        for event in _all(events, job_events.Stall)
    }
    return tuple(found.values())


def _emergency_checkpoint(event: training.EmergencyCheckpoint) -> EmergencyCheckpoint:
    return EmergencyCheckpoint(event.iteration, event.path, event.complete, event.missing or ())
