#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The published experiments of ResiHP (arXiv 2605.06374, section 8), simulated: published and simulated side by side.

    python benchmarks/published.py [--quick] [--models NAME ...] [--micro-batches N ...] [--orders N] [--results DIR]
                                   [--processes N]

Strategies run through the traces of `megatron_resihp.lab.published`, on cost profiles that are fitted to the
fault-free column only; what the published text leaves open is printed first, with what was taken. A cell is an
experiment with one model: fail-stop, fail-slow and mixed at three severities each, and a day of 256 GPUs with rejoins.
Each is the mean over several random orders.

Every strategy starts from the published layout and keeps it while all are well ("user"). `joint` also runs with the
layout of its choice from the start ("free"). Its shards are even, as in jobs, unless --uneven is given.

- share: throughput ÷ (Σ p over live GPUs ÷ all GPUs, as a mean over the session, × the best fault-free throughput that
  any strategy finds, layout free), with all downtime. `capacity_share_*` are those of `joint` free.
- over X: throughput of `joint` ÷ that of X, both "user", on the traces that X survives. `over_best_min`: ÷ that of the
  best of all others, on all traces, of the worst cell.
- aborted: cells in which a session of `joint` aborted, "user" or "free".

With --results, finished cells are kept in that directory, and a run that was stopped goes on where it was; give another
directory after a change of the code. The last line of standard output is one JSON object.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import print_result
from published_cells import (
    EXPERIMENTS,
    FREE,
    OURS,
    Cell,
    Found,
    Seconds,
    Settings,
    cells_of,
    measure_all,
    processes,
    traces_of,
)
from published_tables import print_tables

from megatron_resihp.lab import published
from megatron_resihp.lab.ablation import ABLATION
from megatron_resihp.lab.amplification import amplification
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.strategies.registry import STRATEGIES
from megatron_resihp.simulator.cluster import run

BASELINE, RIVAL = "resihp-paper", "oobleck+greyhound"


# ---- running


def all_found(cells: Sequence[Cell], settings: Settings, pool: ProcessPoolExecutor) -> list[Found]:
    """All cells with their figures in the order given, those that are kept from before as they are."""
    found = {cell: known for cell in cells if (known := settings.kept(cell)) is not None}
    print(f"{len(cells)} cells, {len(found)} of them kept from before", file=sys.stderr)
    begun, seconds = time.monotonic(), Seconds()
    for cell, figures, spent in measure_all([cell for cell in cells if cell not in found], settings, pool):
        found[cell] = figures
        seconds += spent
        print(
            f"{len(found)} of {len(cells)}: {cell.name}: {_by_strategy(spent)}  [{time.monotonic() - begun:.0f} s]",
            file=sys.stderr,
        )
    print(f"all: {_by_strategy(seconds)}", file=sys.stderr)
    return [found[cell] for cell in cells]


def _by_strategy(seconds: Seconds) -> str:
    """Processor seconds, without strategies that took less than a hundredth of the total."""
    whole = seconds.total()
    parts = ", ".join(f"{name} {spent:.1f}" for name, spent in seconds.most_common() if spent > 0.01 * whole)
    return f"{whole:.1f} s ({parts})"


def amplified(micro_batches: int, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """GPU-seconds that one GPU at half speed makes others idle in an iteration, by strategy and place."""
    sizes = published.job("llama2-13b", micro_batches)
    judge, plan = published.judge_of(sizes), sizes.plan()
    slow = plan.replicas[0].stages[1][0]
    health = Health(dict.fromkeys(plan.members, 1.0) | {slow: 0.5})
    plans = {"unmitigated": plan} | {name: judge.plan(STRATEGIES[name], plan, health)[0] for name in names}
    return {name: asdict(amplification(each, plan, health, slow, judge.cost)) for name, each in plans.items()}


def ablation(micro_batches: int, orders: int) -> dict[str, dict[str, float]]:
    """Samples/s of ResiHP without some of its steps, by experiment, aborted sessions included."""
    sizes = published.job("llama2-13b", micro_batches)
    judge, plan = published.judge_of(sizes), sizes.plan()
    table: dict[str, dict[str, float]] = {}
    for cell in cells_of("llama2-13b", micro_batches):
        if cell.case in ("1 h", "medium"):
            traces = traces_of(cell, sizes, judge, orders)
            runs = {name: [run(entry, trace, plan, judge) for trace in traces] for name, entry in ABLATION.items()}
            rates = {name: statistics.fmean(out.samples_per_s for out in outs) for name, outs in runs.items()}
            table[f"{cell.experiment}, {cell.case}"] = rates
    return table


# ---- figures


def figures(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The issue's figures over some cells; None where a strategy is missing."""
    rows = [cell["strategies"] for cell in cells]
    free = [row[FREE]["share"] for row in rows if FREE in row]
    user = [row[OURS]["share"] for row in rows if OURS in row]
    over_resihp, over_oobleck = ratios(rows, OURS, BASELINE), ratios(rows, OURS, RIVAL)
    return {
        "capacity_share_mean": _or_none(statistics.fmean, free),
        "capacity_share_min": _or_none(min, free),
        "user_share_mean": _or_none(statistics.fmean, user),
        "user_share_min": _or_none(min, user),
        "over_resihp_geomean": _or_none(statistics.geometric_mean, over_resihp),
        "over_resihp_min": _or_none(min, over_resihp),
        "over_oobleck_geomean": _or_none(statistics.geometric_mean, over_oobleck),
        "over_oobleck_min": _or_none(min, over_oobleck),
        "over_best_min": _or_none(min, [row[OURS]["samples_per_s"] / _best_other(row) for row in rows if OURS in row]),
        "aborted": sum(any(any(row[name]["aborted"]) for name in (OURS, FREE) if name in row) for row in rows),
    }


def ratios(rows: Sequence[Mapping[str, Any]], ours: str, other: str) -> list[float]:
    """Of each cell, the mean ratio over the traces that the other one survives; cells without any are left out."""
    found = []
    for row in rows:
        if ours not in row or other not in row:
            continue
        each = zip(row[ours]["by_order"], row[other]["by_order"], row[other]["aborted"], strict=True)
        survived = [mine / its for mine, its, aborted in each if not aborted]
        if survived:
            found.append(statistics.geometric_mean(survived))
    return found


def _best_other(row: Mapping[str, Any]) -> float:
    """Throughput of the best of the other strategies, the unmitigated job among them."""
    return max(found["samples_per_s"] for name, found in row.items() if name not in (OURS, FREE))


def _or_none(function: Any, values: Sequence[float]) -> float | None:
    return function(values) if values else None


# ---- command line


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    # The processes share few cores; one thread each is fastest. They read this when they import numpy.
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    settings = Settings(arguments.orders, tuple(arguments.skip), arguments.results, arguments.uneven)
    for line in ("What the published text leaves open, and what is taken:", *(f"- {each}" for each in published.TAKEN)):
        print(line)
    for name in (OURS, BASELINE, RIVAL):
        if name not in settings.strategies:
            print(f"Without {name}: there is no such strategy here.")
    cells = [
        cell
        for count in arguments.micro_batches
        for model in arguments.models
        for cell in cells_of(model, count)
        if cell.experiment in arguments.experiments
    ]
    mitigating = [name for name in (BASELINE, OURS) if name in settings.strategies]
    with processes(arguments.processes) as pool:
        idle_of = {str(count): pool.submit(amplified, count, mitigating) for count in arguments.micro_batches}
        steps_of = {str(count): pool.submit(ablation, count, arguments.orders) for count in arguments.micro_batches}
        try:
            found = all_found(cells, settings, pool)
            idle, steps = ({count: each.result() for count, each in of.items()} for of in (idle_of, steps_of))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    print_tables(found, idle, steps)
    if arguments.plot:
        draw(found, arguments.plot)
    by_count = {count: figures([c for c in found if c["micro_batches"] == count]) for count in arguments.micro_batches}
    result = {
        **by_count.get(64, {}),
        "by_micro_batches": {str(count): each for count, each in by_count.items()},
        "orders": arguments.orders,
        "amplification": idle,
        "ablation": steps,
        "cells": found,
    }
    print_result(result, 4)
    return 0


def draw(cells: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The share of capacity of every cell, a row of points for each strategy."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for cell in cells for name in cell["strategies"]))
    figure = Figure(figsize=(9, 0.4 * len(names) + 1.4), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, name in enumerate(names):
        shares = [cell["strategies"][name]["share"] for cell in cells if name in cell["strategies"]]
        axes.plot(shares, [row] * len(shares), "|", markersize=12, color="#1f5fa8", alpha=0.6)
        axes.plot([statistics.fmean(shares)], [row], "o", color="#b3261e")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("share of the capacity that is left, downtime included: every cell, and their mean")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    every = (*published.models(), "llama2-70b", "qwen2.5-72b")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=every, default=every, metavar="NAME", help="default: all eight")
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, default=EXPERIMENTS, metavar="NAME",
                        help=", ".join(EXPERIMENTS))  # fmt: skip
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[64, 16], metavar="N", help="default 64 16")
    parser.add_argument("--orders", type=int, default=published.ORDERS, metavar="N",
                        help="random orders of failures (default %(default)s)")  # fmt: skip
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME", help="strategies to leave out")
    parser.add_argument("--uneven", action="store_true", help="let joint use 3 of 4 GPUs, say, which no job can yet")
    parser.add_argument("--quick", action="store_true", help="one order, two small models")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="that measure cells (default 2)")
    parser.add_argument("--results", type=Path, metavar="DIR", help="where finished cells are kept")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw every cell's share of the capacity")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.models, arguments.orders = ("llama2-7b", "llama2-13b"), 1
    return arguments


if __name__ == "__main__":
    sys.exit(main())
