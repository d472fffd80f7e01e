#!/usr/bin/env python3
"""The published experiments of ResiHP (arXiv 2605.06374, section 8), simulated: published and simulated side by side.

    python benchmarks/published.py [--quick] [--models NAME ...] [--micro-batches N ...] [--orders N] [--plot FILE]

Strategies run through the traces of `megatron_resihp.simulator.published`, on cost profiles that are fitted to the
fault-free column only; what the published text leaves open is printed first, with what was taken. A cell is an
experiment with one model: fail-stop, fail-slow and mixed at three severities each, and a day of 256 GPUs with rejoins.
Each is the mean over several random orders.

Every strategy starts from the published layout and keeps it while all are well ("user"). `joint` also runs with the
layout of its choice from the start ("free").

- share: throughput ÷ (Σ p over live GPUs ÷ all GPUs, as a mean over the session, × the best fault-free throughput that
  any strategy finds, layout free), with all downtime. `capacity_share_*` are those of `joint` free.
- over X: throughput of `joint` ÷ that of X, both "user", on the traces that X survives.

The last line of standard output is one JSON object.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import print_result
from published_tables import print_tables
from rich.progress import Progress

from megatron_resihp.planner import NoPlanError
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.strategies.registry import STRATEGIES, Entry
from megatron_resihp.simulator import published
from megatron_resihp.simulator.amplification import amplification
from megatron_resihp.simulator.cluster import UNMITIGATED, Judge, capacity, run
from megatron_resihp.simulator.sizes import Sizes
from megatron_resihp.simulator.traces import Trace

OURS, BASELINE, RIVAL = "joint", "resihp", "oobleck+greyhound"
GOALS = {"capacity_share_mean": {64: 0.95, 16: 0.88}, "capacity_share_min": {64: 0.88, 16: 0.80},
         "over_resihp_geomean": {64: 1.05, 16: 1.05}, "over_resihp_min": {64: 1.0, 16: 1.0},
         "over_oobleck_geomean": {64: 1.25, 16: 1.20}, "over_oobleck_min": {64: 1.03, 16: 1.0},
         "aborted": {64: 0, 16: 0}}  # fmt: skip


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
    cells: list[dict[str, Any]] = []
    best: dict[str, Any] = {}
    with Progress(console=_progress_console(), transient=True) as progress:
        task = progress.add_task("simulating", total=None)
        for micro_batches in arguments.micro_batches:
            for model in arguments.models:
                sizes = published.job(model, micro_batches)
                judge = published.judge_of(sizes)
                top, whose = fault_free_best(sizes, judge, strategies)
                best[f"{model}, {micro_batches}"] = {"samples_per_s": top, "by": whose,
                                                     "efficiency": sizes.device.efficiency}  # fmt: skip
                with_none = {"unmitigated": UNMITIGATED, **strategies}
                for cell in cells_of(model, sizes, judge, arguments.orders):
                    progress.update(task, description=f"{cell.experiment} {model} {cell.case} ({micro_batches})")
                    cells.append(measure(cell, sizes, judge, with_none, top))
    idle = {str(count): amplified(count, strategies) for count in arguments.micro_batches}
    print_tables(cells, idle)
    result = {**figures([c for c in cells if c["micro_batches"] == 64]),
              "by_micro_batches": {str(n): figures([c for c in cells if c["micro_batches"] == n])
                                   for n in arguments.micro_batches},
              "orders": arguments.orders, "fault_free_best": best, "amplification": idle, "cells": cells}  # fmt: skip
    print_result(result, 4)
    return 0


def _progress_console() -> Any:
    from rich.console import Console

    return Console(file=sys.stderr)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    every = (*published.models(), "llama2-70b", "qwen2.5-72b")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=every, default=every, metavar="NAME", help="default: all eight")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[64, 16], metavar="N", help="default 64 16")
    parser.add_argument("--orders", type=int, default=5, metavar="N", help="random orders of failures (default 5)")
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME", help="strategies to leave out")
    parser.add_argument("--quick", action="store_true", help="one order, two small models")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw throughput by cell")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.models, arguments.orders = ("llama2-7b", "llama2-13b"), 1
    return arguments


if __name__ == "__main__":
    sys.exit(main())
