#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long planning takes where replicas share experts, and what share of the capacity such a job keeps in a day.

    python benchmarks/sharers.py [--instances N] [--orders N] [--rounds N] [--jobs NAME…] [--strategies NAME…]

All jobs are Qwen3-235B-A22B on 1,024 GPUs in nodes of 8, with 16 micro-batches (--rounds) for each replica, of 4,096
tokens each (JOBS has their degrees). The GPUs have 989 TFLOP/s, 80 GiB, 3,600 Gb/s to others of the node and 400 Gb/s
beyond, as an H100's data sheet says. Each may take 160 GiB of host memory for its old state while plans change, as
nodes of 2 TB allow. Without that, a change by choice isn't made where old and new state don't fit into a GPU together.

Time: in each instance 1 % of the GPUs are dead and 5 % run at 0.3 to 0.9 of their speed, drawn from the seed. It is of
the process's own CPU clock, one thread, warm. Beside it is the share of the bound (`cost.bounds`) that the plan
reaches, and the same of the job with all workers well: pipelines' bubbles and layers that don't divide evenly keep even
that below 1.

Capacity: a day as in `rejoins/…` of `resihp simulate --list`: deaths Poisson, one an hour, back after 4 h on average;
slow-downs Poisson, two an hour, of 72 min on average, to a speed from 0.3 to 0.9. The share is throughput over the
whole day, stops included, over what the speeds of the living workers would give (`resihp simulate`'s "of capacity").
Delays are `resihp simulate`'s.

The last line of standard output is one JSON object.
"""

import argparse
import random
import statistics
import time
from dataclasses import replace
from typing import Any

from common import print_result

from megatron_resihp.cost.job import UNTIL_NEXT_EVENT_S
from megatron_resihp.cost.model.presets import preset
from megatron_resihp.cost.training import Training
from megatron_resihp.lab.published import with_rejoins
from megatron_resihp.lab.strategies import FOR_SHARERS as BASELINES
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.planner import NoPlanError
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.strategies.registry import FOR_SHARERS, Entry
from megatron_resihp.simulator.cluster import Judge, capacity_asked, run
from megatron_resihp.simulator.sizes import Sizes, a100, sharers_of_experts

GPUS = 1024
HOST = 160 << 30
GOAL_S, GOAL_SHARE = 0.5, 0.95
JOBS = {"tp4-pp8-ep8-etp1": (4, 8, 8, 1), "tp4-pp4-ep8-etp1": (4, 4, 8, 1)}
"""TP, PP, EP, ETP. With the second, no worker can hold all experts of its layers."""
KNOWN = {**FOR_SHARERS, **BASELINES}


def job(name: str, rounds: int) -> Sizes:
    tensor, pipeline, expert, expert_tensor = JOBS[name]
    experts, members = sharers_of_experts(expert, expert_tensor, tensor)
    training = Training(4096, sequence_parallel=True, distributed_optimizer=True)
    device = replace(a100(flops=989e12, gbps=400.0, node_gbps=3600.0), host=HOST)
    replicas = GPUS // (tensor * pipeline)
    return Sizes(preset("qwen3-235b-a22b"), training, device, tensor, pipeline, replicas, rounds * replicas,
                 experts=experts, members=members)  # fmt: skip


def health(seed: int) -> Health:
    state = random.Random(seed)
    ids = list(range(GPUS))
    state.shuffle(ids)
    dead, slow = GPUS // 100, GPUS // 20
    speed = dict.fromkeys(ids[dead:], 1.0)
    return Health(speed | {worker: state.uniform(0.3, 0.9) for worker in ids[dead : dead + slow]})


def timed(entry: Entry, sizes: Sizes, instances: int) -> dict[str, Any]:
    """Seconds of CPU and the share of the bound, of each instance; the first one is planned twice."""
    plan, cost = sizes.plan(), replace(sizes.cost(), until_next_event_s=UNTIL_NEXT_EVENT_S)
    seconds, shares = [], []
    for number, seed in enumerate([0, *range(instances)]):
        now = health(seed)
        begun = time.process_time()
        try:
            found: ParallelPlan | None = entry.strategy(plan, now, cost)
        except NoPlanError:
            found = None
        if number:
            seconds.append(time.process_time() - begun)
            shares.append(entry.running.evaluate(found, now, cost).share_of_bound if found else 0.0)
    ordered = sorted(seconds)
    return {
        "median_s": statistics.median(ordered),
        "p95_s": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "share_of_bound": statistics.mean(shares),
        "no_plan": sum(not share for share in shares),
    }


def day(entry: Entry, sizes: Sizes, orders: int) -> dict[str, Any]:
    """Shares of the capacity of several days."""
    judge = Judge(replace(sizes.cost(), until_next_event_s=UNTIL_NEXT_EVENT_S))
    plan = sizes.plan()
    healthy = judge.samples_per_s(plan, Health(dict.fromkeys(plan.members, 1.0)))
    shares, aborted, stopped = [], 0, []
    for seed in range(orders):
        trace = with_rejoins(sizes, seed)
        found = run(entry, trace, plan, judge)
        shares.append(found.samples_per_s / (healthy * capacity_asked(trace, sizes.workers)))
        stopped.append(found.stopped_s)
        aborted += bool(found.aborted)
    return {"share_of_capacity": statistics.mean(shares), "least": min(shares), "aborted": aborted,
            "stopped_s": statistics.mean(stopped)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=20, help="of 1 %% dead and 5 %% slow")
    parser.add_argument("--orders", type=int, default=5, help="days of failures")
    parser.add_argument("--rounds", type=int, default=16, help="micro-batches for each replica")
    parser.add_argument("--jobs", nargs="*", choices=JOBS, default=list(JOBS))
    parser.add_argument("--strategies", nargs="*", choices=KNOWN, default=list(KNOWN))
    options = parser.parse_args()
    result: dict[str, Any] = {"goals": {"median_s": GOAL_S, "share_of_capacity": GOAL_SHARE}}
    for name in options.jobs:
        sizes = job(name, options.rounds)
        plan = sizes.plan()
        well = evaluate(plan, Health(dict.fromkeys(plan.members, 1.0)), sizes.cost()).share_of_bound
        print(f"{name}: {sizes.title}; all well: {well:.1%} of the bound", flush=True)
        result[name] = {"all_well_share_of_bound": well}
        for strategy in options.strategies:
            found = timed(KNOWN[strategy], sizes, options.instances) | day(KNOWN[strategy], sizes, options.orders)
            result[name][strategy] = found
            print(f"  {strategy}: {', '.join(f'{key} {value:.3g}' for key, value in found.items())}", flush=True)
    print_result(result, 4)


if __name__ == "__main__":
    main()
