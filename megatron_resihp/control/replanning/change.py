# SPDX-License-Identifier: Apache-2.0
"""A change of plan by choice: what is taken of a plan that was asked for, and why it may be refused.

The plan says which worker works where. A live worker without work is a standby and keeps what it holds, whatever the
plan says of standbys: it can't keep what it doesn't hold, and no worker drops state without need.
May import `plan`, what `cost` knows of models, and `control.replanning`'s modules.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from megatron_resihp.control.replanning.modes import degrees_of, in_short
from megatron_resihp.control.replanning.recovery.inventory import lacking
from megatron_resihp.cost.model.layers import Model, ModelError, model_from_arguments
from megatron_resihp.cost.model.parts import ShardError
from megatron_resihp.cost.training import Training, TrainingError, training_of_job
from megatron_resihp.plan import Chunk, OwnSplit, ParallelPlan, PlanError, Shard, differences, spelled_out
from megatron_resihp.plan.spelling import trimmed
from megatron_resihp.protocol.planning import KnownJob


class ChangeRefused(Exception):
    """A change that can't be; the message is one line."""


@dataclass(frozen=True)
class Change:
    """A change that workers have been told of.

    Attributes:
        number: of changes, from 1.
        plan: what to change to.
        why: in words.
        first_reported_at: when the first worker stopped for it; None: none has yet.
        leaving: workers that it is made for to be rid of.
        larger: all leave for larger batches, and the plan is still to be found.
    """

    number: int
    plan: ParallelPlan
    why: str
    first_reported_at: float | None = None
    leaving: frozenset[int] = frozenset()
    larger: bool = False


def plan_of(data: Any) -> ParallelPlan:
    """The plan in what was asked for.

    Raises:
        ChangeRefused: there is none.
    """
    try:
        return ParallelPlan.from_dict(data)
    except PlanError as error:
        raise ChangeRefused(str(error)) from None


def plan_to_change_to(
    asked: ParallelPlan, current: ParallelPlan, own: tuple[Chunk, ...], degree: int, living: Set[int]
) -> ParallelPlan:
    """What is to be run of a plan that was asked for.

    Args:
        asked: says which worker works where.
        current: the plan in force.
        own: the job's own split into layers.
        degree: the job's own tensor-parallel degree.
        living: members of the current epoch.

    Raises:
        ChangeRefused: the plan can't be run, or is in force already.
    """
    before = spelled_out(current, own)
    held = {worker: before.shards_of(worker) for worker in living}
    working = _checked(asked, current, own, held)
    after = with_standbys(working, held, own, degree)
    if spelled_out(after, own) == before:
        raise ChangeRefused("this plan is in force already")
    return after


def _checked(
    asked: ParallelPlan, current: ParallelPlan, own: tuple[Chunk, ...], held: Mapping[int, tuple[Shard, ...]]
) -> ParallelPlan:
    """The plan's working part with its layers, if it can be run."""
    dead = sorted(set(asked.working) - held.keys())
    if dead:
        names = ", ".join(map(str, dead))
        raise ChangeRefused(f"worker{'s' if len(dead) > 1 else ''} {names} can't work: not alive in this job")
    if asked.micro_batch_count != current.micro_batch_count:
        counts = f"{asked.micro_batch_count} micro-batches, the job has {current.micro_batch_count}"
        raise ChangeRefused(f"the plan has {counts} in a global batch")
    if asked.uneven_shards:
        raise ChangeRefused("the plan has members of a stage hold unequal shards, which can't be run")
    try:
        working = trimmed(spelled_out(replace(asked, standbys={}), own))
    except PlanError as error:
        raise ChangeRefused(f"the plan doesn't fit the job: {error}") from None
    layers = own[-1].end
    if working.replicas[0].chunks[-1].end != layers:
        raise ChangeRefused(f"the plan has {working.replicas[0].chunks[-1].end} layers, the job {layers}")
    lost = lacking(held, layers)
    if lost:
        raise ChangeRefused(f"the state of layer {lost[0].first} is held by nobody")
    return working


def check_degrees(plan: ParallelPlan, job: KnownJob) -> None:
    """Called before a plan is taken that a user asks for; planners check for themselves.

    Megatron asserts the same where each worker builds its part of the model. By then the plan in force is over.

    Raises:
        PlanError: members of a stage can't hold equal shards of the model.
    """
    if job.arguments is None:
        return
    try:
        model = model_from_arguments(job.arguments)
    except ModelError:
        return  # Megatron can build more than is known of here
    try:
        for degree in degrees_of(plan):
            model.require_even(degree)
    except ShardError as error:
        raise PlanError(f"{error}; ask for stages of another number of members") from None


def model_of(job: KnownJob, own: tuple[Chunk, ...]) -> tuple[Model, Training] | None:
    """What a worker's memory follows from, as plans say who shares experts; None: too little is known. `own`: the job's
    own split into layers."""
    if job.arguments is None:
        return None
    try:
        split = OwnSplit(own, job.tensor_parallel)
        return model_from_arguments(job.arguments), training_of_job(job.arguments, split)
    except (ModelError, TrainingError):
        return None


def check_memory(after: ParallelPlan, before: ParallelPlan | None, own: tuple[Chunk, ...], job: KnownJob) -> None:
    """Called before a change by choice: a worker that runs out of memory ends the job. Where the amount is unknown,
    on CPUs, nothing is checked.

    Args:
        after, before: the plan that is asked for, and the one in force. None: of that nothing is left by then.
        own: the job's own split into layers.
        job: of which the model and the devices' memory are known, or not.

    Raises:
        PlanError: the plan, or old and new state together, exceed what may be used of a device's memory.
    """
    known = model_of(job, own)
    if known is None or not job.device_memory:
        return
    model, training = known
    # These take a while to import.
    from megatron_resihp.cost import memory, room

    capacity = room.usable(job.device_memory, job.memory_reserve)
    after = spelled_out(after, own)
    memory.check_plan(after, model, training, capacity)
    if before is not None:
        room.check_change(spelled_out(before, own), after, model, training, capacity, job.host_memory or 0)


def with_standbys(
    working: ParallelPlan, held: Mapping[int, tuple[Shard, ...]], own: tuple[Chunk, ...], degree: int
) -> ParallelPlan:
    """The plan with all other live workers as standbys, in short where it says no more than the job's own arguments.

    Args:
        working: says its layers, and nothing of standbys.
        held: what each living worker holds.
        own, degree: the job's own split, and its tensor-parallel degree.
    """
    plan, mode = in_short(working, own, degree)
    idle = {worker: held[worker] for worker in sorted(held.keys() - set(working.working))}
    kept = mode.standbys(idle, own, degree) if plan.expert_parallel == 1 else dict.fromkeys(idle)
    return replace(plan, standbys=kept)


def changes(before: ParallelPlan, after: ParallelPlan, own: tuple[Chunk, ...]) -> tuple[str, ...]:
    """What a change changes, line by line."""
    return differences(spelled_out(before, own), spelled_out(after, own))


def arrival(workers: Sequence[int], slots: int) -> str:
    """Why there is a plan with these: "worker 7 came back", or "workers 4, 5 joined" where no worker was before."""
    back = [worker for worker in workers if worker >= slots]
    joined = [worker for worker in workers if worker < slots]
    told = [f"{_names(who)} {what}" for who, what in ((back, "came back"), (joined, "joined")) if who]
    return ", ".join(told)


def _names(workers: Sequence[int]) -> str:
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"
