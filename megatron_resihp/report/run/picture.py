# SPDX-License-Identifier: Apache-2.0
"""RunSummary -> a picture: loss and throughput over the iterations; deaths, verdicts and changes of plan are marked.

May import: the standard library, matplotlib and this package's modules. Import it only where a picture is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from megatron_resihp.report.run.marks import Mark, MarkKind, find_marks, label_rows
from megatron_resihp.report.run.run_summary import RunSummary
from megatron_resihp.report.run.summary import compare
from megatron_resihp.report.words import relative_difference

SIZE = (9.0, 4.8)
"""Inches without the labels above the panels; at 900 pixels a point of text is 1.4 pixels."""
DPI = 200
POINT = DPI / 72
"""Pixels in a point."""
ROW, GAP = 15 * POINT, 4 * POINT
"""Pixels between two rows of labels, and between a label and its mark."""
LABEL_FONT = 8.5

RUN, REFERENCE, TEXT, GRID = "#1f5fa8", "#f2b27a", "#333333", "#e8e8e8"
COLOURS = {MarkKind.DEATH: "#b3261e", MarkKind.VERDICT: "#8a5a00", MarkKind.CHANGE: "#2e7d32"}


def draw(summary: RunSummary, reference: RunSummary | None, path: str | Path) -> None:
    """Write the picture; the suffix of `path` chooses the format. Raises OSError or ValueError where that fails."""
    marks = find_marks(summary)
    figure = Figure(figsize=SIZE, dpi=DPI, facecolor="white", layout="constrained")
    canvas = FigureCanvasAgg(figure)
    loss, speed = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_loss(loss, summary, reference)
    _draw_speed(speed, summary, reference)
    for axes in (loss, speed):
        _style(axes)
        _draw_marks(axes, marks)
    figure.align_ylabels()
    # Labels are placed by their width on the page, which is known only once the panels have their final size.
    canvas.draw()  # type: ignore[no-untyped-call]
    figure.set_layout_engine("none")
    _label(figure, loss, marks)
    figure.savefig(path, dpi=DPI, bbox_inches="tight", pad_inches=0.08)


def _draw_loss(axes: Axes, summary: RunSummary, reference: RunSummary | None) -> None:
    axes.set_ylabel(summary.loss_name or "loss")
    if reference is not None:
        difference = compare(summary.loss, reference.loss)
        note = "" if difference is None else f", {relative_difference(difference)}"
        _line(axes, reference.loss, REFERENCE, 1.0, f"uninterrupted run{note}", halo=True)
    _line(axes, summary.loss, RUN, 1.1, "this run")
    if reference is not None and axes.lines:
        axes.legend(
            loc="upper right",
            fontsize=9,
            labelcolor=TEXT,
            reverse=True,
            framealpha=0.92,
            edgecolor="none",
            borderaxespad=0,
        )


def _draw_speed(axes: Axes, summary: RunSummary, reference: RunSummary | None) -> None:
    axes.set_ylabel("samples/s")
    axes.set_xlabel("iteration")
    if reference is not None:
        _line(axes, reference.samples_per_second, REFERENCE, 1.0, "uninterrupted run")
    _line(axes, summary.samples_per_second, RUN, 1.1, "this run")
    axes.set_ylim(bottom=0)


def _line(axes: Axes, values: Mapping[int, float], colour: str, width: float, label: str, halo: bool = False) -> None:
    iterations = sorted(values)
    heights = [values[i] if math.isfinite(values[i]) else math.nan for i in iterations]
    # Single iterations are told apart by dots as long as there is room for them.
    marker = "o" if len(iterations) <= 120 else ""
    if halo:
        # Equal curves hide each other: the lower one shows on both sides of the upper one.
        axes.plot(iterations, heights, color=colour, linewidth=4 * width, alpha=0.8, label=label, zorder=2)
    else:
        axes.plot(
            iterations, heights, color=colour, linewidth=width, marker=marker, markersize=2.4, label=label, zorder=3
        )


def _style(axes: Axes) -> None:
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(colors=TEXT, labelsize=9, length=3)
    axes.xaxis.label.set(color=TEXT, fontsize=10)
    axes.yaxis.label.set(color=TEXT, fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02)


def _draw_marks(axes: Axes, marks: Sequence[Mark]) -> None:
    for mark in marks:
        if mark.recovered:
            axes.axvspan(mark.after, mark.after + 1, color=COLOURS[mark.kind], alpha=0.10, linewidth=0, zorder=0.5)
        axes.axvline(mark.position, color=COLOURS[mark.kind], linewidth=0.9, zorder=1)


class _Label(NamedTuple):
    """A label and the place for it, in pixels of the page."""

    text: str
    foot: float
    """The position of its mark."""
    left: float
    row: int | None
    """Row above the panels, from 0; None: there was no room."""
    colour: str


def _label(figure: Figure, axes: Axes, marks: Sequence[Mark]) -> None:
    """Write a label above the panels for each mark; the short labels where the full ones would not fit."""
    labels = _arrange(figure, axes, marks, [mark.label for mark in marks])
    if any(label.row is None for label in labels):
        labels = _arrange(figure, axes, marks, [mark.short_label for mark in marks])
    top = axes.get_window_extent().y1
    for label in labels:
        if label.row is not None:
            _write_label(figure, label, label.row, top)


def _arrange(figure: Figure, axes: Axes, marks: Sequence[Mark], texts: Sequence[str]) -> list[_Label]:
    right_end = axes.get_window_extent().x1
    feet = [float(axes.transData.transform((mark.position, 0))[0]) for mark in marks]
    widths = [_width(figure, text) for text in texts]
    # A label that would leave the page on the right stands to the left of its mark instead.
    lefts = [
        foot + GAP if foot + GAP + width <= right_end else foot - GAP - width
        for foot, width in zip(feet, widths, strict=True)
    ]
    rows = label_rows([(left, left + width + 2 * GAP) for left, width in zip(lefts, widths, strict=True)])
    colours = [COLOURS[mark.kind] for mark in marks]
    return [_Label(*parts) for parts in zip(texts, feet, lefts, rows, colours, strict=True)]


def _width(figure: Figure, text: str) -> float:
    trial = figure.text(0, 0, text, fontsize=LABEL_FONT)
    width = float(trial.get_window_extent().width)
    trial.remove()
    return width


def _write_label(figure: Figure, label: _Label, row: int, top: float) -> None:
    to_page = figure.transFigure.inverted()
    bottom = top + (0.25 + row) * ROW
    x, y = to_page.transform((label.left, bottom))
    figure.text(
        x, y, label.text, fontsize=LABEL_FONT, color=label.colour, va="bottom", bbox={"color": "white", "pad": 0.5},
        zorder=3,
    )  # fmt: skip
    # The mark continues up to its label, past the labels of the rows below.
    ends = [to_page.transform((label.foot, height)) for height in (top, bottom + 0.75 * ROW)]
    figure.add_artist(Line2D([x for x, _ in ends], [y for _, y in ends], color=label.colour, linewidth=0.9, zorder=2))
