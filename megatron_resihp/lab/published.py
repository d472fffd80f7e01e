# SPDX-License-Identifier: Apache-2.0
"""The published experiments of ResiHP (arXiv 2605.06374, section 8) as jobs and traces, with our own assumptions.

The facts are in `data/resihp.json`. Imports numpy, `cost`, `planner` and this package's modules.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from statistics import geometric_mean
from typing import Any, Final

import numpy as np

from megatron_resihp.cost.job import UNTIL_NEXT_EVENT_S
from megatron_resihp.cost.model.presets import preset
from megatron_resihp.cost.training import Training
from megatron_resihp.lab.calibration import calibrated
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.strategies.oobleck import FAILURES
from megatron_resihp.planner.strategies.resihp import AHEAD, DELTAS
from megatron_resihp.simulator import traces
from megatron_resihp.simulator.cluster import Judge
from megatron_resihp.simulator.sizes import TP_EFFICIENCY, Sizes, a100
from megatron_resihp.simulator.traces import HOUR, Event, Trace, What, trace

SEQUENCE: Final = 4096
ORDERS: Final = 5
"""Default number of random orders of failures."""
SEVERITIES: Final = ("weak", "medium", "severe")

TAKEN: Final = (
    "micro-batches of an iteration: 64, and 16 beside it, of one sample each",
    f"sequence length: {SEQUENCE} tokens, each sample one document",
    "work of a layer: its FLOPs, times one efficiency of each model, fitted to the fault-free column; of the 70B "
    "models, which have none, the geometric mean of their family's",
    f"speed of each member of a tensor-parallel group, against alone: {TP_EFFICIENCY}",
    "embedding: no time, its parameters' memory; head: its FLOPs; both are layers of their own",
    "layers: evenly dealt, one more to the first stages where they don't divide",
    "memory: 80 GiB a GPU, none in reserve, for bf16 weights, fp32 gradients, Adam (18 bytes a parameter, not shared "
    "out) and activations without recomputation; joint's voluntary changes leave room for old and new state together",
    "links: 200 Gb/s a node, shared by its 8 GPUs; no gradient reduction, no optimizer step",
    "session: (number of GPUs)/4 hours, first removal after one interval; removals in random order, the mean "
    f"over several orders ({ORDERS} by default), the same ones for all strategies",
    "fail-slow: one in 16 GPUs, drawn at random, all at one speed, with which the unmitigated job loses exactly 35, 55 "
    "or 70 %; from the start of the session to its end",
    "mixed: the removals every 2 h, 1 h, 30 min together with the weak, medium and severe slow-downs",
    "256 GPUs: a day; deaths Poisson, one an hour, back after 4 h on average; slow-downs Poisson, two an hour, of "
    "72 min on average, to a speed from 0.3 to 0.9",
    "detection 5 s for deaths and 3 iterations for speeds, planning 1.44 s, new groups 2 s, for every strategy; state "
    "over the links; restarts from checkpoints of every 30 min take 3 min and loading",
    f"strategies are told to expect {UNTIL_NEXT_EVENT_S / HOUR:g} h until the next event, whatever the interval; joint "
    "and greyhound weigh the cost of a change against it",
    f"resihp: delta of {', '.join(f'{delta:g}' for delta in DELTAS)} and micro-batches that a stage may run ahead of "
    f"1F1B, {', '.join(map(str, AHEAD))}, whichever are fastest in simulation, plan by plan",
    f"oobleck: f = {FAILURES}, so that it ends once fewer than {FAILURES + 1} times the fewest groups that hold the "
    "model are left",
    "recycle: its staggered optimizer is not modelled, no strategy is judged by more than one iteration",
    "recycle, oobleck, greyhound and adaptra: written from their abstracts and summaries in public text, not from the "
    "full papers",
    "joint: even shards, as jobs run them; with --uneven also uneven shards (3 of 4 GPUs, say), which no other "
    "strategy's plans have",
)
"""Our assumptions where the published text leaves something open."""


@cache
def facts() -> Mapping[str, Any]:
    """The published numbers."""
    found: dict[str, Any] = json.loads((files(__package__) / "data" / "resihp.json").read_text(encoding="utf-8"))
    return found


def models() -> tuple[str, ...]:
    """The models of the fail-stop table, in its order."""
    return tuple(facts()["fail_stop"]["samples_per_s"])


@cache
def job(model: str, micro_batches: int) -> Sizes:
    """A published job on its testbed, calibrated.

    Raises:
        KeyError: no such job exists.
    """
    tensor, data, pipeline = facts()["layouts"][model]
    testbed = facts()["testbed"]
    sizes = Sizes(
        model=preset(model),
        training=Training(sequence_length=SEQUENCE),
        device=a100(reserve=0.0, gbps=testbed["inter_node_gbps"] / testbed["gpus_per_node"]),
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        micro_batches=micro_batches,
        workers_per_node=testbed["gpus_per_node"],
    )
    table = facts()["fail_stop"]["samples_per_s"]
    if model in table:
        return calibrated(sizes, table[model]["fault_free"])
    family = [job(name, micro_batches) for name in table if name.partition("-")[0] == model.partition("-")[0]]
    efficiency = geometric_mean(relative.device.efficiency for relative in family)
    return replace(sizes, device=replace(sizes.device, efficiency=efficiency))


def judge_of(sizes: Sizes) -> Judge:
    return Judge(replace(sizes.cost(), until_next_event_s=UNTIL_NEXT_EVENT_S))


def duration_s(sizes: Sizes) -> float:
    """Duration of a session, in seconds."""
    return sizes.workers / 4 * HOUR


def fail_stop(sizes: Sizes, interval_h: float, seed: int) -> Trace:
    """Workers removed one after another. The order depends only on the seed, not on the interval."""
    times = traces.moments(traces.every(interval_h * HOUR), duration_s(sizes), _rng(seed))
    return trace(duration_s(sizes), traces.removals(times, sizes.workers, _rng(seed)))


def fail_slow(sizes: Sizes, judge: Judge, severity: int, seed: int) -> Trace:
    """One in 16 workers is slow from the start, so that the job's own plan loses the published share of its speed."""
    slow = _slow_workers(sizes, seed)
    speed = speed_for_drop(sizes.plan(), slow, judge, facts()["fail_slow"]["unmitigated_drop"][severity])
    return trace(duration_s(sizes), [Event(0.0, What.SPEED, slow, speed)])


def mixed(sizes: Sizes, judge: Judge, severity: int, seed: int) -> Trace:
    """Removals and slow-downs together."""
    interval_h = facts()["fail_stop"]["interval_h"][severity]
    parts = fail_stop(sizes, interval_h, seed), fail_slow(sizes, judge, severity, seed)
    return trace(duration_s(sizes), *(part.events for part in parts))


def with_rejoins(sizes: Sizes, seed: int) -> Trace:
    """A day in which workers die and come back, and slow down and recover."""
    day = 24 * HOUR
    rng = _rng(seed)
    alone = traces.single(sizes.workers)
    deaths = traces.moments(traces.poisson(HOUR), day, rng)
    slow = traces.moments(traces.poisson(HOUR / 2), day, rng)
    return trace(
        day,
        traces.outages(deaths, alone, traces.poisson(4 * HOUR), rng),
        traces.slow_downs(slow, alone, traces.poisson(traces.LARGE_JOB_SLOW_S), rng),
    )


def _slow_workers(sizes: Sizes, seed: int) -> tuple[int, ...]:
    # Another stream than the removals', so that slow workers and dying workers are chosen independently.
    chosen = np.random.default_rng([seed, 1]).choice(sizes.workers, max(1, sizes.workers // 16), replace=False)
    return tuple(sorted(int(worker) for worker in chosen))


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def speed_for_drop(plan: ParallelPlan, slow: tuple[int, ...], judge: Judge, drop: float) -> float:
    """The speed of some workers at which a plan loses that share of its throughput, by bisection."""
    members = dict.fromkeys(plan.members, 1.0)
    wanted = (1 - drop) * judge.samples_per_s(plan, Health(members))
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        if judge.samples_per_s(plan, Health(members | dict.fromkeys(slow, middle))) > wanted:
            high = middle
        else:
            low = middle
    return high
