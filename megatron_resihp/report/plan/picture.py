# SPDX-License-Identifier: Apache-2.0
"""The timelines of an iteration before and after a plan. Imports matplotlib, `pipeline`, `planner` and this package."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_resihp.cost.job import JobCost
from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.pipeline.simulate import Timeline
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.planner.evaluation import joint_timeline, migrating, run_of
from megatron_resihp.planner.health import Health
from megatron_resihp.report.plan.answer import Answer, Situation

COLOURS: Final = {OpKind.F: "#8fb4dd", OpKind.B: "#1f5fa8", OpKind.W: "#f2b27a"}
NAMES: Final = {OpKind.F: "forward", OpKind.B: "backward", OpKind.W: "weight gradient"}
MOST_REPLICAS: Final = 4


def draw(situation: Situation, answer: Answer, path: Path) -> None:
    """Write the picture: replicas of both plans, at most MOST_REPLICAS of each, on one time axis.

    Raises:
        OSError, ValueError: it can't be written.
    """
    if answer.plan is None:
        raise ValueError("there is no plan to draw")
    before = Health(dict.fromkeys(situation.plan.members, 1.0) | _alive(situation))
    title = "before" if not situation.lost else "before, as if the dead workers were healthy"
    parts = [(title, situation.plan, before), (f"after, by {answer.strategy}", answer.plan, situation.health)]
    rows = [sum(len(r.stages) for r in plan.replicas[:MOST_REPLICAS]) for _, plan, _ in parts]
    figure = Figure(figsize=(10.0, 1.6 + 0.24 * sum(rows)), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 1, sharex=True, height_ratios=rows)
    for axes, (name, plan, health) in zip(panels, parts, strict=True):
        _panel(axes, name, plan, health, situation)
    panels[-1].set_xlabel("seconds from the start of the iteration")
    figure.legend(
        handles=[Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in OpKind],
        loc="outside upper right", ncols=3, frameon=False, fontsize=8,
    )  # fmt: skip
    figure.savefig(path)


def _alive(situation: Situation) -> dict[int, float]:
    return {worker: p for worker, p in situation.health.speed.items() if worker in situation.plan.members}


def _panel(axes: Axes, name: str, plan: ParallelPlan, health: Health, situation: Situation) -> None:
    shown = range(min(len(plan.replicas), MOST_REPLICAS))
    lanes = [lane for lane in _lanes(plan, health, situation.cost) if lane.replica in shown]
    for row, lane in enumerate(lanes):
        for kind in OpKind:
            spans = [(start, end - start) for op, start, end in lane.ops if op == kind]
            axes.broken_barh(spans, (row - 0.4, 0.8), color=COLOURS[kind], edgecolor="white", linewidth=0.3)
    slowest = max(end for lane in lanes for _, _, end in lane.ops)
    axes.axvline(slowest, color="#b3261e", linewidth=0.9)
    axes.set_yticks(range(len(lanes)), [f"replica {lane.replica}, stage {lane.stage}" for lane in lanes], fontsize=7)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)
    rest = len(plan.replicas) - len(shown)
    axes.set_title(f"{name}: {slowest:.3g} s{f' ({rest} more replicas not shown)' if rest else ''}", fontsize=9)


class _Lane(NamedTuple):
    """The ops of a stage: (kind, start, end) of each, in seconds."""

    replica: int
    stage: int
    ops: list[tuple[int, float, float]]


def _lanes(plan: ParallelPlan, health: Health, cost: JobCost) -> list[_Lane]:
    together = migrating(plan)
    lanes = []
    for number in range(len(plan.replicas)):
        if number not in together:
            lanes += _of_replica(number, run_of(plan, number, health, cost).timeline())
    if together:
        places = [(number, stage) for number in together for stage in range(len(plan.replicas[number].stages))]
        timeline = joint_timeline(plan, health, cost)
        ops: dict[int, list[tuple[int, float, float]]] = {device: [] for device in range(len(places))}
        for cell, device in zip(timeline.program.flat, timeline.program.device, strict=True):
            ops[int(device)].append((int(cell[0]), float(timeline.start[*cell]), float(timeline.end[*cell])))
        lanes += [_Lane(*places[device], ops[device]) for device in ops]
    return sorted(lanes)


def _of_replica(number: int, timeline: Timeline) -> list[_Lane]:
    lanes = [_Lane(number, stage, []) for stage in range(timeline.program.devices)]
    for kind, chunk, micro_batch in np.argwhere(~np.isnan(timeline.start)):
        span = float(timeline.start[kind, chunk, micro_batch]), float(timeline.end[kind, chunk, micro_batch])
        lanes[timeline.program.device_of_stage[chunk]].ops.append((int(kind), *span))
    return lanes
