# SPDX-License-Identifier: Apache-2.0
"""Asks a named strategy for a running job's next plan, and checks that the job can run it.

Imports numpy, `config`, `plan`, `protocol`, `cost` and this package; the strategies only on demand, since that takes a
while.
"""

from collections.abc import Callable
from dataclasses import replace

from megatron_resihp.config import JOINT
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.memory import check_plan
from megatron_resihp.cost.room import check_change, check_host
from megatron_resihp.plan import Chunk, ParallelPlan, PlanError, spelled_out
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.job_shape import NoPlanError
from megatron_resihp.planner.strategy import Strategy
from megatron_resihp.protocol.planning import PlanFound


def strategy_named(name: str, shares: bool = False) -> Strategy:
    """A strategy whose plans a job can change to in place.

    Args:
        name: as users give it. `joint` stands for `by-speed` where replicas share sequences or experts.
        shares: whether they do.

    Raises:
        NoPlanError: there is no such strategy.
    """
    from megatron_resihp.planner.strategies.by_speed import by_speed
    from megatron_resihp.planner.strategies.joint import Settings, joint
    from megatron_resihp.planner.strategies.registry import STRATEGIES, Change

    if shares:
        if name != JOINT:
            raise NoPlanError(f"{name} doesn't know of sequences or experts that replicas share")
        return by_speed
    if name not in STRATEGIES or STRATEGIES[name].change is not Change.IN_PLACE:
        raise NoPlanError(f"there is no strategy {name} that changes a job in place")
    if name == JOINT:
        return lambda plan, health, cost: joint(plan, health, cost, Settings(zero_bubble=cost.training.splits_backward))
    return STRATEGIES[name].strategy


def propose(
    name: str, plan: ParallelPlan, own: tuple[Chunk, ...], health: Health, cost: JobCost,
    planning_s: Callable[[], float],
) -> PlanFound:  # fmt: skip
    """Ask a strategy for a plan, check that plan, and evaluate it.

    Args:
        name: of the strategy.
        plan: the plan in force; its workers may be dead by now.
        own: the job's own split into layers.
        health, cost: of the live workers and the job.
        planning_s: seconds spent on this request so far.

    Raises:
        NoPlanError: the strategy has no plan, or none that the job can run.
    """
    from megatron_resihp.planner.evaluation import evaluate
    from megatron_resihp.planner.moves import seconds_to_get_there

    before = spelled_out(plan, own)
    after = plainly_ordered(strategy_named(name, cost.shares)(before, health, cost))
    require_runnable(after, health, cost)
    alive = set(before.working) <= health.speed.keys()
    if after.replicas != before.replicas:
        require_room(before, after, cost, optional=alive)
    evaluation = evaluate(after, health, cost)
    well = evaluate(before, Health(dict.fromkeys(before.members, 1.0)), cost)
    # What no plan makes shorter belongs to both sides: gains are shares of whole iterations.
    outside_before_s, outside_s = cost.outside(before), cost.outside(after)
    moving_s = seconds_to_get_there(before, after, cost)
    return PlanFound(
        plan=after,
        iteration_s=evaluation.iteration_s + outside_s,
        current_s=evaluate(before, health, cost).iteration_s + outside_before_s if alive else None,
        healthy_s=well.iteration_s + outside_before_s,
        moving_s=moving_s,
        sending_s=max(moving_s - cost.rebuild_s, 0.0),
        bound_s=evaluation.bound.seconds + cost.rest_s,
        planning_s=planning_s(),  # the last one: all of the above takes time
    )


def require_room(before: ParallelPlan, after: ParallelPlan, cost: JobCost, optional: bool) -> None:
    """Raises NoPlanError if memory runs short on the way to a plan; of devices only where the change is optional."""
    try:
        if optional:
            check_change(before, after, cost.model, cost.training, cost.device.memory, cost.device.host)
        else:
            check_host(before, after, cost.model, cost.training, cost.device.host)
    except PlanError as error:
        raise NoPlanError(str(error)) from None


def plainly_ordered(plan: ParallelPlan) -> ParallelPlan:
    """The plan with the usual order of ops in replicas of one stage and one chunk, which have no wait to hide.

    Megatron's own groups and schedule may then be able to run the plan.
    """
    return replace(plan, replicas=tuple(
        replace(each, schedule=None) if len(each.stages) == len(each.chunks) == 1 and not plan.migrations else each
        for each in plan.replicas
    ))  # fmt: skip


def require_runnable(plan: ParallelPlan, health: Health, cost: JobCost) -> None:
    """Raises NoPlanError unless live workers can run the plan with this model."""
    if not set(plan.working) <= health.speed.keys():
        raise NoPlanError(f"worker {min(set(plan.working) - health.speed.keys())} has work in the plan but is dead")
    if plan.uneven_shards:
        raise NoPlanError("members of a stage hold unequal shards; no job can run that yet")
    if plan.micro_batch_count != cost.micro_batches:
        raise NoPlanError(f"the plan has {plan.micro_batch_count} micro-batches, the job {cost.micro_batches}")
    try:
        check_plan(plan, cost.model, cost.training, cost.device.memory)
    except PlanError as error:
        raise NoPlanError(str(error)) from None
