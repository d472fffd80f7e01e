"""The first sentence of a report: how far the run came, what it survived, and whether any sample was lost.

May import: the standard library and this room's modules.
"""

from __future__ import annotations

from megatron_resihp.report.run_summary import RunSummary
from megatron_resihp.report.words import count, listing


def headline(summary: RunSummary) -> str:
    """For example "Reached iteration 40 of 40; 2 recoveries; 3 workers dead; no sample lost or repeated"."""
    recoveries = count(len(summary.recoveries), "recovery", "recoveries")
    deaths = f"{count(len(summary.deaths), 'worker')} dead"
    back = [f"{len(summary.came_back)} came back"] if summary.came_back else []
    joined = [f"{count(len(summary.joined), 'worker')} joined"] if summary.joined else []
    chosen = sum(plan.by_choice for plan in summary.plans)
    changes = [f"{count(chosen, 'change')} of plan by choice"] if chosen else []
    return "; ".join([_progress(summary), recoveries, deaths, *back, *joined, *changes, samples(summary)])


def in_order(summary: RunSummary) -> bool:
    """Whether nothing that was recorded speaks against the run."""
    return summary.completed and not any(_sample_faults(summary)) and not summary.failures


def samples(summary: RunSummary) -> str:
    """What became of the training samples."""
    if summary.samples_consumed is None:
        return "samples not recorded"
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
        return f"Not finished (still running, or cut off): {where}"
    if summary.completed:
        return f"Reached {where}"
    return f"FAILED (exit {summary.exit_code}) at {where}"
