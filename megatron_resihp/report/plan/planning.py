# SPDX-License-Identifier: Apache-2.0
"""`resihp plan` once its arguments are known: ask strategies, print, draw.

May import: the standard library, rich, `config`, `plan`, `cost`, `planner`, `simulator` and this package's modules;
matplotlib only to draw.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from megatron_resihp.config import UNIFORM, suggestion
from megatron_resihp.cost.job import JobCost
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.plan.slots import links_of_slots, renamed, slot_of, workers_in_slots
from megatron_resihp.planner.bridge import strategy_named
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.strategies.joint import UNEVEN, joint
from megatron_resihp.planner.strategies.registry import FOR_SHARERS, STRATEGIES, Change, Entry
from megatron_resihp.planner.strategy import Strategy
from megatron_resihp.report.console import console_for, progress_bar
from megatron_resihp.report.drawing import drawing
from megatron_resihp.report.plan.answer import SHARING, Answer, Situation, ask, to_json
from megatron_resihp.report.plan.health_flags import HealthFlagError, health_of
from megatron_resihp.report.plan.source import Source, SourceError, source_of
from megatron_resihp.report.plan.terminal import render
from megatron_resihp.report.planning_clock import planning_clock

DEFAULT: Final = "joint"
OF_SHARERS: Final = "by-speed"
"""The default in jobs whose replicas share experts or sequences."""


class BadInput(Exception):
    """Bad input from the user; the message is one line."""


def plan(namespace: argparse.Namespace) -> int:
    """Print the answer; returns 0, or 1 if there is no plan.

    Raises:
        BadInput: the arguments describe no job, no health or no strategy, or the picture can't be written.
    """
    try:
        source = source_of(namespace)
        situation = _situation(source, namespace)
    except (HealthFlagError, SourceError) as error:
        raise BadInput(str(error)) from None
    strategies = _strategies(source, namespace)
    answers = _ask(strategies, situation)
    shown = _shown(namespace, _default(source), answers)
    if namespace.json:
        print(json.dumps(to_json(situation, answers), indent=2, allow_nan=False))
    else:
        render(situation, answers, shown, console_for(sys.stdout))
    if namespace.plot is not None and shown.plan is not None:
        _draw(situation, shown, namespace.plot)
    return 0 if shown.plan is not None else 1


def _situation(source: Source, namespace: argparse.Namespace) -> Situation:
    health = health_of(namespace.dead, namespace.slow, namespace.link, source.plan.members)
    if not health.live:
        raise BadInput("all workers are dead; leave at least one")
    known = namespace.baselines() if namespace.compare and source.cost.shares else STRATEGIES
    left_out = tuple(name for name in STRATEGIES if name not in known)
    return Situation(source.title, source.plan, health, source.cost, source.costs, left_out)


def _strategies(source: Source, namespace: argparse.Namespace) -> Mapping[str, Entry]:
    of_sharers = {**FOR_SHARERS, **namespace.baselines()}
    possible = of_sharers if source.cost.shares else STRATEGIES
    chosen = namespace.strategy or _default(source)
    if chosen not in possible:
        if chosen == UNIFORM:
            only = "`resihp plan` has it only for --cp and --ep"
            raise BadInput(f"`uniform` is what jobs do by default; {only}; `drop-replica` comes closest")
        if chosen in (*STRATEGIES, *of_sharers):
            which = "no jobs" if source.cost.shares else "only jobs"
            raise BadInput(f"{chosen} plans {which} {SHARING}; choose from {', '.join(possible)}")
        mend = f"{suggestion(chosen, possible)}known are {', '.join(possible)}"
        raise BadInput(f"unknown strategy {chosen!r}; {mend}")
    asked = possible if namespace.compare else {chosen: possible[chosen]}
    if namespace.uneven and source.places is not None:
        raise BadInput("--uneven is of no use to a run: no job can run such plans; leave it out")
    found = {name: replace(entry, strategy=_strategy(name, entry, source)) for name, entry in asked.items()}
    if namespace.uneven and "joint" in found:
        found["joint"] = replace(found["joint"], strategy=partial(joint, settings=UNEVEN))
    return found


def _default(source: Source) -> str:
    return OF_SHARERS if source.cost.shares else DEFAULT


def _strategy(name: str, entry: Entry, source: Source) -> Strategy:
    """A strategy; for a run, as running jobs use it, so that `resihp apply` accepts its plan."""
    if source.places is None:
        return entry.strategy
    own = entry.change is Change.IN_PLACE and not source.cost.shares
    return _by_places(strategy_named(name) if own else entry.strategy, source.places)


def _by_places(strategy: Strategy, places: int) -> Strategy:
    """Translate worker ids to places for a strategy, because a restarted worker's id doesn't tell its place."""

    def place(worker: int) -> int:
        return slot_of(worker, places)

    def ask_by_places(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
        speeds = {place(worker): speed for worker, speed in health.speed.items()}
        at_places = Health(speeds, links_of_slots(health.link, places))
        names = workers_in_slots(health.live, places)
        return renamed(strategy(renamed(plan, place), at_places, cost), names.__getitem__)

    return ask_by_places


def _ask(strategies: Mapping[str, Entry], situation: Situation) -> dict[str, Answer]:
    answers = {}
    with progress_bar() as progress, planning_clock(progress) as clock:
        task = progress.add_task("planning", total=len(strategies))
        for name, entry in strategies.items():
            progress.update(task, description=name)
            answers[name] = ask(name, entry.strategy, entry.running, situation, clock)
            progress.advance(task)
    return answers


def _shown(namespace: argparse.Namespace, default: str, answers: Mapping[str, Answer]) -> Answer:
    """The answer whose plan is printed in full: the requested one or, with --compare, the fastest."""
    if not namespace.compare or namespace.strategy:
        return answers[namespace.strategy or default]
    return max(answers.values(), key=lambda a: a.evaluation.samples_per_s if a.evaluation else 0.0)


def _draw(situation: Situation, shown: Answer, path: Path) -> None:
    from megatron_resihp.report.plan.picture import draw

    with drawing(path, BadInput):
        draw(situation, shown, path)
