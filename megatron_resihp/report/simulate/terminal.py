# SPDX-License-Identifier: Apache-2.0
"""The result of a simulation, for a terminal. May import: rich and this package's modules."""

from __future__ import annotations

import statistics

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_resihp.report.simulate.result import Simulation
from megatron_resihp.report.words import count, duration, rate


def render(found: Simulation, console: Console) -> None:
    """Print the result."""
    scenario = found.scenario
    events = statistics.fmean(len(trace.events) for trace in scenario.traces)
    console.print(Text(scenario.name, style="bold"), soft_wrap=True)
    console.print(
        f"  {scenario.sizes.workers:,} workers for {duration(scenario.traces[0].duration_s)}, {events:g} events, "
        f"{count(len(scenario.traces), 'order')} of failures, {found.capacity:.1%} of the speed left on average, "
        f"{rate(found.healthy_samples_per_s)} samples/s with all workers healthy",
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("strategy", no_wrap=True)
    for name in ("samples/s", "of healthy", "of capacity", "plans", "stopped", "lost samples"):
        table.add_column(name, justify="right")
    table.add_column("")
    for name, outcomes in sorted(found.outcomes.items(), key=lambda item: -found.samples_per_s(item[0])):
        aborted = sum(bool(outcome.aborted) for outcome in outcomes)
        table.add_row(
            name,
            rate(found.samples_per_s(name)),
            f"{found.samples_per_s(name) / found.healthy_samples_per_s:.1%}",
            f"{found.share(name):.1%}",
            f"{statistics.fmean(outcome.changes for outcome in outcomes):g}",
            duration(statistics.fmean(outcome.stopped_s for outcome in outcomes)),
            f"{statistics.fmean(outcome.lost_samples for outcome in outcomes):,.0f}",
            f"aborted{f' in {aborted} of {len(outcomes)}' if len(outcomes) > 1 else ''}" if aborted else "",
        )
    console.print(table)
    for name, outcomes in found.outcomes.items():
        reason = next((outcome.aborted for outcome in outcomes if outcome.aborted), "")
        if reason:
            console.print(f"  {name} aborted: {reason}", soft_wrap=True)
