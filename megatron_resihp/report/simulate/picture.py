# SPDX-License-Identifier: Apache-2.0
"""Throughput over a simulated session, strategy by strategy. Imports matplotlib, `simulator` and this package."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_resihp.report.simulate.result import Simulation
from megatron_resihp.simulator.cluster import healths
from megatron_resihp.simulator.traces import HOUR

GRID, CAPACITY = "#e8e8e8", "#999999"


def draw(found: Simulation, path: Path) -> None:
    """Write the picture: the first order of failures. Raises OSError."""
    figure = Figure(figsize=(10.0, 4.6), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    trace, workers = found.scenario.traces[0], found.scenario.sizes.workers
    stretches = healths(trace, workers)
    times = [start / HOUR for start, _, _ in stretches] + [trace.duration_s / HOUR]
    left = [sum(health.speed.values()) / workers * found.healthy_samples_per_s for _, _, health in stretches]
    axes.stairs(left, times, color=CAPACITY, linestyle=":", baseline=None, label="speed that is left × healthy")
    order = sorted(found.outcomes, key=lambda name: -found.outcomes[name][0].samples_per_s)
    for name in order:
        outcome = found.outcomes[name][0]
        edges = [part.start_s / HOUR for part in outcome.segments] + [trace.duration_s / HOUR]
        values = [part.samples_per_s for part in outcome.segments]
        label = f"{name}: {outcome.samples_per_s:.3g}{' (aborted)' if outcome.aborted else ''}"
        axes.stairs(values, edges, linewidth=1.2, baseline=None, label=label)
    axes.set_xlabel("hours")
    axes.set_ylabel("samples/s")
    axes.set_ylim(bottom=0)
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(found.scenario.name, fontsize=10)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False, title="mean samples/s")
    figure.savefig(path)
