# SPDX-License-Identifier: Apache-2.0
"""Observed against predicted iteration time with the alarms marked. Imports matplotlib, `detector` and this package."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_resihp.detector.input.replay import Replay
from megatron_resihp.detector.verdict import Change, Verdict
from megatron_resihp.report.detect.verdicts import who_of

OBSERVED, PREDICTED, ALARM, RECOVERY = "#1f5fa8", "#f2b27a", "#b3261e", "#2e7d32"
ROWS = 4
"""Rows of labels above the axes; later ones start again at the lowest."""
MOST_LABELS = 24


def draw(result: Replay, path: Path) -> None:
    """Write the picture. Raises OSError."""
    figure = Figure(figsize=(9.0, 4.2), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(result.iterations, result.predicted, color=PREDICTED, linewidth=3, label="predicted, all healthy")
    axes.plot(result.iterations, result.observed, color=OBSERVED, linewidth=1, label="observed")
    for place in np.flatnonzero(np.diff(result.epochs)) + 1:
        axes.axvline(result.iterations[place] - 0.5, color="#999999", linestyle=":", linewidth=1)
    for number, verdict in enumerate(result.verdicts):
        _mark(axes, verdict, row=number % ROWS, label=number < MOST_LABELS)
    axes.set_xlabel("iteration")
    axes.set_ylabel("seconds an iteration")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(*_limits([*result.observed, *result.predicted]))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", fontsize=8, frameon=False)
    figure.savefig(path)


def _mark(axes: Axes, verdict: Verdict, row: int, label: bool) -> None:
    colour = RECOVERY if verdict.change is Change.RECOVERY else ALARM
    axes.axvline(verdict.iteration, color=colour, linewidth=0.9)
    if label:
        axes.annotate(
            _label(verdict), (verdict.iteration, 1.0), (3, 2 + 10 * row), xycoords=("data", "axes fraction"),
            textcoords="offset points", fontsize=7, color=colour, annotation_clip=False,
        )  # fmt: skip


def _label(verdict: Verdict) -> str:
    if verdict.change is Change.RECOVERY:
        return f"{who_of(verdict)} healthy again"
    return f"{who_of(verdict)} at {verdict.speed:.2f}"


def _limits(seconds: Sequence[float]) -> tuple[float, float]:
    """From 0 to a little more than all but the worst stalls."""
    known = [value for value in seconds if math.isfinite(value)]
    return 0.0, 1.15 * float(np.quantile(known, 0.995)) if known else 1.0
