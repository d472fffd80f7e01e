#!/usr/bin/env python3
"""The published experiments of ResiHP (arXiv 2605.06374, section 8), simulated: published and simulated side by side.

    python benchmarks/published.py [--quick] [--models NAME ...] [--micro-batches N ...] [--orders N] [--results DIR]

Strategies run through the traces of `megatron_resihp.simulator.published`, on cost profiles that are fitted to the
fault-free column only; what the published text leaves open is printed first, with what was taken. A cell is an
experiment with one model: fail-stop, fail-slow and mixed at three severities each, and a day of 256 GPUs with rejoins.
Each is the mean over several random orders.

Every strategy starts from the published layout and keeps it while all are well ("user"). `joint` also runs with the
layout of its choice from the start ("free").

- share: throughput ÷ (Σ p over live GPUs ÷ all GPUs, as a mean over the session, × the best fault-free throughput that
  any strategy finds, layout free), with all downtime. `capacity_share_*` are those of `joint` free.
- over X: throughput of `joint` ÷ that of X, both "user", on the traces that X survives.

With --results, finished cells are kept in that directory, and a run that was stopped goes on where it was; give another
directory after a change of the code. The last line of standard output is one JSON object.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import print_result
from published_tables import print_tables

from megatron_resihp.planner import NoPlanError
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.strategies.registry import STRATEGIES, Entry
from megatron_resihp.simulator import published
from megatron_resihp.simulator.ablation import ABLATION
from megatron_resihp.simulator.amplification import amplification
from megatron_resihp.simulator.cluster import UNMITIGATED, Judge, capacity, run
from megatron_resihp.simulator.sizes import Sizes
from megatron_resihp.simulator.traces import Trace

OURS, BASELINE, RIVAL = "joint", "resihp", "oobleck+greyhound"


@dataclass(frozen=True)
class Cell:
    """An experiment with one model.

    Attributes:
        experiment, model, case: what it is, in words.
        traces: one for each random order.
    """

    experiment: str
    model: str
    case: str
    traces: tuple[Trace, ...]


def cells_of(model: str, sizes: Sizes, judge: Judge, orders: int) -> Iterator[Cell]:
    """All cells of a model."""
    seeds = range(orders)
    if model not in published.models():
        yield Cell("256 GPUs", model, "with rejoins", tuple(published.with_rejoins(sizes, seed) for seed in seeds))
        return
    for interval in published.facts()["fail_stop"]["interval_h"]:
        yield Cell("fail-stop", model, f"{interval:g} h", tuple(published.fail_stop(sizes, interval, s) for s in seeds))
    for make, name in ((published.fail_slow, "fail-slow"), (published.mixed, "mixed")):
        for severity, case in enumerate(published.SEVERITIES):
            yield Cell(name, model, case, tuple(make(sizes, judge, severity, seed) for seed in seeds))


# ---- running


def measure(cell: Cell, sizes: Sizes, judge: Judge, strategies: Mapping[str, Entry], best: float) -> dict[str, Any]:
    """Throughput and share of every strategy, by order of failures."""
    plan = sizes.plan()
    table: dict[str, Any] = {}
    for name, entry in strategies.items():
        outcomes = [run(entry, trace, plan, judge) for trace in cell.traces]
        table[name] = _row(outcomes, cell, sizes, best)
    if OURS in strategies:
        outcomes = [run(strategies[OURS], trace, plan, judge, free=True) for trace in cell.traces]
        table[f"{OURS} (free)"] = _row(outcomes, cell, sizes, best)
    return {"experiment": cell.experiment, "model": cell.model, "case": cell.case,
            "micro_batches": sizes.micro_batches, "strategies": table}  # fmt: skip


def _row(outcomes: Sequence[Any], cell: Cell, sizes: Sizes, best: float) -> dict[str, Any]:
    shares = [
        outcome.samples_per_s / (capacity(trace, sizes.workers) * best)
        for outcome, trace in zip(outcomes, cell.traces, strict=True)
    ]
    return {
        "samples_per_s": statistics.fmean(outcome.samples_per_s for outcome in outcomes),
        "by_order": [outcome.samples_per_s for outcome in outcomes],
        "share": statistics.fmean(shares),
        "aborted": [bool(outcome.aborted) for outcome in outcomes],
        "stopped_s": statistics.fmean(outcome.stopped_s for outcome in outcomes),
    }


def fault_free_best(sizes: Sizes, judge: Judge, strategies: Mapping[str, Entry]) -> tuple[float, str]:
    """The best throughput without failures that any strategy finds, and whose it is."""
    plan = sizes.plan()
    well = Health(dict.fromkeys(plan.members, 1.0))
    found = {"the published layout": judge.samples_per_s(plan, well)}
    for name, entry in strategies.items():
        try:
            found[name] = judge.samples_per_s(judge.plan(entry, plan, well)[0], well)
        except NoPlanError:
            continue
    name = max(found, key=lambda each: found[each])
    return found[name], name


def amplified(micro_batches: int, strategies: Mapping[str, Entry]) -> dict[str, dict[str, float]]:
    """GPU-seconds that one GPU at half speed makes others idle in an iteration, by strategy and place."""
    sizes = published.job("llama2-13b", micro_batches)
    judge, plan = published.judge_of(sizes), sizes.plan()
    slow = plan.replicas[0].stages[1][0]
    health = Health(dict.fromkeys(plan.members, 1.0) | {slow: 0.5})
    plans = {"unmitigated": plan}
    for name in (BASELINE, OURS):
        if name in strategies:
            plans[name] = judge.plan(strategies[name], plan, health)[0]
    return {name: asdict(amplification(each, plan, health, slow, judge.cost)) for name, each in plans.items()}


def ablation(micro_batches: int, orders: int) -> dict[str, dict[str, float]]:
    """Samples/s of ResiHP without some of its steps, by experiment, aborted sessions included."""
    sizes = published.job("llama2-13b", micro_batches)
    judge, plan = published.judge_of(sizes), sizes.plan()
    table: dict[str, dict[str, float]] = {}
    for cell in cells_of("llama2-13b", sizes, judge, orders):
        if cell.case in ("1 h", "medium"):
            runs = {name: [run(entry, trace, plan, judge) for trace in cell.traces] for name, entry in ABLATION.items()}
            rates = {name: statistics.fmean(out.samples_per_s for out in outs) for name, outs in runs.items()}
            table[f"{cell.experiment}, {cell.case}"] = rates
    return table


# ---- figures


def figures(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The issue's figures over some cells; None where a strategy is missing."""
    rows = [cell["strategies"] for cell in cells]
    free = [row[f"{OURS} (free)"]["share"] for row in rows if f"{OURS} (free)" in row]
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
        "aborted": sum(any(row[name]["aborted"]) for row in rows for name in (OURS,) if name in row),
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


def _or_none(function: Any, values: Sequence[float]) -> float | None:
    return function(values) if values else None


# ---- command line


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    strategies = {name: entry for name, entry in STRATEGIES.items() if name not in arguments.skip}
    for line in ("What the published text leaves open, and what is taken:", *(f"- {each}" for each in published.TAKEN)):
        print(line)
    for name in (OURS, BASELINE, RIVAL):
        if name not in strategies:
            print(f"Without {name}: there is no such strategy here.")
    cells = [
        cell
        for micro_batches in arguments.micro_batches
        for model in arguments.models
        for cell in cells_measured(model, micro_batches, strategies, arguments)
    ]
    idle = {str(count): amplified(count, strategies) for count in arguments.micro_batches}
    steps = {str(count): ablation(count, arguments.orders) for count in arguments.micro_batches}
    print_tables(cells, idle, steps)
    if arguments.plot:
        draw(cells, arguments.plot)
    by_count = {count: figures([c for c in cells if c["micro_batches"] == count]) for count in arguments.micro_batches}
    result = {
        **by_count.get(64, {}),
        "by_micro_batches": {str(count): found for count, found in by_count.items()},
        "orders": arguments.orders,
        "amplification": idle,
        "ablation": steps,
        "cells": cells,
    }
    print_result(result, 4)
    return 0


def cells_measured(
    model: str, micro_batches: int, strategies: Mapping[str, Entry], arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """All cells of a model, those that are kept from before as they are."""
    sizes = published.job(model, micro_batches)
    judge = published.judge_of(sizes)
    best: tuple[float, str] | None = None
    for cell in cells_of(model, sizes, judge, arguments.orders):
        if cell.experiment not in arguments.experiments:
            continue
        path = _path(cell, micro_batches, arguments)
        if path is not None and path.exists():
            yield json.loads(path.read_text())
            continue
        begun = time.monotonic()
        best = best or fault_free_best(sizes, judge, strategies)
        found = measure(cell, sizes, judge, {"unmitigated": UNMITIGATED, **strategies}, best[0])
        found |= {"fault_free_best": best[0], "fault_free_best_by": best[1], "efficiency": sizes.device.efficiency}
        name = f"{cell.experiment} {model} {cell.case}, {micro_batches} micro-batches"
        print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found))
        yield found


def _path(cell: Cell, micro_batches: int, arguments: argparse.Namespace) -> Path | None:
    """Where a cell is kept."""
    if arguments.results is None:
        return None
    name = f"{cell.experiment}-{cell.model}-{cell.case}-{micro_batches}-{arguments.orders}.json".replace(" ", "-")
    return Path(arguments.results) / name


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
    experiments = ("fail-stop", "fail-slow", "mixed", "256 GPUs")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=every, default=every, metavar="NAME", help="default: all eight")
    parser.add_argument("--experiments", nargs="+", choices=experiments, default=experiments, metavar="NAME",
                        help=", ".join(experiments))  # fmt: skip
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[64, 16], metavar="N", help="default 64 16")
    parser.add_argument("--orders", type=int, default=5, metavar="N", help="random orders of failures (default 5)")
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME", help="strategies to leave out")
    parser.add_argument("--quick", action="store_true", help="one order, two small models")
    parser.add_argument("--results", type=Path, metavar="DIR", help="where finished cells are kept")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw every cell's share of the capacity")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.models, arguments.orders = ("llama2-7b", "llama2-13b"), 1
    return arguments


if __name__ == "__main__":
    sys.exit(main())
