# SPDX-License-Identifier: Apache-2.0
"""RunSummary -> one page on a terminal, for a reader who has ten seconds.

May import: the standard library, rich and this package's modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_resihp.control.worker.saved_state import command_for
from megatron_resihp.report.run.epochs import PlanInForce
from megatron_resihp.report.run.headline import headline, in_order, stopped
from megatron_resihp.report.run.recoveries import Death, Recovery
from megatron_resihp.report.run.run_summary import EmergencyCheckpoint, RunSummary, Workers
from megatron_resihp.report.words import (
    NONE,
    count,
    duration,
    listing,
    milliseconds,
    rate,
    relative_difference,
    size,
    verdict,
    worker_at,
)

DEATHS = "Deaths (iteration: the last one applied; ms: until noticed)"
MAX_ROWS = 20
"""The most rows of a table; a longer table shows its last rows."""


def render(summary: RunSummary, console: Console) -> None:
    """Print the page."""
    console.print(Text(headline(summary), style=f"bold {_colour(summary)}"), soft_wrap=True)
    for line in _facts(summary):
        console.print(Text(f"  {line}"), soft_wrap=True)
    if summary.deaths:
        _section(console, DEATHS, _deaths(summary), len(summary.deaths))
    if summary.recoveries:
        _section(
            console,
            "Recoveries (resumed, first step: since the death)",
            _recoveries(summary.recoveries),
            len(summary.recoveries),
        )
    if len(summary.plans) > 1:
        title = "Plans (layers of each stage with embedding and head; micro-batches of each replica)"
        _section(console, title, _plans(summary.plans), len(summary.plans))
    if any(recovery.phases for recovery in summary.recoveries):
        title = "Time of each recovery in ms (slowest worker of each phase; agree and ready include waiting)"
        _section(console, title, _phases(summary.recoveries), len(summary.recoveries))


def _colour(summary: RunSummary) -> str:
    if in_order(summary):
        return "green"
    uncertain = summary.exit_code is None or stopped(summary) or (summary.completed and summary.log_damaged)
    return "yellow" if uncertain else "red"


def _section(console: Console, title: str, table: Table, rows: int) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    console.print(table)
    if rows > MAX_ROWS:
        console.print(Text(f"  the last {MAX_ROWS} of {rows:,}; --json has them all"))


def _facts(summary: RunSummary) -> Iterator[str]:
    if summary.reason is not None and not summary.completed:
        yield f"reason: {summary.reason}"
    start, end = summary.workers_at_start, summary.workers_at_end
    if start is not None and end is not None:
        changed = start != end or summary.deaths
        yield f"workers: {_workers(start)}" + (f" -> {_workers(end)}" if changed else " throughout")
    if summary.loss:
        yield _loss(summary)
    if summary.compared_iterations is not None:
        yield _comparison(summary)
    yield from _speeds(summary)
    yield from _stalls(summary)
    if summary.skipped_iterations:
        yield f"{count(len(summary.skipped_iterations), 'iteration')} skipped for overflow"
    if summary.last_checkpoint is not None:
        yield f"last checkpoint: {summary.last_checkpoint}"
    yield from _trouble(summary)


def _speeds(summary: RunSummary) -> Iterator[str]:
    """The detector's findings."""
    if summary.detection is not None and not summary.verdicts:
        judged = count(summary.detection.iterations, "iteration")
        warm = "" if summary.detection.warm else ", too few to learn what is normal"
        yield f"no worker or link was found slow ({judged} judged{warm})"
    for found in summary.verdicts[-MAX_ROWS:]:
        yield f"iteration {found.iteration:,}: {verdict(found, summary.places)}"
    if len(summary.verdicts) > MAX_ROWS:
        yield f"the last {MAX_ROWS} of {len(summary.verdicts):,} verdicts; --json has them all"
    if summary.detection is not None and summary.detection.faults:
        faults = summary.detection.faults.items()
        yield "measurements left out: " + ", ".join(f"{times:,} {name.replace('_', ' ')}" for name, times in faults)


def _stalls(summary: RunSummary) -> Iterator[str]:
    """The stalls, and the delays that no device caused. Recoveries have a table."""
    stalls = [stall for stall in summary.stalls if stall.meanwhile != "recovery"]
    for stall in stalls[-MAX_ROWS:]:
        lasted = f"{'' if stall.over else 'at least '}{duration(stall.seconds)}"
        why = f"; {stall.meanwhile} under way or due" if stall.meanwhile else ""
        yield f"stood still after iteration {stall.iteration:,} for {lasted}, usually {duration(stall.usual_s)}{why}"
    if len(stalls) > MAX_ROWS:
        yield f"the last {MAX_ROWS} of {len(stalls):,} times that it stood still; --json has them all"
    for what, seconds in (summary.detection.held_up_s if summary.detection is not None else {}).items():
        if seconds >= 1:
            yield f"{what.replace('_', ' ')} held up workers for {duration(float(seconds))} in all"


def _trouble(summary: RunSummary) -> Iterator[str]:
    for failure in summary.failures[-MAX_ROWS:]:
        yield f"{worker_at(failure.worker, summary.places)} raised: {failure.error}"
    if summary.salvages:
        yield _emergency_checkpoints(summary.salvages)
    if summary.unreadable_lines:
        yield f"{count(summary.unreadable_lines, 'line')} of the event log could not be read"
    if summary.events_missing:
        yield f"{count(summary.events_missing, 'event')} could not be written to the event log"
    if summary.iterations_not_in_log:
        few = ", ".join(f"{iteration:,}" for iteration in summary.iterations_not_in_log[:MAX_ROWS])
        more = ", …" if len(summary.iterations_not_in_log) > MAX_ROWS else ""
        yield f"the event log has gaps at iteration {few}{more}"
    for problem, times in summary.ignored_events.items():
        yield f"{count(times, 'event')} left out: {problem}"


def _emergency_checkpoints(saved: Sequence[EmergencyCheckpoint]) -> str:
    missing = sorted({shard for each in saved for shard in each.missing})
    lacking = listing(f"stage {stage} TP rank {rank}" for stage, rank in missing) if missing else "parts"
    complete = all(each.complete for each in saved)
    state = "all state" if complete else f"state INCOMPLETE, missing {lacking}"
    where = saved[0].path if len(saved) == 1 else f"{len(saved)} files, the first is {saved[0].path}"
    command = command_for(saved[0].path) if complete else ""
    how = f"; go on from it with {command}" if command else ""
    return f"saved after iteration {saved[-1].iteration:,}: {state}: {where}{how}"


def _workers(workers: Workers) -> str:
    shape = f" ({workers.shape})" if workers.shape else ""
    standbys = f" + {count(workers.standbys, 'standby')}" if workers.standbys else ""
    return f"{workers.working} working{shape}{standbys}"


def _loss(summary: RunSummary) -> str:
    first, last = min(summary.loss), max(summary.loss)
    return (
        f"{summary.loss_name}: {summary.loss[first]:.4f} (iteration {first:,})"
        f" -> {summary.loss[last]:.4f} (iteration {last:,})"
    )


def _comparison(summary: RunSummary) -> str:
    if summary.loss_max_relative_difference is None:
        return "loss against the reference run: no iteration in common"
    shared = count(summary.compared_iterations or 0, "iteration")
    difference = relative_difference(summary.loss_max_relative_difference)
    bound = f"sums in another order give {summary.loss_bound:.1e} at most"
    return f"loss against the reference run: {difference} over {shared}; {bound}"


def _deaths(summary: RunSummary) -> Table:
    table = _table("worker:", "where", "died at", "into run:", "iteration:", "cause", "ms:")
    table.columns[1].no_wrap = True
    for death in _shown(summary.deaths):
        table.add_row(
            str(death.worker),
            Text(summary.places.get(death.worker, NONE if death.node is None else f"node {death.node}")),
            *_moment(death, summary.started_at),
            NONE if death.iteration is None else f"{death.iteration:,}",
            Text(death.cause),
            milliseconds(death.noticed_ms),
        )
    return table


def _moment(death: Death, started_at: float | None) -> tuple[str, str]:
    moment = death.noticed_at if death.died_at is None else death.died_at
    if moment is None:
        return NONE, NONE
    local = datetime.fromtimestamp(moment).strftime("%m-%d %H:%M:%S")
    return local, NONE if started_at is None else f"{moment - started_at:,.1f} s"


def _recoveries(recoveries: Sequence[Recovery]) -> Table:
    table = _table(
        "epoch", "lost", "after iteration:", "resumed ms:", "first step ms:", "moved:", "redone:", "samples/s:"
    )
    for recovery in _shown(recoveries):
        before, after = recovery.samples_per_second_before, recovery.samples_per_second_after
        table.add_row(
            _epochs(recovery),
            ", ".join(str(death.worker) for death in recovery.dead) or "none",
            f"{recovery.resumed_iteration:,}",
            _in_milliseconds(recovery.resumed_s),
            _in_milliseconds(recovery.total_s),
            size(recovery.bytes_moved),
            NONE if recovery.steps_redone is None else str(recovery.steps_redone),
            f"{rate(before)} -> {rate(after)}",
        )
    return table


def _plans(plans: Sequence[PlanInForce]) -> Table:
    table = _table("after:", "plan", "layers", "batches", "samples/s:", "stood still ms:", "because of")
    for plan in _shown(plans):
        table.add_row(
            f"{plan.after:,}",
            plan.shape + (f" + {count(plan.standbys, 'standby')}" if plan.standbys else ""),
            plan.layers,
            plan.micro_batches,
            rate(plan.samples_per_second),
            _in_milliseconds(plan.stood_still_s),
            Text(plan.why),
        )
    return table


def _phases(recoveries: Sequence[Recovery]) -> Table:
    shown = _shown(recoveries)
    names = list(dict.fromkeys(name for recovery in shown for name in recovery.phases))
    table = _table("epoch", *(f"{name}:" for name in names))
    for recovery in shown:
        table.add_row(_epochs(recovery), *(_in_milliseconds(recovery.phases.get(name)) for name in names))
    return table


def _epochs(recovery: Recovery) -> str:
    return f"{recovery.from_epoch} -> {recovery.to_epoch}"


def _in_milliseconds(seconds: float | None) -> str:
    return milliseconds(None if seconds is None else 1000 * seconds)


def _shown[Row](rows: Sequence[Row]) -> Sequence[Row]:
    return rows[-MAX_ROWS:]


def _table(*headings: str) -> Table:
    """A table with these columns; a heading that ends in a colon is for numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for heading in headings:
        table.add_column(heading.rstrip(":"), justify="right" if heading.endswith(":") else "left")
    return table
