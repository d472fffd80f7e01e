# SPDX-License-Identifier: Apache-2.0
"""The cells of the published experiments, measured in several processes and kept in a directory.

A cell is an experiment with one model and one number of micro-batches, for all random orders. Imports
`megatron_resihp.simulator` and the strategies.
"""

import json
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from megatron_resihp.lab import published
from megatron_resihp.planner import NoPlanError
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.strategies.joint import UNEVEN, joint
from megatron_resihp.planner.strategies.registry import STRATEGIES, Entry
from megatron_resihp.simulator.cluster import UNMITIGATED, Judge, Outcome, capacity, own_layout, run_from
from megatron_resihp.simulator.sizes import Sizes
from megatron_resihp.simulator.traces import Trace

OURS = "joint"
FREE = f"{OURS} (free)"
EXPERIMENTS = ("fail-stop", "fail-slow", "mixed", "256 GPUs")

Found = dict[str, Any]
"""A cell with its figures, ready for JSON."""
Seconds = Counter[str]
"""Processor time by strategy."""


class Cell(NamedTuple):
    """An experiment with one model, in words."""

    model: str
    micro_batches: int
    experiment: str
    case: str

    @property
    def name(self) -> str:
        return f"{self.experiment} {self.model} {self.case}, {self.micro_batches} micro-batches"


@dataclass(frozen=True)
class Settings:
    """The settings that all cells share.

    Attributes:
        orders: random orders of failures.
        skip: strategies that are left out.
        results: where finished cells are kept, if anywhere.
        uneven: whether `joint` may give the members of a stage unlike shards.
    """

    orders: int
    skip: tuple[str, ...] = ()
    results: Path | None = None
    uneven: bool = False

    @property
    def strategies(self) -> dict[str, Entry]:
        ours = replace(STRATEGIES[OURS], strategy=partial(joint, settings=UNEVEN)) if self.uneven else STRATEGIES[OURS]
        return {name: entry for name, entry in {**STRATEGIES, OURS: ours}.items() if name not in self.skip}

    def path(self, cell: Cell) -> Path | None:
        if self.results is None:
            return None
        shards = "-uneven" * self.uneven
        name = f"{cell.experiment}-{cell.model}-{cell.case}-{cell.micro_batches}-{self.orders}{shards}.json"
        return self.results / name.replace(" ", "-")

    def kept(self, cell: Cell) -> Found | None:
        """The results of an earlier run."""
        path = self.path(cell)
        return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else None

    def keep(self, cell: Cell, found: Found) -> None:
        """Write atomically, so that a stopped run leaves the whole file or none."""
        path = self.path(cell)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            begun = path.with_suffix(".begun")
            begun.write_text(json.dumps(found), encoding="utf-8")
            begun.rename(path)


def cells_of(model: str, micro_batches: int) -> list[Cell]:
    """All cells of a model; those that meet the same states one after another."""
    if model not in published.models():
        return [Cell(model, micro_batches, "256 GPUs", "with rejoins")]
    hours = [f"{interval:g} h" for interval in published.facts()["fail_stop"]["interval_h"]]
    cases = [("fail-stop", case) for case in hours]
    cases += [(experiment, severity) for experiment in ("fail-slow", "mixed") for severity in published.SEVERITIES]
    return [Cell(model, micro_batches, *case) for case in cases]


def traces_of(cell: Cell, sizes: Sizes, judge: Judge, orders: int) -> list[Trace]:
    """The events of each random order."""
    seeds = range(orders)
    if cell.experiment == "256 GPUs":
        return [published.with_rejoins(sizes, seed) for seed in seeds]
    if cell.experiment == "fail-stop":
        return [published.fail_stop(sizes, float(cell.case.removesuffix(" h")), seed) for seed in seeds]
    make = {"fail-slow": published.fail_slow, "mixed": published.mixed}[cell.experiment]
    return [make(sizes, judge, published.SEVERITIES.index(cell.case), seed) for seed in seeds]


# ---- in one process


def measure(cell: Cell, sizes: Sizes, judge: Judge, best: float, settings: Settings) -> tuple[dict[str, Any], Seconds]:
    """Throughput and share of every strategy, by order of failures."""
    plan, traces = sizes.plan(), traces_of(cell, sizes, judge, settings.orders)
    table, seconds = {}, Seconds()
    for name, entry in {"unmitigated": UNMITIGATED, **settings.strategies}.items():
        begun = time.process_time()
        starts = {name: plan, FREE: own_layout(entry, plan, judge)} if name == OURS else {name: plan}
        outcomes = [run_from(list(starts.values()), entry, trace, judge) for trace in traces]
        for each, of_trace in zip(starts, zip(*outcomes, strict=True), strict=True):
            table[each] = _row(of_trace, traces, sizes, best)
        seconds[name] = time.process_time() - begun
    return table, seconds


def _row(outcomes: Sequence[Outcome], traces: Sequence[Trace], sizes: Sizes, best: float) -> dict[str, Any]:
    shares = [
        outcome.samples_per_s / (capacity(trace, sizes.workers) * best)
        for outcome, trace in zip(outcomes, traces, strict=True)
    ]
    return {
        "samples_per_s": statistics.fmean(outcome.samples_per_s for outcome in outcomes),
        "by_order": [outcome.samples_per_s for outcome in outcomes],
        "share": statistics.fmean(shares),
        "aborted": [bool(outcome.aborted) for outcome in outcomes],
        "stopped_s": statistics.fmean(outcome.stopped_s for outcome in outcomes),
    }


def fault_free_best(model: str, micro_batches: int, settings: Settings) -> tuple[float, str]:
    """The best throughput without failures of any strategy, and the strategy's name."""
    sizes = published.job(model, micro_batches)
    judge, plan = published.judge_of(sizes), sizes.plan()
    well = Health(dict.fromkeys(plan.members, 1.0))
    found = {"the published layout": judge.samples_per_s(plan, well)}
    for name, entry in settings.strategies.items():
        try:
            found[name] = judge.samples_per_s(judge.plan(entry, plan, well)[0], well)
        except NoPlanError:
            continue
    name = max(found, key=lambda each: found[each])
    return found[name], name


def measure_alike(cells: Sequence[Cell], best: tuple[float, str], settings: Settings) -> list[tuple[Found, Seconds]]:
    """Cells of one model and number of micro-batches, whose plans are made once where they meet the same states."""
    model, micro_batches, *_ = cells[0]
    sizes = published.job(model, micro_batches)
    judge = published.judge_of(sizes)
    measured = []
    for cell in cells:
        table, seconds = measure(cell, sizes, judge, best[0], settings)
        found = {
            "experiment": cell.experiment, "model": model, "case": cell.case, "micro_batches": micro_batches,
            "strategies": table, "fault_free_best": best[0], "fault_free_best_by": best[1],
            "efficiency": sizes.device.efficiency,
        }  # fmt: skip
        settings.keep(cell, found)
        measured.append((found, seconds))
    return measured


# ---- in all of them


def alike(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that meet the same states together: removals are the same every 2 h, 1 h and 30 min, and a mixed session
    begins as the one with the slow workers alone."""

    def states(cell: Cell) -> tuple[str, int, str]:
        return cell.model, cell.micro_batches, "" if cell.experiment == "fail-stop" else cell.case

    order = {key: number for number, key in enumerate(dict.fromkeys(map(states, cells)))}
    ordered = sorted(cells, key=lambda cell: order[states(cell)])
    return [list(group) for _, group in groupby(ordered, key=states)]


def measure_all(
    cells: Sequence[Cell], settings: Settings, pool: ProcessPoolExecutor
) -> Iterator[tuple[Cell, Found, Seconds]]:
    """Cells with their figures and the processor time that each strategy took, as they are finished."""
    jobs = dict.fromkeys((cell.model, cell.micro_batches) for cell in cells)
    bests = {job: pool.submit(fault_free_best, *job, settings) for job in jobs}
    units: dict[Future[list[tuple[Found, Seconds]]], list[Cell]] = {}
    for group in alike(cells):
        best = bests[group[0].model, group[0].micro_batches].result()
        units[pool.submit(measure_alike, group, best, settings)] = group
    for unit in as_completed(units):
        for cell, (found, seconds) in zip(units[unit], unit.result(), strict=True):
            yield cell, found, seconds


def processes(count: int) -> ProcessPoolExecutor:
    """A number of processes, each newly started."""
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))
