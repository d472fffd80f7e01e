# SPDX-License-Identifier: Apache-2.0
"""`resihp simulate` once its arguments are known: run the strategies, print, write.

May import: the standard library, rich, `config`, `planner`, `simulator` and this package's modules; matplotlib only to
draw.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from megatron_resihp.config import suggestion
from megatron_resihp.planner.strategies.joint import DEFAULT, joint
from megatron_resihp.planner.strategies.registry import FOR_SHARERS, STRATEGIES, Entry
from megatron_resihp.report.console import console_for, progress_bar
from megatron_resihp.report.planning_clock import planning_clock
from megatron_resihp.report.simulate.result import Simulation
from megatron_resihp.report.simulate.terminal import render
from megatron_resihp.simulator.cluster import UNMITIGATED, Judge, Outcome, run
from megatron_resihp.simulator.scenario import Scenario, ScenarioError
from megatron_resihp.simulator.scenario_file import scenario_of
from megatron_resihp.simulator.sizes import SizesError

TABLE_NAME: Final = "simulation.txt"
JSON_NAME: Final = "simulation.json"
PICTURE_NAME: Final = "throughput.png"
SECOND_STEP_UP_TO: Final[Mapping[str, int]] = {"auto": 64, "always": DEFAULT.second_step_up_to, "never": 0}
"""Workers up to which `joint` takes its second step, by the value of --second-step."""
MOST: Final = 1_000_000
"""The most micro-batches, or orders of failures."""
UNMITIGATED_NAME: Final = "unmitigated"
KNOWN: Final[Mapping[str, Entry]] = {UNMITIGATED_NAME: UNMITIGATED, **STRATEGIES}


class BadInput(Exception):
    """Bad input from the user; the message is one line."""


class Published(Protocol):
    """Named experiments; `megatron_resihp.lab.scenarios` implements this, and the command passes it in."""

    def names(self) -> tuple[str, ...]:
        """All names that `scenario` accepts."""
        ...

    def scenario(self, name: str, orders: int, micro_batches: int) -> Scenario:
        """The experiment, with `orders` random orders of failures; ScenarioError if the name is unknown."""
        ...


def simulate(namespace: argparse.Namespace, published: Published) -> None:
    """Run, print and write.

    Raises:
        BadInput: there is no such scenario or strategy, or the results can't be written.
    """
    if namespace.list:
        print("\n".join(published.names()))
        return
    try:
        scenario = _scenario(namespace, published)
    except (ScenarioError, SizesError) as error:
        raise BadInput(str(error)) from None
    strategies = _strategies([*(namespace.strategies or scenario.strategies)], _known(scenario, namespace))
    if "joint" in strategies:
        strategies = {**strategies, "joint": _joint_as_wanted(strategies["joint"], namespace)}
    if not _second_step(scenario, namespace) and "joint" in strategies:
        workers = scenario.sizes.workers
        print(f"joint: without its second step, for {workers} workers (--second-step {namespace.second_step}); "
              "its plans may be a little slower than those of a running job", file=sys.stderr)  # fmt: skip
    found = _run(scenario, strategies, namespace)
    if namespace.json:
        print(json.dumps(to_json(found), indent=2, allow_nan=False))
    else:
        render(found, console_for(sys.stdout))
    _write(found, namespace.out)
    written = (namespace.out / name for name in (TABLE_NAME, JSON_NAME, PICTURE_NAME))
    print(f"written: {', '.join(map(str, written))}", file=sys.stderr)


def _scenario(namespace: argparse.Namespace, published: Published) -> Scenario:
    for name in ("orders", "micro_batches"):
        value = getattr(namespace, name)
        if value is not None and not 1 <= value <= MOST:
            raise BadInput(f"--{name.replace('_', '-')} must be at least 1 and at most {MOST:,}, got {value}")
    path = Path(namespace.scenario)
    if not path.is_file():
        if path.suffix == ".json":
            raise BadInput(f"{path} is not a file; give a scenario, or a published name (--list)")
        return published.scenario(namespace.scenario, namespace.orders or 1, namespace.micro_batches)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} is not JSON: {error}") from None
    return scenario_of(data, namespace.orders)


def _known(scenario: Scenario, namespace: argparse.Namespace) -> Mapping[str, Entry]:
    """The strategies that can plan the job."""
    of_sharers = scenario.sizes.cost().shares
    return {UNMITIGATED_NAME: UNMITIGATED, **FOR_SHARERS, **namespace.baselines()} if of_sharers else KNOWN


def _strategies(names: Sequence[str], known: Mapping[str, Entry]) -> Mapping[str, Entry]:
    wrong = next((name for name in names if name not in known), None)
    if wrong in KNOWN:
        what = "plans no jobs whose replicas share experts or sequences"
        raise BadInput(f"{wrong} {what}; choose from {', '.join(known)}")
    if wrong is not None:
        mend = f"{suggestion(wrong, known)}known are {', '.join(known)}"
        raise BadInput(f"unknown strategy {wrong!r}; {mend}")
    return {name: known[name] for name in dict.fromkeys(names)} or known


def _second_step(scenario: Scenario, namespace: argparse.Namespace) -> bool:
    return scenario.sizes.workers <= SECOND_STEP_UP_TO[namespace.second_step]


def _joint_as_wanted(entry: Entry, namespace: argparse.Namespace) -> Entry:
    up_to = SECOND_STEP_UP_TO[namespace.second_step]
    settings = replace(DEFAULT, uneven=namespace.uneven, second_step_up_to=up_to)
    return replace(entry, strategy=partial(joint, settings=settings))


def _run(scenario: Scenario, strategies: Mapping[str, Entry], namespace: argparse.Namespace) -> Simulation:
    delays = replace(scenario.delays, planning_s=None) if namespace.measure_planning else scenario.delays
    plan = scenario.sizes.plan()
    outcomes: dict[str, list[Outcome]] = {}
    with progress_bar() as progress, planning_clock(progress) as clock:
        judge = scenario.judge(clock)
        task = progress.add_task("simulating", total=len(strategies) * len(scenario.traces))
        for name, entry in strategies.items():
            progress.update(task, description=name)
            for trace in scenario.traces:
                free = namespace.free and entry is not UNMITIGATED
                outcomes.setdefault(name, []).append(run(entry, trace, plan, judge, delays, free))
                progress.advance(task)
    return Simulation(scenario, outcomes, _healthy(scenario, judge), _second_step(scenario, namespace))


def _healthy(scenario: Scenario, judge: Judge) -> float:
    from megatron_resihp.planner.health import Health

    plan = scenario.sizes.plan()
    return judge.samples_per_s(plan, Health(dict.fromkeys(plan.members, 1.0)))


def _write(found: Simulation, out: Path) -> None:
    from megatron_resihp.report.simulate.picture import draw

    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / JSON_NAME).write_text(json.dumps(to_json(found), indent=2, allow_nan=False) + "\n")
        with (out / TABLE_NAME).open("w", encoding="utf-8") as file:
            render(found, console_for(file))
        draw(found, out / PICTURE_NAME)
    except OSError as error:
        raise BadInput(f"{out} cannot be written to ({error.strerror}); give another directory with --out") from None


def to_json(found: Simulation) -> dict[str, Any]:
    """The result as plain values."""
    return {
        "scenario": found.scenario.name,
        "workers": found.scenario.sizes.workers,
        "capacity": found.capacity,
        "healthy_samples_per_s": found.healthy_samples_per_s,
        "joint_second_step": found.second_step,
        "strategies": {
            name: {
                "samples_per_s": found.samples_per_s(name),
                "share_of_capacity": found.share(name),
                "orders": [_outcome_to_json(outcome) for outcome in outcomes],
            }
            for name, outcomes in found.outcomes.items()
        },
    }


def _outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "samples_per_s": outcome.samples_per_s,
        "stopped_s": outcome.stopped_s,
        "lost_samples": outcome.lost_samples,
        "plans": outcome.changes,
        "aborted": outcome.aborted or None,
        "segments": [[part.start_s, part.end_s, part.samples_per_s, part.what] for part in outcome.segments],
    }
