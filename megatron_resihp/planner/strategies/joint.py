"""This project's own strategy and its default: one search over groups, replicas, stages, layers and micro-batches.

Imports `plan`, `cost` and `planner`. The parts are in `planner/search`: groups are cut out of each node's workers
sorted by speed (`groups`), dealt to replicas (`construct`, `starts`), each pipeline's layers split so that its slowest
stage is as fast as memory allows (`stages`), micro-batches shared so that the slowest replica is as fast as can be
(`share`); then random moves of all these, kept where the simulated 1F1B makespan says so (`improve`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.memory import check_plan
from megatron_resihp.plan import ParallelPlan, PlanError
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.moves import seconds_to_get_there
from megatron_resihp.planner.rectangular import NoPlanError
from megatron_resihp.planner.search.build import plan_of
from megatron_resihp.planner.search.groups import nodes_of
from megatron_resihp.planner.search.improve import improve, score_of
from megatron_resihp.planner.search.starts import starts
from megatron_resihp.planner.search.tables import tables_of


@dataclass(frozen=True)
class Settings:
    """How to search.

    Attributes:
        uneven: whether tensor-parallel members may hold unlike shards (3 of 4, say); such plans are marked.
        starts: how many first layouts are improved.
        steps: moves that are tried on each.
    """

    uneven: bool = True
    starts: int = 6
    steps: int = 400


DEFAULT: Final = Settings()


def joint(plan: ParallelPlan, health: Health, cost: JobCost, settings: Settings = DEFAULT) -> ParallelPlan:
    """The best plan found; a `Strategy`.

    Raises:
        NoPlanError: nothing fits the survivors.
    """
    *_, last = answers(plan, health, cost, settings)
    return last


def answers(
    plan: ParallelPlan, health: Health, cost: JobCost, settings: Settings = DEFAULT
) -> Iterator[ParallelPlan]:
    """A first plan at once, then the best one found, which is the plan in force where no other pays.

    Raises:
        NoPlanError: nothing fits the survivors.
    """
    kept = _still_possible(plan, health, cost)
    tables = tables_of(cost, settings.uneven)
    nodes = nodes_of(health.speed, cost.workers_per_node)
    found = starts(tables, nodes, cost.micro_batches)
    if not found:
        if kept is None:
            raise NoPlanError(f"no layout of {len(health.speed)} workers fits their memory")
        yield kept
        return
    first = plan_of(found[0].layout, nodes, plan, health, cost)
    yield first
    tried = [start.layout for start in found[: settings.starts]]
    for seed, layout in enumerate(tried):
        improve(tables, nodes, layout, settings.steps, seed)
    best = plan_of(min(tried, key=score_of), nodes, plan, health, cost)
    candidates = [each for each in (kept, first, best) if each is not None]
    yield min(candidates, key=lambda each: _charged_seconds(plan, each, health, cost))


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


def _charged_seconds(before: ParallelPlan, after: ParallelPlan, health: Health, cost: JobCost) -> float:
    """Seconds of an iteration, getting there shared out over the time until the next event."""
    seconds = evaluate(after, health, cost).iteration_s
    if before.replicas == after.replicas:
        return seconds
    left = 1 - seconds_to_get_there(before, after, cost) / cost.until_next_event_s
    return seconds / left if left > 0 else float("inf")
