#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Samples per second with failed and slow devices: real processes on the emulated clock, plan by plan.

    python benchmarks/throughput.py [--family dense|moe|long] [--cases NAME …] [--part I/N] [--results DIR]

Eight CPU workers train a tiny GPT whose ops and transfers last as long as an A100's would, times `--time-scale`. The
job is one of three, of which throughput_jobs.py has the sizes:

- `dense`: TP 2, PP 2, DP 2.
- `moe`: layers with 8 experts, EP 4, DP 8. An EP group is a node.
- `long`: CP 4, DP 2. A CP group is a node.

Some cases of `moe` and `long` have devices that hold all experts, or the activations of a whole sequence, so that after
a fault nobody need share. In the others at least two must share. Tokens for experts, and keys and values, take the time
on the device's links that the planner's cost model says.

One job for each case: it trains without a fault, then the fault comes (workers are killed, or slowed down by a fault
injection), and then it takes one plan after the other, each computed by a strategy from the profile's costs and the
true health, and asked for with --resihp-plan. A plan's time is the median `duration_s` of the `iteration` events of its
epoch without the first one.

- `drop-replica` leaves out who lost a member, and where nobody is dead the job's own plan goes on. Of `dense` it is
  what the job does by itself before it is asked for a plan. Of the others it leaves out all that share with a dead
  worker (`rectangles` of `resihp plan`).
- `restart` is what runs after a restart on complete replicas, and complete groups of them that share; the restart
  itself is not counted (`recovery.py` measures one).
- `lazarus` (`moe`) can be run only where each worker gets all experts. Elsewhere it is simulated, and what the
  fault-free iterations took beyond their own prediction is added. `iterations` is 0 there.
- `joint` is this project's strategy; where replicas share, `by-speed` of `resihp plan`.

Figures:

- `share_of_bound`: what no plan can beat with these devices (`cost.bounds`: work over the sum of speeds, and the
  critical path) over the measured iteration of `joint`. The iteration holds what the machine really needs for gradient
  reduction, agreement and optimizer; the bound does not.
- `over_drop_replica`, `over_restart`, …: samples per second of `joint` over those of the other. null: it has no plan.
- `simulator_error_percent`: |measured − predicted| / predicted of `joint`'s iteration; `errors_percent`: of all plans.
- `error_beyond_fault_free_percent`: the same with the prediction longer by what the fault-free iterations of the same
  job took beyond theirs: gradient reduction, agreement, optimizer and what processes add to ops are not simulated.
- `late_percent`: ops that really took longer than they should have on the emulated clock; where there are many, the
  machine was too busy for the time scale.

With --results, finished cases are kept in DIR, and a later run with the same DIR goes on where this one was stopped.
The last line of standard output is one JSON object: `cases`, each with these figures and for each plan the measured and
predicted samples per second.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from common import add_part, add_time_scale, all_events, load_average, of_part, print_result, rounded, running
from throughput_jobs import FAMILIES, Case, Family

from megatron_resihp.cost.job import JobCost
from megatron_resihp.events.epochs import EpochStarted
from megatron_resihp.events.event import Event
from megatron_resihp.events.training import Emulation, Iteration
from megatron_resihp.plan import ParallelPlan, shortened, spelled_out
from megatron_resihp.planner.evaluation import Evaluation, evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.job_shape import NoPlanError

GOALS: Final = {"share_of_bound": 0.9, "simulator_error_percent": 5.0}
TIME_SCALE: Final = 0.5
"""Seconds of the emulated clock per second of the device: ops last much longer than the tiny model's real ones."""
WARM_UP, MEASURED = 2, 2
"""Warm-up iterations at a job's start, and the fewest measured iterations of each plan."""
PER_PLAN: Final = MEASURED + 2
"""A plan takes effect one or two iterations after the request, and its first iteration is left out."""
FAULT: Final = WARM_UP + MEASURED + 1
"""The iteration in which the fault comes."""
JOB_S: Final = 1800.0
LAUNCH: Final = ("--heartbeat-timeout", "600")
"""A busy machine may starve a worker for longer than the default; deaths are noticed at once by their processes."""


# ---- plans


def plans_of(family: Family, case: Case, cost: JobCost) -> dict[str, ParallelPlan]:
    """The plans of all strategies that find one."""
    found = {}
    for name, entry in family.strategies.items():
        try:
            plan = entry.strategy(family.own_plan, case.health(family.job.workers), cost)
        except NoPlanError as error:
            say(f"{case.name}: {name} has no plan: {error}")
            continue
        if plan.uneven_shards:
            say(f"{case.name}: {name}'s plan has unequal shards and can't be run")
            continue
        found[name] = plan
    return found


def predicted(family: Family, name: str, plan: ParallelPlan, health: Health, cost: JobCost) -> Evaluation:
    """A plan's simulated times, run as its strategy means it."""
    return family.strategies[name].running.evaluate(plan, health, cost)


def can_be_run(family: Family, name: str, plan: ParallelPlan, health: Health, cost: JobCost) -> bool:
    """Whether a job that is given the plan runs what the strategy means: plans say no places of experts."""
    meant = predicted(family, name, plan, health, cost).iteration_s
    return plan.expert_parallel > 1 or meant == evaluate(plan, health, cost).iteration_s


def same_work(family: Family, first: ParallelPlan, second: ParallelPlan) -> bool:
    """Whether two plans have the same workers do the same work; standbys don't matter."""
    chunks = family.own_plan.replicas[0].chunks
    alike = (shortened(spelled_out(replace(each, standbys={}), chunks), chunks) for each in (first, second))
    return len({each.digest for each in alike}) == 1


def in_words(plan: ParallelPlan) -> str:
    """How many replicas, and how many of them share."""
    context = "/".join(map(str, plan.context_groups or (plan.context_parallel,)))
    shared = {"CP": context, "EP": str(plan.expert_parallel)}
    words = [f"{len(plan.replicas)} replicas", *(f"{name} {count}" for name, count in shared.items() if count != "1")]
    return ", ".join(words)


def to_ask(family: Family, plans: dict[str, ParallelPlan]) -> dict[str, ParallelPlan]:
    """The plans to request from the job; only one of several plans with the same work."""
    known, asked = [family.own_plan], {}
    for name, plan in plans.items():
        if not any(same_work(family, plan, other) for other in known):
            known.append(plan)
            if name != family.by_itself:
                asked[name] = plan
    return asked


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

    def of_another(self, simulated: Evaluation) -> "Measured":
        """What a plan that can't be run would take: as much beyond its prediction as this one."""
        return Measured(simulated.iteration_s + self.iteration_s - self.predicted_s, 0, simulated.iteration_s)

    @property
    def simulator_error_percent(self) -> float:
        return 100 * abs(self.iteration_s / self.predicted_s - 1)


def command(
    family: Family, case: Case, plans: dict[str, ParallelPlan], profile: Path, directory: Path
) -> list[str]:  # fmt: skip
    """The job of a case: healthy iterations, the fault, then each plan."""
    files: list[str] = []
    for number, (name, plan) in enumerate(plans.items()):
        file = directory / f"{name}.json"
        file.write_text(json.dumps(plan.to_dict()))
        files.append(f"{file}@{FAULT + MEASURED + 1 + number * PER_PLAN}")
    last = FAULT + MEASURED + len(plans) * PER_PLAN
    return [
        *family.command_job.under_resihp(last, directory / "run", options=LAUNCH), "--resihp-emulate", str(profile),
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


def run_case(family: Family, case: Case, time_scale: float, directory: Path) -> dict[str, Any]:
    """Train under one fault with all plans; the case's figures.

    Raises:
        RuntimeError: the job failed.
    """
    directory.mkdir()
    profile = directory / "profile.json"
    profile.write_text(json.dumps(family.profile(time_scale)))
    cost, health = family.cost(time_scale, case), case.health(family.job.workers)
    plans = plans_of(family, case, cost)
    runnable = {name: plan for name, plan in plans.items() if can_be_run(family, name, plan, health, cost)}
    asked = to_ask(family, runnable)
    with running(command(family, case, asked, profile, directory), directory / "output") as job:
        if job.wait(JOB_S) != 0:
            raise RuntimeError(f"{case.name}: the job failed: {(directory / 'output').read_text()[-500:]}")
    events = all_events(directory / "run")
    epochs = epochs_of(events)
    healthy = [seconds for number, seconds in epochs[0][1] if WARM_UP < number < FAULT]
    own = _measured(healthy, evaluate(family.own_plan, Case("").health(family.job.workers), cost))
    found = {"fault-free": own}
    for name, plan in plans.items():
        simulated = predicted(family, name, plan, health, cost)
        seconds = [s for used, of in epochs if same_work(family, used, plan) for number, s in of if number > FAULT]
        if name not in runnable:
            found[name] = own.of_another(simulated)
        elif seconds:
            found[name] = _measured(seconds, simulated)
        else:
            say(f"{case.name}: the plan of {name} was not run")
    emulated = [event for event in events if isinstance(event, Emulation)]
    late = sum(event.late for event in emulated) / max(sum(event.ops for event in emulated), 1)
    figures = _figures(family, found, evaluate(plans["joint"], health, cost))
    return {**figures, "plans": {name: in_words(plan) for name, plan in plans.items()}, "late_percent": 100 * late}


def _measured(seconds: Sequence[float], simulated: Evaluation) -> Measured:
    return Measured(statistics.median(seconds), len(seconds), simulated.iteration_s)


def _figures(family: Family, found: dict[str, Measured], joint_plan: Evaluation) -> dict[str, Any]:
    own, batch = found.get("joint"), family.job.batch
    others = [name for name in (*family.strategies, "fault-free") if name != "joint"]
    ratios = {
        f"over_{name.replace('-', '_')}": found[name].iteration_s / own.iteration_s if own and name in found else None
        for name in others
    }
    return {
        "share_of_bound": joint_plan.bound.seconds / own.iteration_s if own else None,
        "share_of_bound_predicted": joint_plan.share_of_bound,
        **ratios,
        "simulator_error_percent": own.simulator_error_percent if own else None,
        "error_beyond_fault_free_percent": own.after(found["fault-free"]).simulator_error_percent if own else None,
        "errors_percent": {name: each.simulator_error_percent for name, each in found.items() if each.iterations},
        "samples_per_s": {name: batch / each.iteration_s for name, each in found.items()},
        "predicted_samples_per_s": {name: batch / each.predicted_s for name, each in found.items()},
        "iterations": {name: each.iterations for name, each in found.items()},
    }


# ---- all cases


def kept_at(results: Path | None, family: str, case: Case, time_scale: float) -> Path | None:
    """Where the figures of a case are kept, if anywhere."""
    name = f"{family}-{case.name}-{time_scale:g}.json".replace(" ", "-")
    return None if results is None else results / name


def figures_of(family: Family, case: Case, time_scale: float, kept: Path | None, directory: Path) -> dict[str, Any]:
    """The figures of an earlier run, or of one now. A failure is told and not kept."""
    if kept is not None and kept.exists():
        known: dict[str, Any] = json.loads(kept.read_text())
        return known
    try:
        figures = {**run_case(family, case, time_scale, directory), "load_average": load_average()}
    except RuntimeError as error:
        return {"error": str(error)}
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        begun = kept.with_suffix(".begun")
        begun.write_text(json.dumps(figures))
        begun.rename(kept)
    return figures


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, default="dense", help="the job (default dense)")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="default: all")
    add_part(parser)
    parser.add_argument("--results", type=Path, metavar="DIR", help="keep finished cases there, and go on from them")
    add_time_scale(parser, TIME_SCALE)
    options = parser.parse_args()
    family = FAMILIES[options.family]
    names = [case.name for case in family.cases]
    unknown = sorted(set(options.cases or ()) - set(names))
    if unknown:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(names)}")
    cases = of_part([case for case in family.cases if case.name in (options.cases or names)], options.part)
    result: dict[str, Any] = {"family": options.family, "cases": {}, "goals": GOALS, "time_scale": options.time_scale}
    with tempfile.TemporaryDirectory(prefix="throughput-") as scratch:
        for number, case in enumerate(cases):
            kept = kept_at(options.results, options.family, case, options.time_scale)
            figures = figures_of(family, case, options.time_scale, kept, Path(scratch, str(number)))
            result["cases"][case.name] = figures
            say(f"{case.name}: {json.dumps(rounded(figures))}")
    result["load_average"] = load_average()
    print_result(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
