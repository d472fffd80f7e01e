#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How reliably detectors name a slow worker or link: this project's, Greyhound's and ResiHP's on identical jobs.

    python benchmarks/detection.py [--jobs N] [--quick] [--results DIR] [--plot FILE]

Synthetic jobs as in ResiHP's protocol (arXiv 2605.06374): 300 iterations, 50 of them warm-up; 1F1B and ZB-H1; sequences
of 8K, 16K and 32K tokens of packed documents whose mix shifts every 40 iterations or so; 16, 64 and 256 workers. In
half of the jobs one to three workers or links run 5 to 70 % slower from a random iteration on. A row is a kind of noise
(`lab/detection/noise.py`) and a cluster size; rows that are not scored are printed and count in no figure.

Series of iteration times without workers are scored apart (`series_rows.py`; `--series`: only these).

What is right is said in `lab/detection/scoring.py`, what the figures are in `summary.py` beside it. The two
published detectors stop the job to validate after each alarm, which is modelled as perfect: it names whoever is slow
at that time, with their true speed. Their alarm is a false one where validation finds nobody. All settings are fixed in
the code. Jobs for tuning (--tuning) and for scoring come from seeds that cannot meet.

With --results, finished rows are kept in that directory and a run that was stopped goes on where it was; give another
directory after a change to a detector or the generator. The last line of standard output is one JSON object.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import print_result
from series_rows import run_series, series_missed

from megatron_resihp.config import FALSE_ALARMS_PER_JOB
from megatron_resihp.detector.input.table import Table
from megatron_resihp.detector.interface import Detector
from megatron_resihp.detector.monitor import Monitor
from megatron_resihp.detector.verdict import Kind
from megatron_resihp.lab.baselines.greyhound import Greyhound
from megatron_resihp.lab.baselines.resihp import Resihp
from megatron_resihp.lab.baselines.validation import Finding
from megatron_resihp.lab.detection.draws import SEQUENCES, Purpose, draw_job
from megatron_resihp.lab.detection.jobs import SyntheticJob
from megatron_resihp.lab.detection.noise import NOISES
from megatron_resihp.lab.detection.scoring import WINDOW, FaultScore, JobScore, watch
from megatron_resihp.lab.detection.shapes import SHAPES
from megatron_resihp.lab.detection.summary import summarize

DETECTORS = ("this", "greyhound", "resihp")
CHUNK = 20
"""Jobs that a process takes at a time."""
UNSCORED_SHARE = 6
"""Rows that are only printed get one job for this many jobs of a scored row."""
GOALS = {
    "accuracy": 0.998, "false_alarms_per_job": 0.01, "smallest_slowdown": 0.05, "latency_iterations": 3,
    "speed_error": 0.02,
}  # fmt: skip

ACCURACY_BOUND = 0.995
WORST_ROW = 0.03
"""False alarms per job that no scored row may exceed."""


class Row(NamedTuple):
    """Jobs of a kind of noise and a cluster size, watched by one detector."""

    detector: str
    noise: int
    shape: int

    @property
    def name(self) -> str:
        return f"{self.detector}-{NOISES[self.noise].name}-{SHAPES[self.shape].workers}"


class Draw(NamedTuple):
    """The selection of drawn jobs."""

    purpose: Purpose
    seed: int
    jobs: int
    timed_every: int

    def count(self, row: Row) -> int:
        return self.jobs if NOISES[row.noise].scored else max(2, self.jobs // UNSCORED_SHARE)


# ---- running


def make_detector(name: str, job: SyntheticJob) -> Detector:
    def validate(iteration: int) -> list[Finding]:
        return [Finding(fault.kind, fault.workers, fault.speed) for fault in job.faults if fault.onset <= iteration]

    given = (job.layout, FALSE_ALARMS_PER_JOB, job.spec.iterations)
    if name == "this":
        return Monitor(*given)
    return Greyhound(*given, validate=validate) if name == "greyhound" else Resihp(*given, validate=validate)


def run_chunk(rows: Sequence[Row], draw: Draw, first: int, last: int) -> list[list[JobScore]]:
    """Score jobs `first` to `last` − 1 of rows that have the same ones, which are drawn only once; row by row."""
    scores: list[list[JobScore]] = [[] for _ in rows]
    for index in range(first, last):
        noise, shape = NOISES[rows[0].noise], SHAPES[rows[0].shape]
        job = draw_job(draw.purpose, draw.seed, noise, shape, index, draw.timed_every)
        for row, found in zip(rows, scores, strict=True):
            found.append(watch(job, make_detector(row.detector, job)))
    return scores


def run_rows(rows: Sequence[Row], draw: Draw, processes: int) -> Iterator[tuple[Row, list[JobScore]]]:
    """Rows with their scores, as they are finished."""
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        chunks: dict[tuple[Row, ...], list[Future[list[list[JobScore]]]]] = {}
        for _, alike in itertools.groupby(rows, key=lambda row: (row.noise, row.shape)):
            group = tuple(alike)
            starts = range(0, draw.count(group[0]), CHUNK)
            ends = [min(start + CHUNK, draw.count(group[0])) for start in starts]
            chunks[group] = [pool.submit(run_chunk, group, draw, *chunk) for chunk in zip(starts, ends, strict=True)]
        group_of = {future: group for group, futures in chunks.items() for future in futures}
        try:
            for future in as_completed(group_of):
                group = group_of[future]
                future.result()  # a failure ends the run at once
                if group in chunks and all(chunk.done() for chunk in chunks[group]):
                    results = [chunk.result() for chunk in chunks.pop(group)]
                    for number, row in enumerate(group):
                        yield row, [score for result in results for score in result[number]]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


# ---- keeping


def kept(directory: Path | None, row: Row, draw: Draw) -> list[JobScore] | None:
    """The results of an earlier run for the same jobs of a row."""
    path = directory / f"{row.name}.json" if directory else None
    if path is None or not path.exists():
        return None
    data = json.loads(path.read_text(encoding="utf-8"))
    return list(map(_score_from_json, data["scores"])) if data["draw"] == list(draw) else None


def _score_from_json(data: dict[str, Any]) -> JobScore:
    faults = tuple(FaultScore(**{**fault, "kind": Kind(fault["kind"])}) for fault in data["faults"])
    return JobScore(data["sequence"], faults, data["false_alarms"])


def keep(directory: Path, row: Row, draw: Draw, scores: Sequence[JobScore]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    data = {"draw": list(draw), "scores": [asdict(score) for score in scores]}
    (directory / f"{row.name}.json").write_text(json.dumps(data), encoding="utf-8")


# ---- reporting


def figures(results: dict[Row, list[JobScore]], detector: str) -> dict[str, Any]:
    """A detector's figures over all scored rows, by sequence length, and row by row."""
    rows = {row: scores for row, scores in results.items() if row.detector == detector}
    scored = [score for row, scores in rows.items() if NOISES[row.noise].scored for score in scores]
    by_sequence = {str(length): [score for score in scored if score.sequence == length] for length in SEQUENCES}
    details = [
        {"noise": NOISES[row.noise].name, "workers": SHAPES[row.shape].workers, "scored": NOISES[row.noise].scored,
         "jobs": len(scores), **summarize(scores)}
        for row, scores in sorted(rows.items())
    ]  # fmt: skip
    return {
        **summarize(scored),
        "by_sequence": {length: summarize(scores) for length, scores in by_sequence.items() if scores},
        "rows": details,
    }


def line(name: str, found: dict[str, Any]) -> str:
    """Figures in one line of a table."""
    cells = []
    for key, scale, digits in (
        ("accuracy", 100, 2), ("found", 100, 1), ("false_alarms_per_job", 1, 4), ("smallest_slowdown", 100, 1),
        ("latency_iterations", 1, 1), ("speed_error", 100, 2),
    ):  # fmt: skip
        cells.append(" ".join(
            "     –" if found[key].get(bound) is None else f"{scale * found[key][bound]:6.{digits}f}"
            for bound in ("value", "low", "high")
        ))  # fmt: skip
    return f"{name:24}" + " | ".join(cells)


def missed(found: dict[str, Any]) -> list[str]:
    """The goals that these figures miss, before rounding; a goal without a measurement is missed."""
    values = {name: found[name]["value"] for name in GOALS}
    unknown = [name for name, value in values.items() if value is None]
    worse = [
        name for name, goal in GOALS.items()
        if name not in unknown and (values[name] < goal if name == "accuracy" else values[name] > goal)
    ]  # fmt: skip
    rows = [
        f"false alarms of {row['noise']} at {row['workers']}" for row in found["rows"]
        if row["scored"] and row["false_alarms_per_job"]["value"] > WORST_ROW
    ]  # fmt: skip
    bound = ["lower bound of accuracy"] if (found["accuracy"]["low"] or 0.0) < ACCURACY_BOUND else []
    return [*unknown, *worse, *bound, *rows]


HEADER = f"{'value, 95 % bounds':24}" + " | ".join(
    f"{title:20}"
    for title in ("accuracy %", "found %", "false alarms / job", "smallest s %", "latency", "error of p, points")
)


def steady_series(seed: int) -> dict[str, int]:
    """Greyhound on 18 series of a steady workload with a labelled slow-down each: how many it finds in time."""
    rng = np.random.default_rng(seed)
    found = false = 0
    for factor in np.linspace(1.15, 2.0, 18):
        series = 1 + rng.uniform(0.01, 0.02) * rng.standard_normal(300)
        onset = int(rng.integers(60, 180))
        slow = range(onset, onset + 60)
        series[slow.start - 1 : slow.stop - 1] *= factor
        culprit = Finding(Kind.COMPUTE, (0,), float(1 / factor))
        table = Table.of(series[:, None])
        detector = Greyhound(
            table.layout(), FALSE_ALARMS_PER_JOB, series.size,
            validate=lambda iteration, slow=slow, culprit=culprit: [culprit] if iteration in slow else [],
        )  # fmt: skip
        verdicts = [verdict for observations in table.observations() for verdict in detector.observe(observations)]
        right = [verdict for verdict in verdicts if verdict.workers and verdict.iteration <= onset + WINDOW]
        found += len(right)
        false += len(verdicts) - len(right)
    return {"found": found, "of": 18, "false": false}


def plot(result: dict[str, Any], path: Path) -> None:
    """False alarms of each scored row, and the share found of each slow-down."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), width_ratios=(3, 2))
    names = [name for name in DETECTORS if name in result]
    for number, name in enumerate(names):
        rows = [row for row in result[name]["rows"] if row["scored"]]
        places = np.arange(len(rows)) + 0.25 * (number - 1)
        left.bar(places, [row["false_alarms_per_job"]["value"] for row in rows], 0.25, label=name)
        left.set_xticks(range(len(rows)), [f"{row['noise']}\n{row['workers']}" for row in rows], rotation=90)
        found = result[name]["found_by_slowdown"]
        values, lows, highs = ([100 * each[key] for each in found.values()] for key in ("value", "low", "high"))
        slowdowns = [100 * float(slowdown) for slowdown in found]
        right.plot(slowdowns, values, marker="o", label=name)
        right.fill_between(slowdowns, lows, highs, alpha=0.2)
    left.set_yscale("symlog", linthresh=0.01)
    left.axhline(GOALS["false_alarms_per_job"], color="grey", linewidth=0.8, linestyle="--")
    left.set_ylabel("false alarms per job")
    right.set_xlabel("slow-down s in %")
    right.set_ylabel("culprits named within 30 iterations, %")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=600, help="jobs in each scored row, half of them healthy (600)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tuning", action="store_true", help="draw jobs for tuning instead of those for scoring")
    parser.add_argument("--quick", action="store_true", help="12 jobs a row, 16 and 64 workers")
    parser.add_argument("--workers", default="16,64,256", help="cluster sizes (16,64,256)")
    parser.add_argument("--noises", default=",".join(noise.name for noise in NOISES), help="kinds of noise (all)")
    parser.add_argument("--detectors", default=",".join(DETECTORS), help="this,greyhound,resihp")
    parser.add_argument("--timed-every", type=int, default=4, help="TP waits are timed in every so-manieth micro-batch")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, help="directory in which finished rows are kept")
    parser.add_argument("--series", action="store_true", help="only series without workers: a few minutes on one core")
    parser.add_argument("--series-count", type=int, default=40, help="series of each kind, healthy and slow each (40)")
    parser.add_argument("--plot", type=Path, help="draw the figure into this file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.jobs, arguments.workers, arguments.series_count = 12, "16,64", 4
    for option, known in (("detectors", DETECTORS), ("noises", [noise.name for noise in NOISES]),
                          ("workers", [str(shape.workers) for shape in SHAPES])):  # fmt: skip
        chosen = getattr(arguments, option).split(",")
        if unknown := set(chosen) - set(known):
            parser.error(f"--{option} does not know {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        setattr(arguments, option, chosen)
    return arguments


def main() -> int:
    arguments = parse_arguments()
    # The processes share few cores; one thread each is fastest. They read this when they import numpy.
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    purpose = Purpose.TUNING if arguments.tuning else Purpose.SCORING
    if arguments.series:
        series = run_series(arguments.seed, arguments.series_count, arguments.results)
        print_result({"series": series, "seed": arguments.seed, "missed": series_missed(series)}, digits=6)
        return 0
    draw = Draw(purpose, arguments.seed, arguments.jobs, arguments.timed_every)
    rows = [
        Row(detector, noise, shape)
        for shape in range(len(SHAPES)) if str(SHAPES[shape].workers) in arguments.workers
        for noise in range(len(NOISES)) if NOISES[noise].name in arguments.noises
        for detector in arguments.detectors
    ]  # fmt: skip
    started = time.monotonic()
    results = {row: scores for row in rows if (scores := kept(arguments.results, row, draw)) is not None}
    print(f"{len(rows)} rows, {len(results)} of them kept from before\n{HEADER}", file=sys.stderr)
    for row, scores in run_rows([row for row in rows if row not in results], draw, arguments.processes):
        results[row] = scores
        if arguments.results:
            keep(arguments.results, row, draw, scores)
        print(f"{line(row.name, summarize(scores))}  [{time.monotonic() - started:.0f} s]", file=sys.stderr)
    result: dict[str, Any] = {name: figures(results, name) for name in arguments.detectors}
    for name in arguments.detectors:
        print(line(f"{name}, all scored rows", result[name]), file=sys.stderr)
    result |= {
        "goals": GOALS, "jobs_per_row": arguments.jobs, "seed": arguments.seed, "purpose": purpose.name.lower(),
        "greyhound_on_steady_series": steady_series(arguments.seed), "seconds": time.monotonic() - started,
    }  # fmt: skip
    if "this" in arguments.detectors:
        result["series"] = run_series(arguments.seed, arguments.series_count, arguments.results)
        result["missed"] = missed(result["this"]) + series_missed(result["series"])
        print(f"goals missed: {', '.join(result['missed']) or 'none'}", file=sys.stderr)
    if arguments.plot:
        plot(result, arguments.plot)
    print_result(result, digits=6)
    return 0


if __name__ == "__main__":
    sys.exit(main())
