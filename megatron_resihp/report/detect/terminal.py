# SPDX-License-Identifier: Apache-2.0
"""The result of `resihp detect`, for a terminal. May import: rich, `detector` and this package's modules."""

from __future__ import annotations

import math

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_resihp.report.detect.detection import Detection
from megatron_resihp.report.detect.verdicts import speed_of, what_of, who_of
from megatron_resihp.report.words import count, listing

MOST_LEFT_OUT = 5


def render(found: Detection, console: Console) -> None:
    """Print the result."""
    result = found.result
    who = f" of {count(len(result.workers), 'worker')}" if found.named else ""
    learned = len(result.iterations) - result.judged
    console.print(f"{escape(str(found.source))}: {count(len(result.iterations), 'iteration')}{who}, "
                  f"{learned} of them to learn from", highlight=False)  # fmt: skip
    if math.isfinite(result.iteration_mape):
        console.print(f"healthy iterations were predicted with a mean error of {result.iteration_mape:.1%}",
                      highlight=False)  # fmt: skip
    if found.restarts:
        rows = listing(found.restarts[:MOST_LEFT_OUT]) + (" …" if len(found.restarts) > MOST_LEFT_OUT else "")
        console.print(f"the numbering starts again at row {rows}: each start is judged as a segment of its own",
                      highlight=False)  # fmt: skip
    if result.unknown:
        console.print(f"unknown, not slow: {count(result.unknown, 'iteration')} with a workload outside what had been "
                      "learned", highlight=False)  # fmt: skip
    for line in found.left_out[:MOST_LEFT_OUT]:
        console.print(f"left out: {escape(line)}", highlight=False)
    if len(found.left_out) > MOST_LEFT_OUT:
        console.print(f"left out: {len(found.left_out) - MOST_LEFT_OUT} more", highlight=False)
    for what in dict.fromkeys(notice.what for notice in result.notices):
        seconds = [notice.seconds for notice in result.notices if notice.what == what]
        name = what.replace("_", " ")
        console.print(f"no device's doing: {name} held up {count(len(seconds), 'iteration')}, "
                      f"by up to {max(seconds):.2g} s", highlight=False)  # fmt: skip
    if not result.verdicts:
        if found.doubts:
            console.print(f"[yellow]insufficient evidence[/yellow]: {'; '.join(found.doubts)}", highlight=False)
        else:
            console.print("[green]nobody is slow[/green]")
        return
    table = Table("iteration", "who", "what", "speed (95 %)", "since", box=None, pad_edge=False, header_style="bold")
    for verdict in result.verdicts:
        table.add_row(str(verdict.iteration), who_of(verdict), what_of(verdict), speed_of(verdict), str(verdict.since))
    console.print(table)
