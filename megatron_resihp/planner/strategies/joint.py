# SPDX-License-Identifier: Apache-2.0
"""This project's own strategy and its default: one search over groups, replicas, stages, layers and micro-batches.

Imports `plan`, `cost` and `planner`. The parts are in `planner/search`: groups are cut out of each node's workers
sorted by speed (`groups`), dealt to replicas (`construct`, `starts`), each pipeline's layers split so that its slowest
stage is as fast as memory allows (`stages`), micro-batches shared so that the slowest replica is as fast as can be
(`share`); then random moves of all these, kept where the simulated 1F1B makespan says so (`improve`). In the end
workers take the places where they lack least of the state (`planner.places`).
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.memory import check_plan, memory_of
from megatron_resihp.cost.room import check_change
from megatron_resihp.plan import ParallelPlan, PlanError
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.moves import bytes_to_move, seconds_to_move
from megatron_resihp.planner.places import keep_places
from megatron_resihp.planner.search.build import plan_of
from megatron_resihp.planner.search.groups import Nodes, nodes_of
from megatron_resihp.planner.search.improve import improve, score_of
from megatron_resihp.planner.search.quick import iteration_seconds
from megatron_resihp.planner.search.starts import Start, Starts
from megatron_resihp.planner.search.tables import tables_of
from megatron_resihp.planner.search.tune import tuned
from megatron_resihp.planner.strategies.adaptis import adaptis
from megatron_resihp.planner.strategies.drop_replica import drop_replica
from megatron_resihp.planner.strategies.malleus import malleus
from megatron_resihp.planner.strategies.oobleck import oobleck
from megatron_resihp.planner.strategies.resihp import resihp
from megatron_resihp.planner.strategy import Strategy
from megatron_resihp.planner.uniform import NoPlanError


@dataclass(frozen=True)
class Settings:
    """How to search.

    Attributes:
        uneven: whether tensor-parallel members may hold unlike shards (3 of 4, say); such plans are marked, and no job
            can run them yet.
        zero_bubble: whether replicas may run ZB-H1 instead of 1F1B.
        starts: how many first layouts are improved.
        steps: moves that are tried on each with 64 workers; more with fewer, whose moves take less time.
        seeds: strategies whose plans are taken where they are faster.
        effort: ops run in trials to tune a layout's pipelines in the end: layers, their places and the order of ops
            (`pipeline.search.tuning`); 0 leaves that out.
        tuned: how many layouts are tuned.
        second_step_up_to: workers; with more, other strategies are not asked and nothing is tuned.
    """

    uneven: bool = False
    zero_bubble: bool = True
    starts: int = 6
    steps: int = 90
    seeds: tuple[Strategy, ...] = (drop_replica, oobleck, resihp, malleus, adaptis)
    effort: int = 400_000
    tuned: int = 3
    second_step_up_to: int = 512


DEFAULT: Final = Settings()
UNEVEN: Final = Settings(uneven=True)
_LEAST_STEPS: Final = 60
_SPEEDS: Final = 200
"""Steps of speed that candidates are made for."""


def joint(plan: ParallelPlan, health: Health, cost: JobCost, settings: Settings = DEFAULT) -> ParallelPlan:
    """The best plan found; a `Strategy`.

    Raises:
        NoPlanError: nothing fits the survivors.
    """
    *_, last = answers(plan, health, cost, settings)
    return last


def answers(plan: ParallelPlan, health: Health, cost: JobCost, settings: Settings = DEFAULT) -> Iterator[ParallelPlan]:
    """A first plan at once, then the best one found, which is the plan in force where no other pays.

    Candidates are made for speeds rounded down, and the best one is chosen for those that are: so a bit more of any
    speed, which leaves the candidates as they are, never gives a slower plan, nor does any more of it where the plan in
    force is the one for less, as that is a candidate.

    Raises:
        NoPlanError: nothing fits the survivors.
    """
    if not health.speed:
        raise NoPlanError("no worker is left")
    seen = health.rounded_down(_SPEEDS)
    search = _Search(nodes_of(seen, cost.workers_per_node), seen, cost, settings)
    if search.starts.found[0].fits:
        yield search.plan_of(search.starts.found[0])
    kept = _still_possible(plan, health, cost)
    candidates = [] if kept is None else [kept]
    candidates += [keep_places(plan, each, seen, cost) for each in search.found(plan)]
    if not candidates:
        raise NoPlanError(f"no layout of {len(health.speed)} workers fits their memory")
    if _runs_short(plan, min(candidates, key=lambda each: iteration_seconds(each, seen, cost)), cost):
        # Other layouts are best where what is held until then must have room, too.
        uses = memory_of(plan, cost.model, cost.training).items()
        held = max((use.state for worker, use in uses if worker in seen.speed), default=0)
        search = _Search(search.nodes, seen, replace(cost, beside=held), replace(settings, seeds=()))
        candidates += [keep_places(plan, each, seen, cost) for each in search.found(plan)]
    if set(plan.working) <= health.speed.keys():
        # Nobody has to change, and who runs out of memory on the way ends the job.
        candidates = [each for each in candidates if not _runs_short(plan, each, cost)]
        if not candidates:
            raise NoPlanError("no layout leaves room for the state before it while the job changes")
    yield min(candidates, key=lambda each: _charges(plan, each, health, cost)) if candidates[1:] else candidates[0]


class _Search:
    """Looks for layouts of these workers, with the memory that `cost` says their devices have."""

    def __init__(self, nodes: Nodes, seen: Health, cost: JobCost, settings: Settings) -> None:
        self.nodes, self._seen, self._cost, self._settings = nodes, seen, cost, settings
        one_f_one_b = tables_of(cost, settings.uneven)
        zero_bubble = [tables_of(cost, settings.uneven, True)] if settings.zero_bubble else []
        self._orders = [one_f_one_b, *zero_bubble]
        self.starts = Starts(nodes, cost.micro_batches, one_f_one_b.rate.tolist())
        self.starts.look_around(one_f_one_b)

    def found(self, plan: ParallelPlan) -> Iterator[ParallelPlan]:
        """The best ones, and what other strategies would do after `plan`; workers not yet where they lack least."""
        settings, workers = self._settings, len(self._seen.speed)
        self.starts.look_closer(self._orders)
        improved = self.starts.different(settings.starts)
        if settings.effort:
            improved += self.starts.promising(settings.tuned)
        _improve_all(improved, self.nodes, max(_LEAST_STEPS, int(settings.steps * (64 / workers) ** 2)))
        improved.sort(key=lambda start: score_of(start.layout))
        fitting = [start for start in improved if start.fits]
        yield from (self.plan_of(start) for start in fitting[:1])
        if workers > settings.second_step_up_to:
            return
        yield from _made_by(settings.seeds, plan, self._seen, self._cost)
        if settings.effort:
            fitting.sort(key=Start.promise)
            for start in fitting[: settings.tuned]:
                yield tuned(self.plan_of(start), self._seen, self._cost, settings.effort)

    def plan_of(self, start: Start) -> ParallelPlan:
        """The plan of a layout."""
        return plan_of(start.layout, self.nodes, start.tables.splits_backward, self._seen, self._cost)


def _improve_all(starts: Sequence[Start], nodes: Nodes, steps: int) -> None:
    """Improve each in place, on as many cores as there are: each has its own layout and its own random numbers."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(
            lambda seed: improve(starts[seed].tables, nodes, starts[seed].layout, steps, seed), range(len(starts))
        ):
            pass  # an error is raised here


def _made_by(seeds: Sequence[Strategy], plan: ParallelPlan, health: Health, cost: JobCost) -> Iterator[ParallelPlan]:
    """What other strategies would do, where they can do anything."""
    for seed in seeds:
        try:
            yield seed(plan, health, cost)
        except NoPlanError:
            continue


def _still_possible(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan | None:
    """The plan in force if all who work are alive, with who is alive beside as standbys; None if not."""
    if not set(plan.working) <= health.speed.keys():
        return None
    idle = sorted(health.speed.keys() - set(plan.working))
    kept = replace(plan, standbys={worker: plan.standbys.get(worker) for worker in idle})
    try:
        check_plan(kept, cost.model, cost.training, cost.device.memory)
    except PlanError:
        return None
    return plan if kept == plan else kept


def _runs_short(before: ParallelPlan, after: ParallelPlan, cost: JobCost) -> bool:
    """Whether the states of both plans together, while one follows the other, don't fit into memory."""
    if after.replicas == before.replicas:
        return False
    try:
        check_change(before, after, cost.model, cost.training, cost.device.memory)
    except PlanError:
        return True
    return False


def _charges(before: ParallelPlan, after: ParallelPlan, health: Health, cost: JobCost) -> tuple[bool, float, float]:
    """Whether memory runs short on the way; seconds of an iteration, getting there shared out over the time until the
    next event; then bytes to move."""
    seconds, moved = iteration_seconds(after, health, cost), bytes_to_move(before, after, cost)
    if before.replicas != after.replicas and cost.until_next_event_s < float("inf"):
        left = 1 - seconds_to_move(moved, cost) / cost.until_next_event_s
        seconds = seconds / left if left > 0 else float("inf")
    return _runs_short(before, after, cost), seconds, sum(moved.values())
