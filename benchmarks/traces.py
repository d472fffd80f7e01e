# SPDX-License-Identifier: Apache-2.0
"""The detector on recorded jobs of others: the workers that it names, and whether these are at fault.

Takes the recordings' directory as `--traces DIR` or from RESIHP_TRACES; without it prints that they were left out. The
recordings have no sequence lengths and their steps are not consecutive.

- ByteDance Seed's StragglerAnalysis (OSDI 2025), per-op times as parquet. AR: one artificially slow worker. ST: a long
  last stage; SE: unequal sequences; in both no device is at fault. Only ops are judged: sends and receives were
  recorded together, so that a transfer's own time is not known.
- Alibaba PAI, one time per worker and mini-batch as CSV. In job 1 a straggler develops.

May import the standard library, numpy, pyarrow and `megatron_resihp`.
"""

import argparse
import csv
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import print_result

from megatron_resihp.config import FALSE_ALARMS_PER_JOB
from megatron_resihp.detector.input.counters import Counters
from megatron_resihp.detector.input.join import Joiner
from megatron_resihp.detector.input.observations import IterationObservations, Layout
from megatron_resihp.detector.input.records import OP, SPAN, TRANSFER, WORKLOAD, IterationRecord, OpKind, SpanKind
from megatron_resihp.detector.input.replay import Replay, replay
from megatron_resihp.detector.input.table import Table
from megatron_resihp.detector.settings import Settings
from megatron_resihp.detector.verdict import Change

WORKERS_A_NODE = 8
BYTEDANCE_WARM_UP = 20
"""Of 32 to 44 recorded steps; the default would leave none to judge."""
OPS = {"forward-compute": OpKind.F, "backward-compute": OpKind.B}
SPANS = {"grads-reduce-scatter": SpanKind.GRADIENT_SYNC, "optimizer": SpanKind.OPTIMIZER,
         "gc": SpanKind.GARBAGE_COLLECTION}  # fmt: skip
EXPECTED: dict[str, set[int]] = {"AR": {0}, "ST": set(), "SE": set()}
"""Workers that are at fault."""
PAI_STRAGGLER, PAI_FROM, PAI_TO = 6, 181, 195
"""Job 1: only worker 6 takes up to twice its time in these mini-batches."""


def bytedance_job(path: Path) -> tuple[Layout, list[IterationObservations]]:
    """A parquet file as a layout of its recorded ranks (tensor-parallel rank 0 of each stage) and its steps."""
    from pyarrow import parquet

    names = ["dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "mb_id"]
    table = parquet.read_table(path, columns=names)
    columns = {name: np.asarray(table.column(name).to_pylist()) for name in names}
    ranks, first = np.unique(columns["rank"], return_index=True)
    zero = np.zeros_like(ranks, dtype=np.int64)
    layout = Layout(
        0, ranks.astype(np.int64), columns["dp_rank"][first].astype(np.int64), columns["stage"][first].astype(np.int64),
        zero, ranks // WORKERS_A_NODE, np.zeros((0, 2), np.int64),
    )  # fmt: skip
    joiner, counters = Joiner(layout), Counters()
    steps = []
    for step in np.unique(columns["step"]):
        at = {name: values[columns["step"] == step] for name, values in columns.items()}
        records = [_record(int(step), int(rank), at) for rank in np.unique(at["rank"])]
        steps.append(joiner.join(int(step), records, counters))
    if counters.nonzero():
        print(f"{path.name}: left out {counters.nonzero()}", file=sys.stderr)
    return layout, steps


def _record(step: int, rank: int, at: dict[str, NDArray[Any]]) -> IterationRecord:
    mine = at["rank"] == rank
    kinds, micro_batch = at["optype"][mine], at["mb_id"][mine]
    start = at["start_ts"][mine].astype(np.float64)
    end = start + at["duration"][mine]
    ops = [
        (OPS[kind], 0, index, begin, finish, np.nan)
        for kind, index, begin, finish in zip(kinds, micro_batch, start, end, strict=True)
        if kind in OPS
    ]
    spans = [
        (SPANS[kind], begin, finish) for kind, begin, finish in zip(kinds, start, end, strict=True) if kind in SPANS
    ]
    return IterationRecord(
        0, step, rank, 0, float(start.min()), float(end.max()),
        np.array(ops, OP), np.zeros(0, TRANSFER), np.zeros(0, WORKLOAD), np.array(spans, SPAN),
    )  # fmt: skip


def pai_job(path: Path) -> Table:
    """A CSV file of columns worker, time (its place in the job) and batch_time_norm."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    workers, column = np.unique([int(row["worker"]) for row in rows], return_inverse=True)
    times, place = np.unique([int(row["time"]) for row in rows], return_inverse=True)
    seconds = np.full((len(times), len(workers)), np.nan)
    seconds[place, column] = [float(row["batch_time_norm"]) / 1000 for row in rows]
    # Mini-batches are renumbered: `time` counts seconds or records, and leaves most numbers out.
    return Table.of(seconds, workers)


def judge(layout: Layout, steps: Sequence[IterationObservations], warm_up: int) -> Replay:
    """The detector with its own settings, except for the length of warm-up."""
    settings = replace(Settings(), warm_up=warm_up)
    return replay([layout, *steps], FALSE_ALARMS_PER_JOB, len(steps), settings)


def judge_bytedance(traces: Path, name: str) -> dict[str, Any]:
    """The named workers, and whether they are exactly the workers at fault."""
    result = judge(*bytedance_job(traces / "bytedance" / f"trace-{name}.parquet"), BYTEDANCE_WARM_UP)
    found = {worker for verdict in result.verdicts for worker in verdict.workers}
    return {"named": sorted(found), "right": found == EXPECTED[name], **_counts(result)}


def judge_pai(traces: Path, number: int) -> dict[str, Any]:
    """The named workers, with the time of each verdict."""
    table = pai_job(traces / "alibaba_pai" / f"pai_job_{number}_norm.csv")
    result = judge(table.layout(), list(table.observations()), Settings.warm_up)
    onsets = [verdict for verdict in result.verdicts if verdict.change is Change.ONSET]
    return {"onsets": [[verdict.iteration, *verdict.workers] for verdict in onsets], **_counts(result)}


def _counts(result: Replay) -> dict[str, int]:
    return {"workers": len(result.workers), "iterations": len(result.iterations), "judged": result.judged}


def judge_all(traces: Path) -> dict[str, Any]:
    """All recorded jobs that the directory holds."""
    jobs: dict[str, Any] = {f"bytedance_{name}": judge_bytedance(traces, name) for name in EXPECTED}
    jobs |= {f"pai_{number}": judge_pai(traces, number) for number in (1, 2, 3, 4)}
    named = [(at, workers) for at, *workers in jobs["pai_1"]["onsets"] if PAI_FROM <= at <= PAI_TO]
    inside = [at for at, workers in named if workers == [PAI_STRAGGLER]]
    jobs["pai_1"]["right"] = bool(inside) and len(inside) == len(named)
    return {
        **{f"{name}_right": jobs[f"bytedance_{name}"]["right"] for name in EXPECTED},
        "PAI_1_found": bool(inside),
        "PAI_1_latency": inside[0] - PAI_FROM + 1 if inside else None,
        "jobs": jobs,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--traces", type=Path, metavar="DIR", default=os.environ.get("RESIHP_TRACES"),
        help="the recordings (default: RESIHP_TRACES)",
    )  # fmt: skip
    options = parser.parse_args()
    if options.traces is None or not Path(options.traces).is_dir():
        print("recorded jobs were left out: give their directory with --traces or RESIHP_TRACES", file=sys.stderr)
        print_result({"left_out": "no traces"})
        return 0
    print_result(judge_all(Path(options.traces)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
