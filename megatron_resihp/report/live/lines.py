# SPDX-License-Identifier: Apache-2.0
"""An event of a run -> its lines on the terminal. Some events have no lines.

Lines that depend on earlier events is in `progress`. May import: the standard library and this package's modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import singledispatch

from megatron_resihp.events.detection import (
    DetectionFailed,
    DetectionResumed,
    Notice,
    Suspicion,
    Validation,
    Verdict,
)
from megatron_resihp.events.epochs import Reconfiguration
from megatron_resihp.events.event import Event
from megatron_resihp.events.injections import Drill, DrillRefused, DrillSet
from megatron_resihp.events.job import Exposed, LogFailed, RunFinished, Stall
from megatron_resihp.events.replanning import (
    ChangeMeasured,
    ChangeRefused,
    NoPlan,
    PlanChange,
    PlanFailed,
    Planned,
    PolicyFailed,
    Proposal,
    WouldChange,
)
from megatron_resihp.events.training import Checkpoint
from megatron_resihp.events.workers import (
    LinkFailed,
    NodeLeft,
    WorkerFailed,
    WorkerRestarted,
    WorkersLeft,
    WorkerWaiting,
)
from megatron_resihp.report.words import count, duration, listing, verdict, worker_at

Places = Mapping[int, str]
"""Each worker's machine and GPU, in words."""


@singledispatch
def lines_of(event: Event, places: Places) -> list[str]:
    """The lines for one event."""
    return []


# ---- workers and nodes


@lines_of.register
def _worker_failed(event: WorkerFailed, places: Places) -> list[str]:
    return [f"{worker_at(event.failed, places)} raised: {event.error}"]


@lines_of.register
def _worker_restarted(event: WorkerRestarted, places: Places) -> list[str]:
    return [f"worker {event.restarted} starts in place of worker {event.instead_of}"]


@lines_of.register
def _worker_waiting(event: WorkerWaiting, places: Places) -> list[str]:
    return [f"worker {event.waiting} is ready to join"]


@lines_of.register
def _link_failed(event: LinkFailed, places: Places) -> list[str]:
    return [f"{event.reason}; {count(len(event.left_out), 'worker')} left out"]


@lines_of.register
def _node_left(event: NodeLeft, places: Places) -> list[str]:
    return [f"node {event.node} has left with {count(len(event.left), 'worker')}"]


@lines_of.register
def _workers_left(event: WorkersLeft, places: Places) -> list[str]:
    return [f"{count(len(event.left), 'worker')} left: {', '.join(map(str, event.left))}"]


# ---- the job


@lines_of.register
def _exposed(event: Exposed, places: Places) -> list[str]:
    return [event.said]


@lines_of.register
def _stall(event: Stall, places: Places) -> list[str]:
    lasted, usual = duration(event.seconds), duration(event.usual_s)
    if event.over:
        return [f"iteration {event.iteration + 1} done after {lasted}; one usually takes {usual}"]
    meanwhile = f"; {event.meanwhile} under way or due" if event.meanwhile else ""
    after = f"after iteration {event.iteration}"
    return [f"no iteration finished for {lasted} {after}; one usually takes {usual}{meanwhile}"]


@lines_of.register
def _checkpoint(event: Checkpoint, places: Places) -> list[str]:
    took = f" in {duration(event.seconds)}" if event.seconds is not None else ""
    return [f"checkpoint of iteration {event.iteration} written{took}: {event.path}"]


@lines_of.register
def _run_finished(event: RunFinished, places: Places) -> list[str]:
    if event.exit_code == 0:
        return []
    reason = f": {event.reason}" if event.reason else ""
    return [f"run ended with exit code {event.exit_code}{reason}"]


# ---- plans


@lines_of.register
def _plan_failed(event: PlanFailed, places: Places) -> list[str]:
    follows = "complete uniform replicas" if event.number is None else "the plan before"
    who = worker_at(event.failed, places)
    return [f"the plan's first step failed, so {follows} will follow; {who} raised: {event.error}"]


@lines_of.register
def _plan_change(event: PlanChange, places: Places) -> list[str]:
    return [f"change {event.number} of the plan, {event.why}:", *(f"  {line}" for line in event.changes)]


@lines_of.register
def _change_refused(event: ChangeRefused, places: Places) -> list[str]:
    return [f"change of plan refused ({event.why}): {event.reason}"]


@lines_of.register
def _reconfiguration(event: Reconfiguration, places: Places) -> list[str]:
    when = f"after iteration {event.resumed_iteration}"
    return [f"change {event.number} done {when}; stood still for {duration(event.stood_still_s)}"]


@lines_of.register
def _change_measured(event: ChangeMeasured, places: Places) -> list[str]:
    before, after = duration(event.before_s), duration(event.after_s)
    return [f"change {event.number}: iterations took {before} before it, and take {after} now"]


@lines_of.register
def _planned(event: Planned, places: Places) -> list[str]:
    if event.instead_of:
        return [f"planned by {event.strategy} instead of {event.instead_of}: {event.reason}"]
    seconds = f" in {duration(event.planning_s)}" if event.planning_s is not None else ""
    return [f"planned{' ahead' if event.made_ahead else ''} by {event.strategy}{seconds}"]


@lines_of.register
def _would_change(event: WouldChange, places: Places) -> list[str]:
    return [f"another plan would pay off: {event.why}; --resihp-act act would take it"]


@lines_of.register
def _proposal(event: Proposal, places: Places) -> list[str]:
    return [f"another plan would pay off: {event.why}; see `resihp apply`: {event.path}"]


@lines_of.register
def _no_plan(event: NoPlan, places: Places) -> list[str]:
    return [f"the planner has no other plan: {event.reason}"]


@lines_of.register
def _policy_failed(event: PolicyFailed, places: Places) -> list[str]:
    return [f"the policy gave up, training goes on: {event.error}"]


# ---- fault injections


@lines_of.register
def _injection(event: Drill, places: Places) -> list[str]:
    iteration = "" if event.iteration is None else f" at iteration {event.iteration}"
    point = f" ({event.point})" if event.point else ""
    return [f"injected: {event.action} {event.target}{iteration}{point}"]


@lines_of.register
def _injection_set(event: DrillSet, places: Places) -> list[str]:
    if not event.workers:
        return ["injected: all workers and links at full speed"]
    name = "worker" if len(event.workers) == 1 else "link"
    return [f"injected: {name} {_joined(event.workers)} at {event.factor:g} of its speed"]


@lines_of.register
def _injection_refused(event: DrillRefused, places: Places) -> list[str]:
    return [f"injection for {_joined(event.workers)} not set: {event.reason}"]


def _joined(workers: Sequence[int]) -> str:
    return "-".join(map(str, workers))


# ---- the detector


@lines_of.register
def _verdict(event: Verdict, places: Places) -> list[str]:
    return [f"iteration {event.iteration}: {verdict(event, places)}"]


@lines_of.register
def _suspicion(event: Suspicion, places: Places) -> list[str]:
    workers = listing(worker_at(worker, places) for worker in event.workers)
    if event.tested:
        return [f"iteration {event.iteration}: the test of {workers} found no slow worker; they remain suspects"]
    slow = f"one of {workers} runs at {100 * event.speed:.0f} % of its healthy speed"
    return [f"iteration {event.iteration}: {slow}; testing them now"]


@lines_of.register
def _validation(event: Validation, places: Places) -> list[str]:
    return [f"iteration {event.iteration}: worker {event.worker} was tested for {duration(event.seconds)}"]


@lines_of.register
def _notice(event: Notice, places: Places) -> list[str]:
    workers = listing(f"worker {worker}" for worker in event.workers)
    said = f"iteration {event.iteration}: {event.what.replace('_', ' ')} held up {workers}"
    if (event.times or 1) == 1 or event.total_s is None or event.longest_s is None:
        return [f"{said} for {duration(event.seconds)}"]
    total, longest = duration(event.total_s), duration(event.longest_s)
    return [f"{said}; {event.times} iterations so far, for {total} in all, {longest} at most"]


@lines_of.register
def _detection_resumed(event: DetectionResumed, places: Places) -> list[str]:
    if not event.fits:
        return [f"the costs in {event.path} are not this job's: slow workers are looked for after the usual warm-up"]
    return [f"slow workers are looked for from iteration {event.iteration + 1} on, by the costs in {event.path}"]


@lines_of.register
def _detection_failed(event: DetectionFailed, places: Places) -> list[str]:
    return [f"the detector's {event.part} gave up, training goes on: {event.error}"]


@lines_of.register
def _log_failed(event: LogFailed, places: Places) -> list[str]:
    return [f"{event.part} can't be written, training goes on: {event.error}"]
