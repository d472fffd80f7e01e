#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Samples per second with failed and slow devices: real processes on the emulated clock, plan by plan.

    python benchmarks/throughput.py [--cases NAME …] [--time-scale S]

Eight CPU workers (TP 2, PP 2, DP 2) train a tiny GPT whose ops and transfers last as long as an A100's would, times
`--time-scale`. One job for each case: it trains without a fault, then the fault comes (workers are killed, or slowed
down by a fault injection), and then it takes one plan after the other, each computed by a strategy from the profile's
costs and the true health, and asked for with --resihp-plan. A plan's time is the median `duration_s` of the `iteration`
events of its epoch without the first one. `drop-replica` is what the job does by itself before it is asked for a plan:
who lost a member is left out, and where nobody is dead the job's own plan goes on. `restart` is what runs after a
restart on complete replicas; the restart itself is not counted (`recovery.py` measures one).

- `share_of_bound`: what no plan can beat with these devices (`cost.bounds`: work over the sum of speeds, and the
  critical path) over the measured iteration of `joint`. The iteration holds what the machine really needs for gradient
  reduction, agreement and optimizer; the bound does not.
- `over_drop_replica`, `over_restart`, `over_resihp`: samples per second of `joint` over those of the other.
- `simulator_error_percent`: |measured − predicted| / predicted of `joint`'s iteration.
- `error_beyond_fault_free_percent`: the same with the prediction longer by what the fault-free iterations of the same
  job took beyond theirs: gradient reduction, agreement, optimizer and what processes add to ops are not simulated.
- `late_percent`: ops that really took longer than they should have on the emulated clock; where there are many, the
  machine was too busy for the time scale.

The last line of standard output is one JSON object: `cases`, each with these figures and for each plan the measured and
predicted seconds of an iteration.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from common import SmallJob, all_events, load_average, print_result, rounded, running

from megatron_resihp.cost.device import Device
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.layers import model_from_arguments
from megatron_resihp.cost.profile import BUILT_IN, DeviceProfile, LayerKind, load_profile
from megatron_resihp.cost.training import Training
from megatron_resihp.events.epochs import EpochStarted
from megatron_resihp.events.event import Event
from megatron_resihp.events.training import Emulation, Iteration
from megatron_resihp.plan import ParallelPlan, Replica, even_chunks, shortened, spelled_out
from megatron_resihp.planner.evaluation import Evaluation, evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.strategies.drop_replica import drop_replica
from megatron_resihp.planner.strategies.joint import joint
from megatron_resihp.planner.strategies.resihp import resihp
from megatron_resihp.planner.strategies.restart import restart
from megatron_resihp.planner.uniform import NoPlanError

GOALS: Final = {"share_of_bound": 0.9, "simulator_error_percent": 5.0}
TIME_SCALE: Final = 0.5
"""Seconds of the emulated clock per second of the device: ops last much longer than the tiny model's real ones."""
WORKERS_PER_NODE: Final = 4
JOB: Final = SmallJob(layers=6, hidden=32, sequence=32, batch=32)
MEMORY_SHARE: Final = 0.9
"""The share of the model's state that fits into a device: a replica needs two devices."""
WARM_UP, MEASURED = 2, 2
"""Warm-up iterations at a job's start, and the fewest measured iterations of each plan."""
PER_PLAN: Final = MEASURED + 2
"""A plan takes effect one or two iterations after the request, and its first iteration is left out."""
FAULT: Final = WARM_UP + MEASURED + 1
"""The iteration in which the fault comes."""
JOB_S: Final = 1800.0


@dataclass(frozen=True)
class Case:
    """A fault; workers 0, 1, 4, 5 are the first stage's, of replica 0 and 1 in pairs."""

    name: str
    dead: tuple[int, ...] = ()
    speed: dict[int, float] = field(default_factory=dict)
    link: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def health(self) -> Health:
        speed = {worker: self.speed.get(worker, 1.0) for worker in range(JOB.workers) if worker not in self.dead}
        return Health(speed, self.link)

    def injections(self, iteration: int) -> list[str]:
        return [
            *(f"kill:{worker}@{iteration}" for worker in self.dead),
            *(f"slow:{worker}:{speed:g}@{iteration}" for worker, speed in self.speed.items()),
            *(f"link:{first}-{second}:{speed:g}@{iteration}" for (first, second), speed in self.link.items()),
        ]


def own_plan() -> ParallelPlan:
    """The job's first layout, with the data-parallel replicas of a stage beside each other."""
    replicas, degree = JOB.replicas, JOB.tensor_parallel
    chunks = even_chunks(JOB.layers, JOB.pipeline_parallel)
    stages = [
        tuple(tuple(degree * (replicas * stage + number) + rank for rank in range(degree))
              for stage in range(JOB.pipeline_parallel))
        for number in range(replicas)
    ]  # fmt: skip
    return ParallelPlan(
        tuple(Replica(stages[number], tuple(range(number, JOB.batch, replicas)), chunks) for number in range(replicas))
    )


CASES: Final = (
    Case("one dead", dead=(3,)),
    Case("two dead in one replica", dead=(3, 6)),
    Case("one at 0.5", speed={5: 0.5}),
    Case("two at 0.7 in different replicas", speed={1: 0.7, 6: 0.7}),
    Case("a dead stage", dead=(6, 7)),
    Case("a slow link", link={(0, 4): 0.02}),
)


# ---- costs and plans


def cost_of(profile: DeviceProfile) -> JobCost:
    """The profile's costs in the planner's form, in seconds of the emulated clock."""
    model = model_from_arguments({
        "num_layers": JOB.layers, "hidden_size": JOB.hidden, "num_attention_heads": 4, "vocab_size": 127,
        "max_position_embeddings": JOB.sequence, "tensor_model_parallel_size": JOB.tensor_parallel,
    })  # fmt: skip
    training = Training(JOB.sequence, weight_bytes=4, optimizer_bytes=8)
    kinds = [LayerKind.EMBEDDING, *[LayerKind.TRANSFORMER] * JOB.layers, LayerKind.HEAD]
    tokens = float(profile.sequence)
    alone = np.array([[cost.seconds(tokens, tokens**2) for cost in profile.stage([kind], 1)] for kind in kinds]).T
    size = model.hidden_bytes * training.tokens
    latency = profile.transfer_seconds((0, JOB.workers), 0.0)
    state = model.parameters * (training.weight_bytes + training.gradient_bytes + training.optimizer_bytes)
    device = Device(
        1.0,
        memory=int(MEMORY_SHARE * state),
        latency=latency,
        bandwidth=size / (profile.transfer_seconds((0, JOB.workers), tokens) - latency),
    )
    return JobCost(model, training, device, JOB.batch, workers_per_node=WORKERS_PER_NODE, alone=alone)


STRATEGIES: Final[dict[str, Callable[[ParallelPlan, Health, JobCost], ParallelPlan]]] = {
    "drop-replica": drop_replica,
    "restart": restart,
    "resihp": resihp,
    "joint": joint,
}


def plans_of(case: Case, cost: JobCost) -> dict[str, ParallelPlan]:
    """The plans of all strategies that find one."""
    found = {}
    for name, strategy in STRATEGIES.items():
        try:
            plan = strategy(own_plan(), case.health, cost)
        except NoPlanError as error:
            say(f"{case.name}: {name} has no plan: {error}")
            continue
        if plan.uneven_shards:
            say(f"{case.name}: {name}'s plan has unequal shards and can't be run")
            continue
        found[name] = plan
    return found


# ---- jobs


@dataclass(frozen=True)
class Measured:
    """One plan's median seconds per iteration, the number of iterations, and the simulator's prediction."""

    iteration_s: float
    iterations: int
    predicted_s: float

    def after(self, other: "Measured") -> "Measured":
        """With a prediction that is as much longer as another plan's iterations were than theirs."""
        return replace(self, predicted_s=self.predicted_s + other.iteration_s - other.predicted_s)

    @property
    def simulator_error_percent(self) -> float:
        return 100 * abs(self.iteration_s / self.predicted_s - 1)


def command(case: Case, plans: dict[str, ParallelPlan], profile: Path, directory: Path) -> list[str]:
    """The job of a case: healthy iterations, the fault, then each plan."""
    files: list[str] = []
    for number, (name, plan) in enumerate(plans.items()):
        file = directory / f"{name}.json"
        file.write_text(json.dumps(plan.to_dict()))
        files.append(f"{file}@{FAULT + MEASURED + 1 + number * PER_PLAN}")
    last = FAULT + MEASURED + len(plans) * PER_PLAN
    return [
        *JOB.under_resihp(last, directory / "run"), "--resihp-emulate", str(profile),
        "--resihp-inject", *case.injections(FAULT), *(["--resihp-plan", *files] if files else []),
    ]  # fmt: skip


def epochs_of(events: Sequence[Event]) -> list[tuple[ParallelPlan, list[tuple[int, float]]]]:
    """For each epoch its plan, and number and seconds of its iterations but the first."""
    plans = {each.epoch: ParallelPlan.from_dict(each.plan) for each in events if isinstance(each, EpochStarted)}
    found = []
    for epoch, plan in plans.items():
        own = [each for each in events if isinstance(each, Iteration) and each.epoch == epoch]
        found.append((plan, [(each.iteration, each.duration_s) for each in own[1:] if each.duration_s is not None]))
    return found


def same_work(first: ParallelPlan, second: ParallelPlan) -> bool:
    """Whether two plans have the same workers do the same work; standbys don't matter."""
    chunks = own_plan().replicas[0].chunks
    alike = (shortened(spelled_out(replace(each, standbys={}), chunks), chunks) for each in (first, second))
    return len({each.digest for each in alike}) == 1


def to_ask(plans: dict[str, ParallelPlan]) -> dict[str, ParallelPlan]:
    """The plans to request from the job; only one of several plans with the same work."""
    known, asked = [own_plan()], {}
    for name, plan in plans.items():
        if not any(same_work(plan, other) for other in known):
            known.append(plan)
            if name != "drop-replica":
                asked[name] = plan
    return asked


def run_case(case: Case, profile: Path, cost: JobCost, directory: Path) -> dict[str, Any]:
    """Train under one fault with all plans; the case's figures.

    Raises:
        RuntimeError: the job failed.
    """
    plans = plans_of(case, cost)
    asked = to_ask(plans)
    directory.mkdir()
    with running(command(case, asked, profile, directory), directory / "output") as job:
        if job.wait(JOB_S) != 0:
            raise RuntimeError(f"{case.name}: the job failed: {(directory / 'output').read_text()[-500:]}")
    events = all_events(directory / "run")
    epochs = epochs_of(events)
    healthy = [seconds for number, seconds in epochs[0][1] if WARM_UP < number < FAULT]
    found = {"fault-free": _measured(healthy, evaluate(own_plan(), Case("").health, cost))}
    for name, plan in plans.items():
        seconds = [s for used, own in epochs if same_work(used, plan) for number, s in own if number > FAULT]
        if seconds:
            found[name] = _measured(seconds, evaluate(plan, case.health, cost))
        else:
            say(f"{case.name}: the plan of {name} was not run")
    emulated = [event for event in events if isinstance(event, Emulation)]
    late = sum(event.late for event in emulated) / max(sum(event.ops for event in emulated), 1)
    return {**_figures(found, evaluate(plans["joint"], case.health, cost)), "late_percent": 100 * late}


def _measured(seconds: Sequence[float], predicted: Evaluation) -> Measured:
    return Measured(statistics.median(seconds), len(seconds), predicted.iteration_s)


def _figures(found: dict[str, Measured], joint_plan: Evaluation) -> dict[str, Any]:
    own = found.get("joint")
    ratios = {
        f"over_{name.replace('-', '_')}": found[name].iteration_s / own.iteration_s if own and name in found else None
        for name in ("drop-replica", "restart", "resihp", "fault-free")
    }
    return {
        "share_of_bound": joint_plan.bound.seconds / own.iteration_s if own else None,
        "share_of_bound_predicted": joint_plan.share_of_bound,
        **ratios,
        "simulator_error_percent": own.simulator_error_percent if own else None,
        "error_beyond_fault_free_percent": own.after(found["fault-free"]).simulator_error_percent if own else None,
        "samples_per_s": {name: JOB.batch / each.iteration_s for name, each in found.items()},
        "predicted_samples_per_s": {name: JOB.batch / each.predicted_s for name, each in found.items()},
        "iterations": {name: each.iterations for name, each in found.items()},
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="NAME", help="default: all")
    parser.add_argument(
        "--time-scale", type=float, default=TIME_SCALE,
        help=f"seconds of the emulated clock per second of the device (default {TIME_SCALE})",
    )  # fmt: skip
    options = parser.parse_args()
    result: dict[str, Any] = {"cases": {}, "goals": GOALS, "time_scale": options.time_scale}
    with tempfile.TemporaryDirectory(prefix="throughput-") as scratch:
        path = Path(scratch, "profile.json")
        device = json.loads((BUILT_IN / "a100.json").read_text())
        device["links"]["workers_per_node"] = WORKERS_PER_NODE
        path.write_text(json.dumps({**device, "time_scale": options.time_scale}))
        cost = cost_of(load_profile(str(path)))
        for number, case in enumerate(CASES):
            if case.name not in options.cases:
                continue
            try:
                figures = run_case(case, path, cost, Path(scratch, str(number)))
            except RuntimeError as error:
                figures = {"error": str(error)}
            result["cases"][case.name] = figures
            say(f"{case.name}: {json.dumps(rounded(figures))}")
    result["load_average"] = load_average()
    print_result(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
