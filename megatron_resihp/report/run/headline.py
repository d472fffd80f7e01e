# SPDX-License-Identifier: Apache-2.0
"""The first sentence of a report: the run's progress, the failures it survived, and whether any sample was lost.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

from typing import Final

from megatron_resihp.report.run import standing
from megatron_resihp.report.run.run_summary import RunSummary
from megatron_resihp.report.words import count, duration, listing

SIGNALLED: Final = 128
"""Exit codes above this name the signal that asked the run to stop."""


def headline(summary: RunSummary) -> str:
    """For example "Reached iteration 40 of 40; 2 recoveries; 3 workers dead; no sample lost or repeated"."""
    recoveries = count(len(summary.recoveries), "recovery", "recoveries")
    deaths = f"{count(len(summary.deaths), 'worker')} dead"
    back = [f"{len(summary.came_back)} came back"] if summary.came_back else []
    joined = [f"{count(len(summary.joined), 'worker')} joined"] if summary.joined else []
    chosen = sum(plan.by_choice for plan in summary.plans)
    changes = [count(chosen, "voluntary change of plan", "voluntary changes of plan")] if chosen else []
    return "; ".join([_progress(summary), recoveries, deaths, *back, *joined, *changes, samples(summary)])


def in_order(summary: RunSummary) -> bool:
    """Whether the run completed, and its log shows no fault."""
    return summary.completed and not any(_sample_faults(summary)) and not (summary.failures or summary.log_damaged)


def stopped(summary: RunSummary) -> bool:
    """Whether the run was asked to stop, and stopped."""
    return (summary.exit_code or 0) > SIGNALLED and not (summary.reason or "").startswith("killed")


def samples(summary: RunSummary) -> str:
    """The fate of the training samples, in words."""
    if summary.samples_consumed is None:
        return "samples not recorded"
    if summary.log_damaged:
        return "samples: can't tell: log damaged"
    lost, twice, elsewhere = _sample_faults(summary)
    faults = [
        *([f"{lost:,} LOST"] if lost else []),
        *([f"{twice:,} REPEATED"] if twice else []),
        *([f"{elsewhere:,} OUT OF PLACE"] if elsewhere else []),
    ]
    return f"samples: {listing(faults)}" if faults else "no sample lost or repeated"


def _sample_faults(summary: RunSummary) -> tuple[int, int, int]:
    return (summary.samples_lost or 0, summary.samples_applied_twice or 0, summary.samples_out_of_place or 0)


def _progress(summary: RunSummary) -> str:
    where = f"iteration {summary.iterations:,}"
    if summary.job is not None:
        where += f" of {summary.job.train_iters:,}"
    if summary.exit_code is None:
        return _unfinished(summary, where)
    if summary.completed and summary.events_missing:
        return f"Ended with exit code 0, but the log is incomplete: {where} is its last"
    if summary.completed:
        return f"Reached {where}"
    if stopped(summary):
        saved = summary.last_checkpoint_iteration == summary.iterations
        return f"STOPPED at {where}, {'saved' if saved else 'not saved'}"
    return f"FAILED (exit {summary.exit_code}) at {where}"


def _unfinished(summary: RunSummary, where: str) -> str:
    if summary.standing is None:
        return f"No end is in the log: {where}"
    state, silent = summary.standing.state, duration(summary.standing.silent_s)
    what = "event" if summary.last_step_at is None else "step"
    usual = summary.usual_iteration_s
    usually = "" if usual is None else f", usually one takes {duration(usual)}"
    match state:
        case standing.RUNNING:
            return f"Running (last {what} {silent} ago): {where}"
        case standing.STALLED:
            return f"STALLED (last {what} {silent} ago{usually}): {where}"
        case standing.LEADERLESS:
            return f"WITHOUT A COORDINATOR, waiting for another (last {what} {silent} ago): {where}"
        case standing.COORDINATOR_LOST:
            return f"COORDINATOR LOST (last {what} {silent} ago): {where}"
        case standing.ENDED:
            return f"ENDED WITHOUT A WORD (last {what} {silent} ago): {where}"
        case _:
            return f"Running or ended, its launcher can't be reached from here (last {what} {silent} ago): {where}"
