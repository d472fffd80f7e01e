"""What measuring costs: the probes' share of the training thread's time, and how many workers' messages a second the
coordinator unpacks and assembles on one core.

`probe_us_per_op` is what 8 micro-batches take longer with the probes, over their 16 ops: in each a worker in the middle
of a pipeline receives, sends and takes part in 8 tensor-parallel collectives. All that stands for Megatron, torch and
gloo does nothing. Median of 200 iterations; seconds are CPU time, throughout.
`overhead_percent` is the same on a GPU, with real work, as a share of the iteration; null where there is none.

May import the standard library, numpy, `megatron_resihp` without torch, and `probe_cost`, which imports everything.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import load_average, print_result
from probe_cost import measure_probes

from megatron_resihp.detector.assemble import Assembler
from megatron_resihp.detector.layout import layout_of
from megatron_resihp.detector.observations import Layout
from megatron_resihp.detector.records import OP, SPAN, TRANSFER, WORKLOAD, IterationRecord, OpKind
from megatron_resihp.detector.wire import pack
from megatron_resihp.plan.parallel_plan import ParallelPlan, Replica

GOAL_MESSAGES_PER_S = 10_000
GOAL_PROBE_US_PER_OP = 20
TENSOR_PARALLEL, PIPELINE_PARALLEL, MICRO_BATCHES, WORKERS_A_NODE = 4, 16, 8, 8


def synthetic_job(replicas: int) -> Layout:
    """A job of `replicas` × 16 stages × 4 tensor-parallel members, 8 workers a node."""
    ids = np.arange(replicas * PIPELINE_PARALLEL * TENSOR_PARALLEL).reshape(replicas, PIPELINE_PARALLEL, -1)
    plan = ParallelPlan(tuple(
        Replica(tuple(map(tuple, stages)), tuple(range(number * MICRO_BATCHES, (number + 1) * MICRO_BATCHES)))
        for number, stages in enumerate(ids.tolist())
    ))  # fmt: skip
    return layout_of(plan, 0, {worker: worker // WORKERS_A_NODE for worker in ids.reshape(-1).tolist()})


def synthetic_record(layout: Layout, row: int, iteration: int) -> IterationRecord:
    """What the probes of one worker would send; node n's clock shows n seconds too much."""
    start = iteration + float(layout.node[row])
    indices = layout.replica[row] * MICRO_BATCHES + np.arange(MICRO_BATCHES)
    ops = np.zeros(2 * MICRO_BATCHES, OP)
    ops["kind"], ops["micro_batch"] = np.repeat([OpKind.F, OpKind.B], MICRO_BATCHES), np.tile(indices, 2)
    ops["start"] = start + 0.02 * np.arange(2 * MICRO_BATCHES)
    ops["end"], ops["waited"] = ops["start"] + 0.015, 0.001
    transfers = []
    for step in (-1, 1):
        stage = layout.stage[row] + step
        for kind in (OpKind.F, OpKind.B) if 0 <= stage < PIPELINE_PARALLEL else ():
            part = np.zeros(MICRO_BATCHES, TRANSFER)
            part["peer"], part["kind"], part["micro_batch"] = row + step * TENSOR_PARALLEL, kind, indices
            part["received"], part["bytes"] = (step < 0) == (kind == OpKind.F), 1 << 24
            part["posted"] = start + 0.02 * np.arange(MICRO_BATCHES) + 0.01 * kind
            part["done"] = part["posted"] + 0.002
            transfers.append(part)
    workload, spans = np.zeros(MICRO_BATCHES, WORKLOAD), np.zeros(5, SPAN)
    workload["micro_batch"], workload["tokens"], workload["squares"] = indices, 8192, 3e7
    spans["kind"], spans["start"], spans["end"] = np.arange(5), start + 0.8, start + 0.81
    return IterationRecord(
        0, iteration, int(layout.workers[row]), 0, start, start + 0.9, ops, np.concatenate(transfers), workload, spans
    )


def measure_messages(replicas: int, iterations: int) -> dict[str, Any]:
    """Unpack and assemble a synthetic job's messages; a second is one of the core's own, whoever else waits for it."""
    layout = synthetic_job(replicas)
    count = len(layout.workers)
    messages = [
        pack(synthetic_record(layout, row, number)) for number in range(1, iterations + 1) for row in range(count)
    ]
    assembler = Assembler()
    assembler.begin(layout)
    began, judged = time.process_time(), 0
    for message in messages:
        judged += len(assembler.add(message, now=0.0))
    seconds = time.process_time() - began
    if judged != iterations or assembler.counters.nonzero():
        raise RuntimeError(f"{judged} of {iterations} iterations, {assembler.counters.nonzero()}")
    return {
        "messages_per_s": len(messages) / seconds,
        "message_bytes": max(map(len, messages)),
        "workers": count,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=16, help="replicas of 64 workers (default 16)")
    parser.add_argument("--iterations", type=int, default=10, help="iterations of messages (default 10)")
    options = parser.parse_args()
    result = measure_probes() | measure_messages(options.replicas, options.iterations)
    result["load_average"] = load_average()
    if result["probe_us_per_op"] > GOAL_PROBE_US_PER_OP:
        print(f"the probes take more than {GOAL_PROBE_US_PER_OP} microseconds for each op", file=sys.stderr)
    if result["messages_per_s"] < GOAL_MESSAGES_PER_S:
        print(f"fewer than {GOAL_MESSAGES_PER_S} messages a second", file=sys.stderr)
    print_result(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
