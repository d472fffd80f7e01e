# SPDX-License-Identifier: Apache-2.0
"""Strategies' answers to a health: plan, throughput, planning time. Imports `plan`, `cost` and `planner`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from megatron_resihp.cost.job import JobCost
from megatron_resihp.plan import ParallelPlan, differences
from megatron_resihp.planner import NoPlanError
from megatron_resihp.planner.evaluation import Evaluation, evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.moves import seconds_to_move
from megatron_resihp.planner.running import AS_PLANNED, Running
from megatron_resihp.planner.strategy import Strategy

SHARING: Final = "whose replicas share experts or sequences"


@dataclass(frozen=True)
class Answer:
    """The answer of one strategy.

    Attributes:
        strategy: its name.
        planning_s: its planning time.
        plan, evaluation: None if there is no plan.
        moving_bytes: weights and optimizer state that all workers receive in the change to this plan.
        moving_s: how long the job pauses for that.
        reason: why there is no plan.
        all_well: the result of the strategy for the same workers with all of them well.
        as_planned: whether the plan is run as it says.
    """

    strategy: str
    planning_s: float
    plan: ParallelPlan | None = None
    evaluation: Evaluation | None = None
    moving_bytes: float = 0.0
    moving_s: float = 0.0
    reason: str = ""
    all_well: Evaluation | None = None
    as_planned: bool = True


@dataclass(frozen=True)
class Situation:
    """The question to strategies.

    Attributes:
        title: the job, in words.
        plan: the one in force.
        health, cost: of the surviving workers.
        costs: the source of the costs, in words.
        left_out: strategies that plan no such jobs, where all were asked for.
    """

    title: str
    plan: ParallelPlan
    health: Health
    cost: JobCost
    costs: str
    left_out: tuple[str, ...] = ()

    @property
    def healthy(self) -> Evaluation:
        """The plan in force with all its workers well."""
        return evaluate(self.plan, Health(dict.fromkeys(self.plan.members, 1.0)), self.cost)

    @property
    def lost(self) -> tuple[int, ...]:
        """Workers of the plan in force that are dead, if it gives them work."""
        return tuple(worker for worker in self.plan.working if worker not in self.health.speed)

    @property
    def unmitigated(self) -> Evaluation | None:
        """The plan in force under the present health; None if it can't continue."""
        return None if self.lost else evaluate(self.plan, self.health, self.cost)


def ask(
    name: str, strategy: Strategy, running: Running, situation: Situation, clock: Callable[[], float]
) -> Answer:  # fmt: skip
    """One strategy's plan, judged by simulation of how it is run."""
    begun = clock()
    try:
        plan = strategy(situation.plan, situation.health, situation.cost)
    except NoPlanError as error:
        return Answer(name, clock() - begun, reason=str(error))
    planning_s = clock() - begun
    before, cost = situation.plan, situation.cost
    moved = running.bytes_to_move(before, plan, cost)
    return Answer(
        strategy=name,
        planning_s=planning_s,
        plan=plan,
        evaluation=running.evaluate(plan, situation.health, cost),
        moving_bytes=sum(moved.values()),
        moving_s=0.0 if before == plan else seconds_to_move(moved, cost),
        all_well=_all_well(strategy, running, situation),
        as_planned=running is AS_PLANNED,
    )


def _all_well(strategy: Strategy, running: Running, situation: Situation) -> Evaluation:
    """The strategy's plan with all workers well. The plan in force may be poor, so its speed is a bad reference."""
    before, cost = situation.plan, situation.cost
    health = Health(dict.fromkeys(before.members, 1.0))
    try:
        return running.evaluate(strategy(before, health, cost), health, cost)
    except NoPlanError:
        return situation.healthy


def to_json(situation: Situation, answers: Mapping[str, Answer]) -> dict[str, Any]:
    """The situation and all answers as plain values."""
    unmitigated = situation.unmitigated
    return {
        "job": situation.title,
        "costs": situation.costs,
        **({"left_out": list(situation.left_out)} if situation.left_out else {}),
        "live": len(situation.health.live),
        "dead": sorted(set(situation.plan.members) - set(situation.health.speed)),
        "slow": {str(worker): speed for worker, speed in situation.health.speed.items() if speed < 1},
        "links": {f"{a}-{b}": speed for (a, b), speed in situation.health.link.items()},
        "plan": situation.plan.to_dict(),
        "healthy_samples_per_s": situation.healthy.samples_per_s,
        "unmitigated_samples_per_s": unmitigated.samples_per_s if unmitigated else None,
        "strategies": {name: _answer_to_json(situation, answer) for name, answer in answers.items()},
    }


def _answer_to_json(situation: Situation, answer: Answer) -> dict[str, Any]:
    if answer.plan is None or answer.evaluation is None:
        return {"no_plan": answer.reason, "planning_s": answer.planning_s}
    return {
        "samples_per_s": answer.evaluation.samples_per_s,
        "iteration_s": answer.evaluation.iteration_s,
        "all_well_samples_per_s": answer.all_well.samples_per_s if answer.all_well else None,
        "share_of_bound": answer.evaluation.share_of_bound,
        "planning_s": answer.planning_s,
        "bytes_to_move": round(answer.moving_bytes),
        "moving_s": answer.moving_s,
        "digest": answer.plan.digest,
        "plan": answer.plan.to_dict(),
        "differences": list(differences(situation.plan, answer.plan)),
    }
