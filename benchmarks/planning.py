#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long the joint strategy plans, and how good its plans are.

    python benchmarks/planning.py [--sizes 64 256 …] [--instances N] [--malleus-sizes 64 …] [--small N]
                                  [--first-small SEED] [--trials N] [--processes N] [--results DIR]

Time, for each number of GPUs: TP 4, PP 8 or 16, 16 micro-batches for each replica; in each instance 1 to 10 % of the
GPUs are dead and 1 to 5 % run at 0.3 to 0.9 of their speed, drawn from the seed. One process, one thread, warm: what
importing and compiling take is printed apart. Makespans are those of 1F1B; the second step, tuned pipelines and other
strategies' plans as candidates, is left out. Times
are of the process's own CPU clock, which is the wall clock of a core that does nothing else; the wall clock is printed
beside it. `first` is until the first answer, `last` until the best one. `malleus`, where it is there, plans the same
instances, each within the memory and the health that are given.

Quality: small instances are solved to proven optimality (`tests/unit/planner/planner_optimum.py`) over all that 1F1B
plans can be, with the same makespans; the gap is time over the optimum's, less one. They have 12 GPUs and 10 to 24
layers, embedding and head included, or 16 GPUs and 10 to 14 layers, in nodes of 4; 8, 12 or 16 micro-batches; up to 3
dead and 2 slow GPUs; memory for 1.3 to 3.9 replicas' state. An instance whose optimum isn't proven within --trials
counts as one beyond every percentage and is named; one for which there is no plan at all doesn't count. With --results,
optima are kept in that directory: they don't depend on the planner, so a later run compares with them at once.

The last line of standard output is one JSON object: seconds (median and 95th percentile) by GPU count, also until the
first answer and of malleus; share of the instances within 1 and 3 % of the optimum, and the worst gap of those with a
proven one.
"""

import argparse
import json
import math
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common import ROOT, print_result

STARTED = time.process_time()

from megatron_resihp.cost.device import Device  # noqa: E402
from megatron_resihp.cost.job import JobCost  # noqa: E402
from megatron_resihp.cost.model.layers import model_from_arguments  # noqa: E402
from megatron_resihp.cost.model.presets import PRESETS, preset  # noqa: E402
from megatron_resihp.cost.training import Training  # noqa: E402
from megatron_resihp.plan import Chunk, ParallelPlan, Replica  # noqa: E402
from megatron_resihp.planner.evaluation import evaluate  # noqa: E402
from megatron_resihp.planner.health import Health  # noqa: E402
from megatron_resihp.planner.job_shape import NoPlanError  # noqa: E402
from megatron_resihp.planner.strategies.joint import Settings, answers  # noqa: E402
from megatron_resihp.planner.strategies.registry import STRATEGIES  # noqa: E402

sys.path.insert(0, str(Path(ROOT) / "tests" / "unit" / "planner"))
from planner_optimum import NotProvenError, optimum  # noqa: E402

IMPORTED = time.process_time()

SETTINGS = Settings(uneven=True, zero_bubble=False, seeds=(), effort=0)
GOALS_S = {64: 0.02, 256: 0.06, 1024: 0.2, 10240: 1.0}
SLOW = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
TRIALS = 1_000_000_000
EFFICIENCY = {1: 1.0, 2: 0.95, 4: 0.88, 8: 0.75}


@dataclass(frozen=True)
class Instance:
    """One question to a planner."""

    plan: ParallelPlan
    health: Health
    cost: JobCost


def large(gpus: int, random_state: random.Random, cost: JobCost, pipeline: int) -> Instance:
    """A healthy job's plan, and its surviving GPUs."""
    ids = list(range(gpus))
    random_state.shuffle(ids)
    dead = max(1, int(gpus * random_state.uniform(0.01, 0.1)))
    slow = max(1, int(gpus * random_state.uniform(0.01, 0.05)))
    speed = {worker: 1.0 for worker in ids[dead:]}
    speed |= {worker: random_state.choice(SLOW) for worker in ids[dead : dead + slow]}
    return Instance(_healthy_plan(gpus, cost, 4, pipeline), Health(speed), cost)


def job(gpus: int) -> tuple[JobCost, int]:
    """The model for a number of GPUs, and its number of stages."""
    name, pipeline = ("llama2-30b", 8) if gpus < 256 else ("llama2-70b", 16)
    training = Training(8192, sequence_parallel=True, distributed_optimizer=True)
    device = Device(312e12, 0.5, EFFICIENCY, latency=2e-5, bandwidth=25e9)
    return JobCost(preset(name), training, device, micro_batches=16 * gpus // (4 * pipeline)), pipeline


def _healthy_plan(gpus: int, cost: JobCost, tensor: int, pipeline: int) -> ParallelPlan:
    """TP groups of neighbours, layers as even as can be."""
    replicas = gpus // (tensor * pipeline)
    ends = [cost.layers * (stage + 1) // pipeline for stage in range(pipeline)]
    chunks = tuple(Chunk(stage, *pair) for stage, pair in enumerate(zip([0, *ends], ends, strict=False)))
    groups = [tuple(range(first, first + tensor)) for first in range(0, gpus, tensor)]
    return ParallelPlan(
        tuple(
            Replica(
                tuple(groups[number * pipeline : (number + 1) * pipeline]),
                tuple(range(number, cost.micro_batches, replicas)),
                chunks,
            )
            for number in range(replicas)
        )
    )


def small(seed: int) -> Instance:
    """An instance whose optimum can be proven; see above."""
    state = random.Random(seed)
    gpus, micro_batches = state.choice([12, 16]), state.choice([8, 12, 16])
    layers = state.randint(8, 22 if gpus == 12 else 12)
    model = model_from_arguments({**PRESETS["llama2-7b"], "num_layers": layers})
    training = Training(4096, sequence_parallel=True)
    per_parameter = training.weight_bytes + training.gradient_bytes + training.optimizer_bytes
    room = state.uniform(1.3, 3.9)
    dead = state.sample(range(gpus), state.randint(0, 3))
    speed = {worker: 1.0 for worker in range(gpus) if worker not in dead}
    speed |= {worker: state.choice(SLOW) for worker in state.sample(sorted(speed), state.randint(0, 2))}
    memory = int(model.parameters * per_parameter * room / len(speed))
    device = Device(312e12, 0.5, {1: 1.0, 2: 0.93, 4: 0.85}, memory, latency=2e-5, bandwidth=25e9)
    cost = JobCost(model, training, device, micro_batches, workers_per_node=4)
    return Instance(_healthy_plan(gpus, cost, 4, gpus // 4), Health(speed), cost)


@dataclass
class Measured:
    """Seconds and shares of the bound, one for each instance."""

    first_s: list[float]
    last_s: list[float]
    wall_s: list[float]
    share: list[float]


def measure(instances: list[Instance]) -> Measured:
    """Plan each instance; the first one a second time, as it may have compiled something."""
    found = Measured([], [], [], [])
    for number, instance in enumerate([instances[0], *instances]):
        wall, start = time.perf_counter(), time.process_time()
        given = answers(instance.plan, instance.health, instance.cost, SETTINGS)
        next(given)
        first = time.process_time()
        *_, last = given
        end, wall_end = time.process_time(), time.perf_counter()
        if number:
            found.first_s.append(first - start)
            found.last_s.append(end - start)
            found.wall_s.append(wall_end - wall)
            found.share.append(evaluate(last, instance.health, instance.cost).share_of_bound)
    return found


def other(strategy: Callable[..., ParallelPlan], instances: list[Instance]) -> tuple[list[float], list[float]]:
    """Seconds and shares of the bound of another strategy."""
    seconds, shares = [], []
    for instance in instances:
        start = time.process_time()
        plan = strategy(instance.plan, instance.health, instance.cost)
        seconds.append(time.process_time() - start)
        shares.append(evaluate(plan, instance.health, instance.cost).share_of_bound)
    return seconds, shares


@dataclass(frozen=True)
class Gap:
    """How a small instance was planned.

    Attributes:
        seed: of the instance.
        seconds: of the plan's iteration; infinite if there is none.
        best: of the optimum, infinite if nothing fits; None if it isn't proven.
    """

    seed: int
    seconds: float
    best: float | None

    @property
    def percent(self) -> float | None:
        """The gap above the proven optimum, in percent."""
        return None if self.best is None else 100 * (self.seconds / self.best - 1)


def gap(seed: int, trials: int, results: Path | None) -> Gap:
    """Plan a small instance, and find its optimum or use the stored one."""
    instance = small(seed)
    try:
        *_, plan = answers(instance.plan, instance.health, instance.cost, SETTINGS)
        seconds = evaluate(plan, instance.health, instance.cost).iteration_s
    except NoPlanError:
        seconds = math.inf
    kept = results / f"optimum-{seed}.json" if results else None
    found = json.loads(kept.read_text()) if kept and kept.exists() else {"best": None, "trials": 0}
    if found["best"] is None and found["trials"] < trials:
        try:
            found["best"] = optimum(instance.health, instance.cost, seconds, trials)
        except NotProvenError:
            found["trials"] = trials
        if kept:
            kept.write_text(json.dumps(found))
    best = found["best"]
    if best is not None and seconds < best * (1 - 1e-9):
        raise AssertionError(f"small instance {seed}: {seconds} s is less than the optimum, {best} s")
    return Gap(seed, seconds, best)


def gaps(seeds: Iterable[int], trials: int, processes: int, results: Path | None) -> list[Gap]:
    """Results of all small instances with a plan, several at a time; prints gaps beyond 1 % as they are found."""
    if results:
        results.mkdir(parents=True, exist_ok=True)
    found = []
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for each in pool.imap(partial(gap, trials=trials, results=results), seeds):
            if each.best is None:
                print(f"small instance {each.seed}: the optimum is not proven", flush=True)
            elif each.best < math.inf and each.percent > 1:
                print(f"small instance {each.seed}: {each.percent:.2f} % above the optimum", flush=True)
            if each.best is None or each.best < math.inf:
                found.append(each)
    return found


def quality(found: Sequence[Gap]) -> dict[str, Any]:
    """Shares of the instances, and the worst gap."""
    known = [each.percent for each in found if each.percent is not None]
    shares = {f"share_within_{most}_percent": sum(each <= most for each in known) / len(found) for most in (1, 3)}
    not_proven = [each.seed for each in found if each.percent is None]
    return {**shares, "worst_gap_percent": max(known, default=None), "small_instances": len(found),
            "not_proven": not_proven}  # fmt: skip


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=list(GOALS_S), help="numbers of GPUs")
    parser.add_argument("--instances", type=int, default=20, help="of each size")
    parser.add_argument("--small", type=int, default=300, help="instances that are solved to optimality")
    parser.add_argument("--first-small", type=int, default=0, help="seed of the first of them")
    parser.add_argument("--trials", type=int, default=TRIALS, help="that an optimum may take to prove")
    parser.add_argument("--processes", type=int, default=2, help="that solve small instances")
    parser.add_argument("--results", type=Path, metavar="DIR", help="where proven optima are kept")
    parser.add_argument("--malleus-sizes", type=int, nargs="*", default=[64], help="where malleus plans as well")
    options = parser.parse_args()
    print(f"import {IMPORTED - STARTED:.2f} s of CPU")
    start = time.process_time()
    measure([large(64, random.Random(0), *job(64))])
    print(f"compilation, or loading what was compiled before: {time.process_time() - start:.2f} s of CPU", flush=True)
    result: dict[str, Any] = {"seconds": {}, "first_answer_s": {}, "malleus_s": {}, "wall_s": {}, "share_of_bound": {}}
    for gpus in options.sizes:
        cost, pipeline = job(gpus)
        instances = [large(gpus, random.Random(seed), cost, pipeline) for seed in range(options.instances)]
        found = measure(instances)
        result["seconds"][gpus], result["first_answer_s"][gpus] = spread(found.last_s), spread(found.first_s)
        result["wall_s"][gpus] = spread(found.wall_s)
        result["share_of_bound"][gpus] = statistics.mean(found.share)
        print(gpus, result["seconds"][gpus], "first", result["first_answer_s"][gpus], flush=True)
        if gpus in options.malleus_sizes and "malleus" in STRATEGIES:
            seconds, shares = other(STRATEGIES["malleus"].strategy, instances)
            result["malleus_s"][gpus] = spread(seconds)
            result.setdefault("malleus_share_of_bound", {})[gpus] = statistics.mean(shares)
            print(gpus, "malleus", result["malleus_s"][gpus], flush=True)
    if options.small:
        seeds = range(options.first_small, options.first_small + options.small)
        result |= quality(gaps(seeds, options.trials, options.processes, options.results))
    print_result(result, 4)


if __name__ == "__main__":
    main()
