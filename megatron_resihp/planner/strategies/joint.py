# SPDX-License-Identifier: Apache-2.0
"""The project's own and default strategy: one search over groups, replicas, stages, layers and micro-batches.

Imports `plan`, `cost` and `planner`. The parts are in `planner/search`. The search cuts groups out of each node's
workers, sorted by speed (`groups`), and deals them to replicas (`construct`, `starts`). It splits each pipeline's
layers so that the slowest stage is as fast as memory allows (`stages`), and distributes micro-batches so that the
slowest replica is as fast as possible (`share`). Then it tries random moves of all these and keeps those that the
simulated 1F1B makespan supports (`improve`). Finally, workers take the places where they lack the least state
(`planner.places`).
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.memory import check_plan, memory_of
from megatron_resihp.plan import ParallelPlan, PlanError
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.job_shape import NoPlanError
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
from megatron_resihp.planner.strategies.common import has_room_to_change
from megatron_resihp.planner.strategies.drop_replica import drop_replica
from megatron_resihp.planner.strategies.malleus import malleus
from megatron_resihp.planner.strategies.oobleck import oobleck
from megatron_resihp.planner.strategies.resihp import resihp
from megatron_resihp.planner.strategy import Strategy


@dataclass(frozen=True)
class Settings:
    """How to search.

    Attributes:
        uneven: whether tensor-parallel members may hold unequal shards (such as 3 of 4); such plans are marked, and no
            job can run them yet.
        zero_bubble: whether replicas may run ZB-H1 instead of 1F1B.
        starts: how many first layouts are improved.
        steps: moves to try on each layout with 64 workers; more with fewer workers, whose moves take less time.
        seeds: strategies whose plans are candidates too.
        effort: ops that trials run to tune a layout's pipelines at the end: layers, their places and the order of ops
            (`pipeline.search.tuning`); 0 turns tuning off.
        tuned: how many layouts are tuned.
        second_step_up_to: most workers for which the search asks other strategies and tunes layouts.
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
"""Number of speed steps to which candidates round speeds down."""


def joint(plan: ParallelPlan, health: Health, cost: JobCost, settings: Settings = DEFAULT) -> ParallelPlan:
    """The best plan found; a `Strategy`.

    Raises:
        NoPlanError: nothing fits the survivors.
    """
    *_, last = answers(plan, health, cost, settings)
    return last


def answers(plan: ParallelPlan, health: Health, cost: JobCost, settings: Settings = DEFAULT) -> Iterator[ParallelPlan]:
    """Yields a first plan at once, then the best one found; that is the plan in force if no other pays.

    Candidates are made for speeds rounded down, and the best one is chosen for the real speeds. So a slightly higher
    speed that leaves the candidates unchanged never gives a slower plan. No higher speed does if the plan in force is
    the one for the lower speed, as that plan is a candidate.

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
    if not has_room_to_change(plan, min(candidates, key=lambda each: iteration_seconds(each, seen, cost)), cost):
        # Other layouts are best if the state held until then must have room, too.
        uses = memory_of(plan, cost.model, cost.training).items()
        held = max((use.state for worker, use in uses if worker in seen.speed), default=0)
        search = _Search(search.nodes, seen, replace(cost, beside=held), replace(settings, seeds=()))
        candidates += [keep_places(plan, each, seen, cost) for each in search.found(plan)]
    if set(plan.working) <= health.speed.keys():
        # The change is optional, and a worker that runs out of memory on the way ends the job.
        candidates = [each for each in candidates if has_room_to_change(plan, each, cost)]
        if not candidates:
            raise NoPlanError("no layout leaves room for the state before it while the job changes")
    yield min(candidates, key=lambda each: _charges(plan, each, health, cost)) if candidates[1:] else candidates[0]


class _Search:
    """Searches layouts of these workers within the device memory in `cost`."""

    def __init__(self, nodes: Nodes, seen: Health, cost: JobCost, settings: Settings) -> None:
        self.nodes, self._seen, self._cost, self._settings = nodes, seen, cost, settings
        one_f_one_b = tables_of(cost, settings.uneven)
        zero_bubble = [tables_of(cost, settings.uneven, True)] if settings.zero_bubble else []
        self._orders = [one_f_one_b, *zero_bubble]
        self.starts = Starts(nodes, cost.micro_batches, one_f_one_b.rate.tolist())
        self.starts.look_around(one_f_one_b)

    def found(self, plan: ParallelPlan) -> Iterator[ParallelPlan]:
        """The best plans, and other strategies' next plans after `plan`; workers are not yet where they lack least."""
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
    """Improve each start in place, on all cores; each has its own layout and its own random numbers."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(
            lambda seed: improve(starts[seed].tables, nodes, starts[seed].layout, steps, seed), range(len(starts))
        ):
            pass  # an error is raised here


def _made_by(seeds: Sequence[Strategy], plan: ParallelPlan, health: Health, cost: JobCost) -> Iterator[ParallelPlan]:
    """The plans of other strategies; a strategy without a plan is skipped."""
    for seed in seeds:
        try:
            yield seed(plan, health, cost)
        except NoPlanError:
            continue


def _still_possible(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan | None:
    """The plan in force if its workers are alive, with all other live workers as standbys; otherwise None."""
    if not set(plan.working) <= health.speed.keys():
        return None
    idle = sorted(health.speed.keys() - set(plan.working))
    kept = replace(plan, standbys={worker: plan.standbys.get(worker) for worker in idle})
    try:
        check_plan(kept, cost.model, cost.training, cost.device.memory)
    except PlanError:
        return None
    return plan if kept == plan else kept


def _charges(before: ParallelPlan, after: ParallelPlan, health: Health, cost: JobCost) -> tuple[bool, float, float]:
    """Sort key: whether memory runs short on the way; seconds of an iteration; bytes to move.

    The seconds include the time to get there, spread over the time until the next event.
    """
    seconds, moved = iteration_seconds(after, health, cost), bytes_to_move(before, after, cost)
    if before.replicas != after.replicas and cost.until_next_event_s < float("inf"):
        left = 1 - seconds_to_move(moved, cost) / cost.until_next_event_s
        seconds = seconds / left if left > 0 else float("inf")
    return not has_room_to_change(before, after, cost), seconds, sum(moved.values())
