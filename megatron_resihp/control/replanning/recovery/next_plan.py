# SPDX-License-Identifier: Apache-2.0
"""What plans for survivors: complete uniform replicas, or a strategy whose plan is taken if it can be run.

Where there is neither, what is left of the plan that was run goes on.

May import `plan`, `planner`, `protocol` and `control.replanning`'s modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from megatron_resihp.config import UNIFORM
from megatron_resihp.control.replanning.change import check_memory, model_of, with_standbys
from megatron_resihp.control.replanning.modes import mode_of
from megatron_resihp.control.replanning.recovery.fallback import plan_for_few
from megatron_resihp.control.replanning.recovery.inventory import Held, Survivors, lacking, plan_for_survivors
from megatron_resihp.events.event import Event
from megatron_resihp.events.replanning import Planned
from megatron_resihp.plan import Chunk, ParallelPlan, PlanError, Schedule, deal, spelled_out
from megatron_resihp.plan.parallel_plan import group_number
from megatron_resihp.plan.slots import renamed, slot_of, workers_in_slots
from megatron_resihp.plan.spelling import trimmed
from megatron_resihp.planner import JobShape, NoPlanError
from megatron_resihp.planner.uniform import plan_with_room
from megatron_resihp.protocol.planning import KnownJob, NoPlan, PlanFound, PlannerAnswer

WITHOUT_UNIFORM_S: Final = 30.0
"""How long a recovery waits for a strategy's plan where there is no other."""
FALLBACK: Final = "fallback"
"""In the event log: a plan that is smaller than a replica of the job's own layout."""


@dataclass(frozen=True)
class Heard:
    """What a planner has said of survivors.

    Attributes:
        made_ahead: whether that was there before it was asked for.
        waited_s: how long it was waited for.
    """

    answer: PlannerAnswer
    made_ahead: bool
    waited_s: float


AskAboutSurvivors = Callable[[str, Survivors, ParallelPlan, float], Heard]
"""Takes a strategy by name, survivors, the plan that they come from and how many seconds to wait."""
NextPlan = Callable[[Survivors], tuple[ParallelPlan, list[Event]]]
"""Makes the next plan, and says what to write to the log. Raises NoPlanError."""


def uniform_plan(survivors: Survivors) -> tuple[ParallelPlan, list[Event]]:
    """As many complete replicas of the job's own shape as there are; needs no more than sizes.

    Where fewer of them share each sequence or each layer's experts than in the job's own layout, each worker has more
    of these, which must fit into its memory, if that is known. If nothing fits, none of it is kept in reserve, and then
    not even the state before it is reckoned with: without a plan the job ends. If nobody knows what would fit, as many
    share as can.
    """
    known = survivors.known
    if known.device_memory and model_of(known, survivors.own) is None:
        return _of_most_sharers(survivors), []
    unreserved = replace(known, memory_reserve=0.0)
    for job, before in ((known, survivors.previous), (unreserved, survivors.previous)):
        try:
            return _with_room(survivors, job, before), []
        except NoPlanError as error:
            if error.missing or not known.device_memory:
                raise
    return _with_room(survivors, unreserved, None), []


def _of_most_sharers(survivors: Survivors) -> ParallelPlan:
    """As many share each layer's experts as can, and of these plans, as many share each sequence as can: each worker
    then has the least state, and the least activations."""
    shape = survivors.shape
    sharings = sorted(shape.sharings, key=lambda each: (each.experts, each.context), reverse=True)
    for number in range(1, len(sharings)):
        try:
            return _uniform(survivors, replace(shape, sharings=tuple(sharings[:number])))
        except NoPlanError as error:
            if error.missing:
                raise
    return _uniform(survivors, shape)


def _with_room(survivors: Survivors, known: KnownJob, before: ParallelPlan | None) -> ParallelPlan:
    def check(plan: ParallelPlan) -> None:
        check_memory(plan, before, survivors.own, known)

    return plan_with_room(survivors.shape, lambda shape: _uniform(survivors, shape), check)


def _uniform(survivors: Survivors, shape: JobShape) -> ParallelPlan:
    names = workers_in_slots(survivors.held, survivors.slots)
    held = {slot: survivors.held[worker] for slot, worker in names.items()}
    # A worker that died and came back with another id has its old slot here, too.
    previous = renamed(survivors.previous, lambda worker: slot_of(worker, survivors.slots))
    plan = plan_for_survivors(shape, survivors.own, held, previous, survivors.in_parts, survivors.copied)
    return renamed(plan, names.__getitem__)


def uniform_or_less(survivors: Survivors) -> tuple[ParallelPlan, list[Event]]:
    """`uniform_plan`, or of survivors that are too few for one, but have lost nothing, a smaller plan."""
    try:
        return uniform_plan(survivors)
    except NoPlanError as error:
        if error.missing:
            raise
        too_few = str(error)
    try:
        plan = plan_for_few(survivors)
    except NoPlanError as error:
        raise NoPlanError("; ".join(filter(None, [too_few, str(error)]))) from None
    return plan, [Planned(strategy=FALLBACK, instead_of=UNIFORM, reason=too_few)]


def first_again(first: ParallelPlan, survivors: Survivors) -> ParallelPlan | None:
    """The job's first plan, of the workers that have its slots now; None where a slot is empty, there are workers in
    others, for which it has no work, or a worker would have to give up what it holds."""
    names = workers_in_slots(survivors.held, survivors.slots)
    if names.keys() != set(first.members):
        return None
    plan = renamed(first, names.__getitem__)
    full = spelled_out(plan, survivors.own)
    return plan if all(shards in ((), full.shards_of(worker)) for worker, shards in survivors.held.items()) else None


class StrategicPlan:
    """The plan of the strategy that the job was started with, or uniform plans where it has none that can be run."""

    def __init__(self, ask: AskAboutSurvivors) -> None:
        self._ask = ask

    def __call__(self, survivors: Survivors) -> tuple[ParallelPlan, list[Event]]:
        strategy = survivors.job.strategy
        if strategy == UNIFORM:
            return uniform_or_less(survivors)
        try:
            plan, found, heard = self._strategic(strategy, survivors)
        except (_Unusable, PlanError) as error:
            if (same := _for_larger_batches(survivors)) is not None:
                return same, []
            plan, told = uniform_or_less(survivors)
            late = isinstance(error, _TooLate) or None
            return plan, [Planned(strategy=UNIFORM, instead_of=strategy, reason=str(error), overtaken=late), *told]
        planned = Planned(
            strategy=strategy, planning_s=found.planning_s, waited_s=heard.waited_s, made_ahead=heard.made_ahead,
            iteration_s=found.iteration_s, bound_s=found.bound_s, moving_s=found.moving_s,
        )  # fmt: skip
        return plan, [planned]

    def _strategic(self, strategy: str, survivors: Survivors) -> tuple[ParallelPlan, PlanFound, Heard]:
        own, held, running = survivors.own, survivors.held, survivors.running
        if running is None or not _holds(running, survivors):
            raise _Unusable("survivors don't hold what the last plan gave them")
        running = dealt_anew(running, survivors.shape.micro_batches)
        lost = lacking(held, own[-1].end, survivors.in_parts, survivors.copied)
        if lost:
            raise _Unusable(f"the state of layer {lost[0].first} is held by nobody")
        heard = self._ask(strategy, survivors, running, _patience_s(survivors))
        found = heard.answer
        if isinstance(found, NoPlan):
            raise (_TooLate if found.unanswered else _Unusable)(found.reason)
        plan = planned(found.plan, held, own, survivors.shape.tensor_parallel)
        mode_of(plan).check_ops(plan, own, survivors.job)
        if plan.work_digest in survivors.failed:
            raise _Unusable(f"its plan has failed in the first step: {survivors.failed[plan.work_digest]}")
        return plan, found, heard


def dealt_anew(plan: ParallelPlan, micro_batches: int) -> ParallelPlan:
    """The plan for batches of so many micro-batches, in the same proportions, without ops that are listed one by one.

    Raises:
        PlanError: the replicas' pipelines can't run as many.
    """
    before = plan.micro_batch_count
    if before == micro_batches:
        return plan
    sharing = [plan.replicas[group.start] for group in plan.sharing_sequences]
    shares = [Fraction(len(each.micro_batches) * micro_batches, before) for each in sharing]
    counts = [int(share) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda number: counts[number] - shares[number])
    for number in by_rest[: micro_batches - sum(counts)]:
        counts[number] += 1
    hands = deal(counts)
    replicas = tuple(
        replace(each, micro_batches=hands[group_number(plan, number)], schedule=_without_orders(each.schedule))
        for number, each in enumerate(plan.replicas)
    )
    return replace(plan, replicas=replicas, migrations=())


def _without_orders(schedule: Schedule | None) -> Schedule | None:
    return None if schedule is not None and schedule.orders else schedule


def _for_larger_batches(survivors: Survivors) -> ParallelPlan | None:
    """The plan that was run, if all that has changed is the size of batches, and it can run them."""
    running, own, held = survivors.running, survivors.own, survivors.held
    if running is None or running.micro_batch_count == survivors.shape.micro_batches:
        return None
    if held.keys() != set(running.members) or not _holds(running, survivors):
        return None
    try:
        plan = planned(dealt_anew(running, survivors.shape.micro_batches), held, own, survivors.shape.tensor_parallel)
        mode_of(plan).check_ops(plan, own, survivors.job)
    except PlanError:
        return None
    return plan


def was_chosen(told: Iterable[Event]) -> bool:
    """Whether a plan is one of a strategy, of which all that was told is this; others need no more than sizes."""
    return any(isinstance(event, Planned) and event.instead_of is None for event in told)


class _Unusable(Exception):
    """There is no plan of the strategy that can be run; the message says why."""


class _TooLate(_Unusable):
    """There may be one, but no answer has come in time."""


def _patience_s(survivors: Survivors) -> float:
    """How long training stands still for a strategy's plan: not for long where it can go on without."""
    wait_s = survivors.job.plan_wait
    try:
        uniform_plan(survivors)
    except NoPlanError:
        return max(wait_s, WITHOUT_UNIFORM_S)
    return wait_s


def _holds(running: ParallelPlan, survivors: Survivors) -> bool:
    plan = spelled_out(running, survivors.own)
    return all(shards == plan.shards_of(worker) for worker, shards in survivors.held.items())


def planned(plan: ParallelPlan, held: Held, own: tuple[Chunk, ...], degree: int) -> ParallelPlan:
    """A strategy's plan as it is run: a worker without work keeps what it holds, unless the plan has no room for that.

    Args:
        plan: the strategy's.
        held: what each living worker holds.
        own, degree: the job's own split into layers, and its tensor-parallel degree.

    Raises:
        PlanError: it breaks a rule.
    """
    kept = {
        worker: () if worker in plan.standbys and plan.standbys[worker] is None else shards
        for worker, shards in held.items()
    }
    working = trimmed(spelled_out(replace(plan, standbys={}), own))
    return with_standbys(working, kept, own, degree)
