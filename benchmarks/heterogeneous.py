#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A model of unequal layers without failures: the planner's pipeline against Megatron's, in real processes.

    python benchmarks/heterogeneous.py [--time-scale S] [--iterations N]

Four CPU workers, a stage each, train a tiny GPT whose ops last as long as an H800's would, times `--time-scale`: four
dense layers, then twelve with mixtures of experts, and a head with a large vocabulary that takes twice as long as a
layer. One job takes three plans in turn: its own 1F1B, interleaved 1F1B with two chunks in a stage as Megatron cuts and
orders them, and the `adaptis` strategy's layers, placement and order of ops. A plan's time is the median `duration_s`
of the `iteration` events of its epoch without the first one.

- `over_interleaved`, `over_1f1b`: how many times as fast the planner's plan is; `…_predicted`: by the simulator.
- `simulator_error_percent`: by how much the measured `over_interleaved` misses the predicted one.

The last line of standard output is one JSON object.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from common import SmallJob, add_time_scale, all_events, load_average, print_result, running
from throughput import epochs_of

from megatron_resihp.cost.arguments import ARGUMENTS
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.profile import BUILT_IN
from megatron_resihp.cost.running import cost_of_job
from megatron_resihp.plan import Chunk, ParallelPlan, Replica, Schedule
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.strategies.adaptis import adaptis
from megatron_resihp.protocol.planning import KnownJob

JOB: Final = SmallJob(tensor_parallel=1, pipeline_parallel=4, replicas=1, layers=16, hidden=32, sequence=32, batch=16)
DENSE: Final = 4
EXPERTS: Final = {
    "num_experts": 4, "moe_layer_freq": [0] * DENSE + [1] * (JOB.layers - DENSE), "moe_ffn_hidden_size": 32,
    "moe_router_topk": 2,
}  # fmt: skip
STAGES: Final = JOB.pipeline_parallel
CHUNKS_PER_STAGE: Final = 2
TIME_SCALE: Final = 0.25
"""Seconds of the emulated clock per second of the device. Real processes add about 5 ms to each op, which weighs more
with the smaller ops of the planned pipeline: at 0.1 the ratio is 8 % less than the simulator's, for that alone."""
JOB_S: Final = 900.0
GOAL: Final = 5.0
"""Percent by which the simulator may be wrong."""


def own_plan() -> ParallelPlan:
    """1F1B with as many layers in each stage."""
    return _plan(_chunks(STAGES), None)


def interleaved_plan() -> ParallelPlan:
    return _plan(_chunks(STAGES * CHUNKS_PER_STAGE), Schedule("interleaved"))


def _chunks(count: int) -> tuple[Chunk, ...]:
    """Equally many layers in each stage; the embedding is in the first and the head in the last."""
    each = JOB.layers // count
    ends = [1 + each * (number + 1) for number in range(count)]
    ends[-1] += 1
    return tuple(
        Chunk(number % STAGES, first, end) for number, (first, end) in enumerate(zip([0, *ends], ends, strict=False))
    )


def _plan(chunks: tuple[Chunk, ...], schedule: Schedule | None) -> ParallelPlan:
    replica = Replica(tuple((worker,) for worker in range(STAGES)), tuple(range(JOB.batch)), chunks, schedule)
    return ParallelPlan((replica,))


def cost_of(profile: Path) -> JobCost:
    """The costs as the running job's planner has them."""
    arguments: dict[str, Any] = dict.fromkeys(ARGUMENTS) | EXPERTS | {
        "num_layers": JOB.layers, "hidden_size": JOB.hidden, "num_attention_heads": 4, "vocab_size": 127,
        "max_position_embeddings": JOB.sequence, "seq_length": JOB.sequence, "micro_batch_size": 1,
        "tensor_model_parallel_size": 1,
    }  # fmt: skip
    arguments = {name: value for name, value in arguments.items() if value is not None}
    job = KnownJob(tensor_parallel=1, micro_batches=JOB.batch, arguments=arguments, emulated=str(profile))
    return cost_of_job(job, JOB.workers, JOB.workers, own_plan().replicas[0].chunks, None)


def command(plans: dict[str, ParallelPlan], iterations: int, profile: Path, directory: Path) -> list[str]:
    """Run each plan for equally many iterations; a plan takes effect one or two iterations after the request."""
    files = []
    for number, (name, plan) in enumerate(list(plans.items())[1:], 1):
        file = directory / f"{name}.json"
        file.write_text(json.dumps(plan.to_dict()))
        files.append(f"{file}@{number * iterations + 1}")
    values = {name.replace("_", "-"): str(value).replace(" ", "") for name, value in EXPERTS.items()}
    flags = [text for name, value in values.items() for text in (f"--{name}", value)]
    return [
        *JOB.under_resihp(len(plans) * iterations + 2, directory / "run"), *flags, "--disable-bias-linear",
        "--resihp-emulate", str(profile), "--resihp-plan", *files,
    ]  # fmt: skip


def measure(plans: dict[str, ParallelPlan], iterations: int, profile: Path, directory: Path) -> dict[str, list[float]]:
    """Seconds of each plan's iterations.

    Raises:
        RuntimeError: the job failed.
    """
    with running(command(plans, iterations, profile, directory), directory / "output") as job:
        if job.wait(JOB_S) != 0:
            raise RuntimeError(f"the job failed: {(directory / 'output').read_text()[-500:]}")
    epochs = epochs_of(all_events(directory / "run"))
    return {name: [s for _, s in own[1:]] for name, (_, own) in zip(plans, epochs, strict=True)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_time_scale(parser, TIME_SCALE)
    parser.add_argument("--iterations", type=int, default=7, help="of each plan (default 7)")
    options = parser.parse_args()
    health = Health(dict.fromkeys(range(JOB.workers), 1.0))
    with tempfile.TemporaryDirectory(prefix="heterogeneous-") as scratch:
        profile = Path(scratch, "profile.json")
        device = json.loads((BUILT_IN / "h800.json").read_text())
        profile.write_text(json.dumps({**device, "time_scale": options.time_scale}))
        cost = cost_of(profile)
        plans = {"1f1b": own_plan(), "interleaved": interleaved_plan(), "planned": adaptis(own_plan(), health, cost)}
        print(f"planned: {plans['planned'].replicas[0].chunks}", file=sys.stderr)
        seconds = {name: statistics.median(found) for name, found in
                   measure(plans, options.iterations, profile, Path(scratch)).items()}  # fmt: skip
    predicted = {name: evaluate(plan, health, cost).iteration_s for name, plan in plans.items()}
    over, over_predicted = (each["interleaved"] / each["planned"] for each in (seconds, predicted))
    over_1f1b, over_1f1b_predicted = (each["1f1b"] / each["planned"] for each in (seconds, predicted))
    print_result({
        "over_interleaved": over, "over_interleaved_predicted": over_predicted,
        "over_1f1b": over_1f1b, "over_1f1b_predicted": over_1f1b_predicted,
        "simulator_error_percent": 100 * abs(over / over_predicted - 1), "goal": GOAL,
        "iteration_s": seconds, "predicted_s": predicted, "time_scale": options.time_scale,
        "load_average": load_average(),
    })  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
