# SPDX-License-Identifier: Apache-2.0
"""How much faster tuned pipelines are than Megatron's schedules, on healthy devices and models whose layers differ.

For each of a fixed list of models and sizes: the makespan of one pipeline's micro-batches with Megatron's 1F1B, with
2-chunk interleaved 1F1B, with interleaved 1F1B of the chunk count that is best, and with what `adaptis` makes of it, in
no more memory on any device than 2-chunk interleaved takes on its fullest one (weights, gradients, optimizer and peak
activations).

Megatron's pipelines have as many decoder layers in each chunk; embedding and head come on top of the first and the last
one, which is Megatron's default. Where layers can't be divided so, chunks differ by one layer and the larger ones stand
in the middle, as somebody would write them into `--pipeline-model-parallel-layout`; only for one and two chunks, since
more are compared where Megatron divides by itself. Megatron's B is whole and frees all activations; in tuned programs W
is an op of its own, and all activations are kept until W (`kept_until_w` 1). Transfers between devices take their time.

The floor is the work over the devices, which no program beats: `cap_share` is floor ÷ makespan. `any_layout_s` is what
no layout beats, because no layer can be shared by devices: neither the busiest device's whole layers (an integer
program, its proven bound) nor the device of any one layer, which waits for those before it. `bound_s` is what no order
of ops beats in the layout that was found. With little between `bound_s` and makespan, only other layouts can be faster.

Layer times: "published" ones are the authors' profiles (AdaPtis, arXiv 2509.23722, milliseconds on H800), taken as of
4 tensor-parallel members and 4096 tokens; the others follow from FLOPs at 41 % of an H800's peak.

May import numpy, scipy, matplotlib and `megatron_resihp` without torch.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import load_average, print_result

from megatron_resihp.cost.device import Device
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.memory import memory_of
from megatron_resihp.cost.model.layers import LayerKind, model_from_arguments
from megatron_resihp.cost.model.presets import PRESETS
from megatron_resihp.cost.training import Training
from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.pipeline.search.bounds import makespan_lower_bound
from megatron_resihp.pipeline.search.tuning import lower_bound
from megatron_resihp.pipeline.simulate import Timeline
from megatron_resihp.plan import Chunk, ParallelPlan, Replica
from megatron_resihp.planner.evaluation import timeline_of
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.pipelines import layout_of, pipeline_job
from megatron_resihp.planner.strategies.adaptis import with_effort

GOALS_AT_LEAST = {"over_interleaved_mean": 1.35, "over_interleaved_best_mean": 1.25, "cap_share_mean": 0.9}
GOALS_AT_MOST = {"example_bubble_percent": 4.5, "example_bubble_percent_twice_1f1b": 4.0, "tuning_s": 10.0}
EFFORT = 300_000_000
"""Ops run in trials for each shape."""
SEQUENCE = 4096
PUBLISHED: Mapping[str, Mapping[LayerKind, tuple[float, float, float]]] = {
    "llama3-70b": {
        LayerKind.EMBEDDING: (4.37, 2.09, 0.0),
        LayerKind.TRANSFORMER: (5.6, 6.84, 4.37),
        LayerKind.HEAD: (11.45, 18.61, 7.43),
    },
    "nemotron-nano-9b-v2": {
        LayerKind.EMBEDDING: (0.76, 2.87, 0.0),
        LayerKind.MAMBA: (2.68, 4.3, 1.76),
        LayerKind.MLP: (1.85, 1.91, 1.69),
        LayerKind.ATTENTION: (1.93, 2.45, 0.65),
        LayerKind.HEAD: (14.2, 15.7, 0.06),
    },
}
"""Milliseconds of F, B and W of a layer."""


@dataclass(frozen=True)
class Shape:
    """A model on a number of devices.

    Attributes:
        name: for people.
        arguments: Megatron's.
        devices: pipeline-parallel size.
        degree: tensor-parallel size.
        published: name of the published layer times; None: from FLOPs.
        experts: expert-parallel size.
    """

    name: str
    arguments: Mapping[str, Any]
    devices: int
    degree: int = 1
    published: str | None = None
    experts: int = 1

    @property
    def micro_batches(self) -> int:
        """Two for each device, as in the published example."""
        return 2 * self.devices


def _layers(name: str, count: int, dense: int = 0) -> dict[str, Any]:
    """A preset with another number of layers, the first of which are dense."""
    arguments = {**PRESETS[name], "num_layers": count}
    if "moe_layer_freq" in arguments:
        arguments["moe_layer_freq"] = [0] * dense + [1] * (count - dense)
    if "hybrid_layer_pattern" in arguments:
        arguments["hybrid_layer_pattern"] = (arguments["hybrid_layer_pattern"] * 2)[:count]
    return arguments


LLAMA3 = {**PRESETS["llama2-70b"], "vocab_size": 128256}
NANO = "nemotron-nano-9b-v2"
EXAMPLE = Shape(NANO, PRESETS[NANO], 4, 4, NANO)
SHAPES = (
    EXAMPLE,
    Shape(NANO, PRESETS[NANO], 7, 4, NANO),
    Shape(NANO, PRESETS[NANO], 14, 4, NANO),
    *(Shape("llama3-70b", LLAMA3, devices, 4, "llama3-70b") for devices in (4, 8, 16)),
    Shape("gemma-7b, 32 layers", _layers("gemma-7b", 32), 4),
    Shape("gemma-7b, 32 layers", _layers("gemma-7b", 32), 8),
    Shape("gemma-7b, 64 layers", _layers("gemma-7b", 64), 16),
    Shape("deepseek-v2-lite, 4 dense + 28 MoE", _layers("deepseek-v2-lite", 32, 4), 4, experts=8),
    Shape("deepseek-v2-lite, 4 dense + 28 MoE", _layers("deepseek-v2-lite", 32, 4), 8, experts=8),
    Shape("deepseek-v2-lite, 8 dense + 56 MoE", _layers("deepseek-v2-lite", 64, 8), 16, experts=8),
    Shape("nemotron-h-8b", PRESETS["nemotron-h-8b"], 4),
    Shape("nemotron-h-8b, 64 layers", _layers("nemotron-h-8b", 64), 8),
    Shape("qwen2.5-14b", PRESETS["qwen2.5-14b"], 8),
    Shape("deepseek-v3", PRESETS["deepseek-v3"], 16, 2, experts=32),
)


def job_of(shape: Shape) -> JobCost:
    """The costs of the shape's work; the caller still has to set the memory limit."""
    model = model_from_arguments(shape.arguments)
    alone = None
    if shape.published:
        times = [PUBLISHED[shape.published][layer.kind] for layer in model.layers]
        alone = np.array(times).T / 1e3 * shape.degree
    training = Training(SEQUENCE, sequence_parallel=True, expert_parallel=shape.experts)
    device = Device(989e12, 0.41, latency=1e-5, bandwidth=50e9)
    return JobCost(model, training, device, shape.micro_batches, alone=alone)


def megatron_plan(shape: Shape, job: JobCost, chunks: int) -> ParallelPlan:
    """Megatron's own layers with `chunks` chunks on each device."""
    count = chunks * shape.devices
    each, rest = divmod(job.layers - 2, count)
    sizes = [each] * count
    for place in sorted(range(count), key=lambda place: (abs(2 * place - count + 1), place))[:rest]:
        sizes[place] += 1
    sizes[0] += 1
    sizes[-1] += 1
    ends = [0, *accumulate(sizes)]
    of_layers = tuple(Chunk(number % shape.devices, *ends[number : number + 2]) for number in range(count))
    groups = tuple(tuple(range(d * shape.degree, (d + 1) * shape.degree)) for d in range(shape.devices))
    return ParallelPlan((Replica(groups, tuple(range(shape.micro_batches)), of_layers),))


def healthy(shape: Shape) -> Health:
    return Health({worker: 1.0 for worker in range(shape.devices * shape.degree)})


def peak(plan: ParallelPlan, job: JobCost) -> int:
    """Bytes on the fullest worker."""
    return max(use.total for use in memory_of(plan, job.model, job.training).values())


def timeline(plan: ParallelPlan, shape: Shape, job: JobCost) -> Timeline:
    return timeline_of(plan.replicas[0], healthy(shape), job)


def tuned_within(limit: int, shape: Shape, job: JobCost, effort: int) -> tuple[ParallelPlan, JobCost, float]:
    """The plan of `adaptis` within a memory limit, the job with that limit, and the processor seconds of planning."""
    job = replace(job, device=replace(job.device, memory=limit))
    started = time.process_time()
    plan = with_effort(effort)(megatron_plan(shape, job, 1), healthy(shape), job)
    spent = time.process_time() - started
    used = peak(plan, job)
    if used > limit:
        raise AssertionError(f"{shape.name}: the plan needs {used} bytes, more than {limit}")
    return plan, job, spent


def any_layout_s(seconds: np.ndarray, devices: int, micro_batches: int) -> float:
    """A lower bound for every layout of whole layers and every order of ops.

    Args:
        seconds: of F, B and W of each layer for a micro-batch, [3, layers].
    """
    each_alone = np.repeat(seconds[:, :, np.newaxis], micro_batches, axis=2)
    of_one_layer = makespan_lower_bound(range(seconds.shape[1]), each_alone, splits_backward=True)
    return max(micro_batches * least_load(seconds.sum(axis=0), devices), of_one_layer)


def least_load(seconds: np.ndarray, devices: int) -> float:
    """A lower bound on the busiest device's seconds for a micro-batch, proven by an integer program.

    Args:
        seconds: of each layer for a micro-batch.
        devices: to deal them to in any way.
    """
    kinds = Counter(seconds.round(9).tolist())
    times, counts = np.array(list(kinds)), np.array(list(kinds.values()))
    columns = devices * len(times)
    each_kind = np.tile(np.eye(len(times)), devices)
    per_device = np.kron(np.eye(devices), times)
    found = milp(
        np.r_[np.zeros(columns), 1.0],
        constraints=[
            LinearConstraint(np.c_[each_kind, np.zeros(len(times))], counts, counts),
            LinearConstraint(np.c_[per_device, -np.ones(devices)], -np.inf, 0.0),
        ],
        integrality=np.r_[np.ones(columns), 0],
        bounds=Bounds(np.r_[np.zeros(columns), seconds.sum() / devices], np.inf),
        options={"node_limit": 500},
    )
    return float(found.mip_dual_bound)


def measure(shape: Shape, effort: int) -> dict[str, Any]:
    """One row."""
    job = job_of(shape)
    decoder = job.layers - 2
    chunk_counts = [n for n in range(1, decoder // shape.devices + 1) if n <= 2 or decoder % (n * shape.devices) == 0]
    plans = {chunks: megatron_plan(shape, job, chunks) for chunks in chunk_counts}
    theirs = {chunks: timeline(plan, shape, job).makespan for chunks, plan in plans.items()}
    best_chunks = min((chunks for chunks in theirs if chunks > 1), key=lambda chunks: theirs[chunks])
    limit = peak(plans[2], job)
    plan, job, spent = tuned_within(limit, shape, job, effort)
    ours = timeline(plan, shape, job)
    replica = plan.replicas[0]
    pipeline = pipeline_job(replica.stages, shape.micro_batches, 1, healthy(shape), job)
    return {
        "model": shape.name,
        "pipeline_parallel": shape.devices,
        "micro_batches": shape.micro_batches,
        "times": "published" if shape.published else "from FLOPs",
        "chunks": len(replica.chunks),
        "makespan_s": ours.makespan,
        "bound_s": lower_bound(pipeline, layout_of(replica)),
        "any_layout_s": any_layout_s(pipeline.seconds[0], shape.devices, shape.micro_batches),
        "floor_s": pipeline.floor,
        "1f1b_s": theirs[1],
        "interleaved_s": theirs[2],
        "interleaved_best_s": theirs[best_chunks],
        "best_chunks": best_chunks,
        "over_1f1b": theirs[1] / ours.makespan,
        "over_interleaved": theirs[2] / ours.makespan,
        "over_interleaved_best": theirs[best_chunks] / ours.makespan,
        "cap": theirs[best_chunks] / pipeline.floor,
        "cap_share": pipeline.floor / ours.makespan,
        "bubble_percent": 100 * ours.bubble_share,
        "gib": peak(plan, job) / 2**30,
        "gib_limit": limit / 2**30,
        "cpu_s": spent,
    }


def show(row: dict[str, Any]) -> None:
    times = {name: 1e3 * row[f"{name}_s"] for name in ("makespan", "bound", "any_layout", "floor")}
    print(
        f"{row['model']:36}PP {row['pipeline_parallel']:<3}{times['makespan']:6.0f} ms (bound {times['bound']:.0f}, "
        f"any layout {times['any_layout']:.0f}, floor {times['floor']:.0f}); {row['over_1f1b']:.2f} x 1F1B, "
        f"{row['over_interleaved']:.2f} x 2 chunks, {row['over_interleaved_best']:.2f} x {row['best_chunks']} chunks; "
        f"{100 * row['cap_share']:.1f} % of the cap {row['cap']:.2f}; "
        f"{row['gib']:.1f} of {row['gib_limit']:.1f} GiB; {row['cpu_s']:.1f} s",
        flush=True,
    )


def in_twice_the_memory(effort: int) -> float:
    """Mean bubble of the example in percent, with twice the activations of 1F1B on its fullest device."""
    job = job_of(EXAMPLE)
    uses = memory_of(megatron_plan(EXAMPLE, job, 1), job.model, job.training).values()
    limit = max(use.total + use.activations for use in uses)
    plan, job, _ = tuned_within(limit, EXAMPLE, job, effort)
    return 100 * timeline(plan, EXAMPLE, job).bubble_share


def draw(path: Path, effort: int) -> None:
    """Both timelines of the example."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    job = job_of(EXAMPLE)
    two_chunks = megatron_plan(EXAMPLE, job, 2)
    plan, job, _ = tuned_within(peak(two_chunks, job), EXAMPLE, job, effort)
    rows = {"Megatron, interleaved 1F1B with 2 chunks": two_chunks, "adaptis, in the same memory": plan}
    figure, axes = pyplot.subplots(len(rows), figsize=(10, 4.5), sharex=True, layout="constrained")
    colors = {OpKind.F: "#1f5fa8", OpKind.B: "#f2b27a", OpKind.W: "#8fb98b"}
    for axis, (title, each) in zip(axes, rows.items(), strict=True):
        ran = timeline(each, EXAMPLE, job)
        for device, ops in enumerate(ran.program.ops):
            for kind, color in colors.items():
                spans = [(1e3 * ran.start[op], 1e3 * (ran.end[op] - ran.start[op])) for op in ops if op.kind == kind]
                axis.broken_barh(
                    spans, (device - 0.4, 0.8), color=color, edgecolor="white", linewidth=0.4,
                    label=kind.name if device == 0 and spans else None,
                )  # fmt: skip
        axis.set_title(f"{title}: {1e3 * ran.makespan:.0f} ms, {100 * ran.bubble_share:.1f} % idle", loc="left")
        axis.set_yticks(range(EXAMPLE.devices), [f"device {device}" for device in range(EXAMPLE.devices)])
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(f"milliseconds, {EXAMPLE.name}, {EXAMPLE.micro_batches} micro-batches")
    axes[-1].legend(frameon=False, ncols=3, loc="lower right")
    figure.savefig(path, dpi=150)


def mean(rows: list[dict[str, Any]], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--effort", type=float, default=EFFORT, help=f"ops run in trials for each shape (default {EFFORT:.0e})"
    )
    parser.add_argument("--quick", action="store_true", help="only the published example and the other PP 4 shapes")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw both timelines of the published example")
    options = parser.parse_args()
    effort = int(options.effort)
    tuned_within(2**40, EXAMPLE, job_of(EXAMPLE), 1)  # compiles
    rows = []
    for shape in SHAPES:
        if shape.devices == 4 or not options.quick:
            rows.append(measure(shape, effort))
            show(rows[-1])
    small = [row for row in rows if row["pipeline_parallel"] == 4]
    result = {
        "over_interleaved_mean": mean(rows, "over_interleaved"),
        "over_interleaved_best_mean": mean(rows, "over_interleaved_best"),
        "over_1f1b_mean": mean(rows, "over_1f1b"),
        "cap_share_mean": mean(small, "cap_share"),
        "cap_share_min": min(row["cap_share"] for row in small),
        "example_bubble_percent": rows[0]["bubble_percent"],
        "example_bubble_percent_twice_1f1b": in_twice_the_memory(effort),
        "tuning_s": rows[0]["cpu_s"],
        "kept_until_w": 1.0,
        "shapes": rows,
        "load_average": load_average(),
    }
    if options.plot:
        draw(options.plot, effort)
    for name, goal in GOALS_AT_LEAST.items():
        if result[name] < goal:
            print(f"{name} {result[name]:.3f} is below {goal}", file=sys.stderr)
    for name, goal in GOALS_AT_MOST.items():
        if result[name] > goal:
            print(f"{name} {result[name]:.2f} is above {goal}", file=sys.stderr)
    print_result(result, digits=4)
    return 0


if __name__ == "__main__":
    sys.exit(main())
