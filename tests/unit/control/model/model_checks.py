# SPDX-License-Identifier: Apache-2.0
"""What holds in every state of a job, whatever has happened to it. May import `plan`, `protocol` and the model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from model_coordinator import Known
from model_values import GONE, Mode, Published, Seat, Violation, Worker
from model_worker import shards_under

from megatron_resihp.control import exit_codes
from megatron_resihp.control.coordination.actions import End
from megatron_resihp.control.replanning.recovery.inventory import lacking
from megatron_resihp.plan import Chunk, Shard
from megatron_resihp.protocol.published import Decision, EpochPlan


def check_decision(decision: Decision, published: Published, known: Known, seats: Sequence[Seat]) -> None:
    """One decision for each epoch; no step that a member has agreed on is lost."""
    if decision.epoch != len(published.decisions):
        raise Violation(f"epoch {decision.epoch} is decided on after {len(published.decisions) - 1}")
    assert decision.commit is not None
    for worker in (seat.worker for seat in seats if seat.worker.id in known.living):
        agreed = max((iteration for iteration, _ in worker.outcomes), default=0)
        if worker.mode not in GONE and agreed > decision.commit.iteration:
            went_on = f"epoch {decision.epoch} goes on after {decision.commit.iteration}"
            raise Violation(f"{went_on}, though worker {worker.id} had agreed on {agreed}")
    if not isinstance(decision, EpochPlan) and decision.reason.startswith("state differs"):
        raise Violation(decision.reason)


class Unheard(NamedTuple):
    """Members of the last epoch, and how many of them are lost without a word."""

    members: int
    cut: int

    @property
    def too_many(self) -> bool:
        return 2 * self.cut > self.members


def unheard(published: Published, seats: Sequence[Seat], manager: bool) -> Unheard:
    """What the coordinator can't know. `manager`: the cluster's tells it."""
    last = published.decision(max(published.begun))
    assert isinstance(last, EpochPlan)
    cut = [seat for seat in seats if seat.worker.mode is Mode.CUT and seat.worker.id in last.plan.members]
    return Unheard(len(last.plan.members), 0 if manager else len(cut))


def check_accounts(decision: Decision, unheard: Unheard) -> None:
    """Nobody goes on beside another part of the job that may go on, too."""
    if isinstance(decision, EpochPlan) and unheard.too_many:
        raise Violation(f"epoch {decision.epoch} goes on with {unheard.cut} of {unheard.members} members unheard of")


def check_go(epoch: int, published: Published, seats: Sequence[Seat], own: tuple[Chunk, ...]) -> None:
    """All members are there, with the whole state of the same iteration."""
    decision = published.decision(epoch)
    if not isinstance(decision, EpochPlan) or epoch != len(published.decisions) - 1 or epoch in published.begun:
        raise Violation(f"go for epoch {epoch}, which was not decided on last, or has begun")
    assert decision.commit is not None
    members = [seat.worker for seat in seats if seat.worker.id in decision.plan.members]
    for worker in members:
        if worker.mode is not Mode.DEAD and (worker.mode is not Mode.READY or worker.epoch != epoch):
            raise Violation(f"go for epoch {epoch} while worker {worker.id} is {worker.mode.name}")
        has_state = shards_under(decision.plan, worker.id, own) and worker.mode is not Mode.DEAD
        if has_state and len(worker.moved or ()) != decision.commit.iteration:
            raise Violation(f"worker {worker.id} goes on with {worker.moved} after {decision.commit.iteration}")
    if len({worker.moved for worker in members if worker.moved is not None}) > 1:
        raise Violation(f"members of epoch {epoch} go on with unlike state")


def check_agreement(worker: Worker, others: Collection[Worker]) -> None:
    """Those that have added up their gradients have computed them with the same parameters."""
    for other in others:
        if other.steps is None or worker.steps is None:
            continue
        steps = other.steps[: worker.iteration - 1]
        if steps != worker.steps:
            raise Violation(f"workers {worker.id} and {other.id} agree with the steps {worker.steps} and {other.steps}")


def check_step(worker: Worker, seats: Sequence[Seat], dead: frozenset[int]) -> None:
    """All that count as alive have taken the same steps, as far as each has come."""
    if worker.steps is None or worker.id in dead:
        return
    for other in (seat.worker for seat in seats):
        if other.steps is None or other.id in dead:
            continue
        both = min(len(worker.steps), len(other.steps))
        if worker.steps[:both] != other.steps[:both]:
            raise Violation(f"workers {worker.id} and {other.id} took unlike steps: {worker.steps}, {other.steps}")


def check_end(
    end: End,
    published: Published,
    known: Known,
    seats: Sequence[Seat],
    own: tuple[Chunk, ...],
    iterations: int,
    unheard: Unheard,
) -> None:
    """A job that is finished has taken all steps, and no other could have gone on, or might go on twice.

    A script ends once all working members have made the call after train(), so all have saved what was to be saved.
    """
    workers = [seat.worker for seat in seats if seat.worker.mode not in (Mode.OUT, Mode.DEAD, Mode.CUT)]
    done = [worker for worker in workers if worker.id in known.done and len(worker.steps or ()) == iterations]
    living = [worker for worker in workers if worker.mode is not Mode.DONE and worker.id not in known.dead]
    if end.code == exit_codes.FINISHED:
        decision = published.decisions[-1].value
        working = decision.plan.working if isinstance(decision, EpochPlan) else known.living
        if not done or any(worker.id in working and worker.id in known.living for worker in living):
            raise Violation("the job is finished before its workers are")
        return
    held = {worker.id: worker.shards for worker in living}
    in_vain = end.code == exit_codes.RETRY and done and not held
    if in_vain or (held and not lacking(held, own[-1].end) and not unheard.too_many):
        raise Violation(f"the job ends with {end.code} ({end.reason}), though nothing is missing")


def check_saves(known: Known, asked: int) -> None:
    """One checkpoint for each time that one is asked for."""
    if known.saves > asked:
        raise Violation(f"{known.saves} checkpoints are ordered, and {asked} were asked for")


def sources(wanted: tuple[Shard, ...], worker: Worker, decision: EpochPlan, seats: Sequence[Seat]) -> list[Worker]:
    """The members that a worker may get what it wants from; all of them have the same."""
    found = [
        seat.worker
        for seat in seats
        if decision.held.get(seat.worker.id) == wanted
        and seat.worker.epoch == worker.epoch
        and seat.worker.mode in (Mode.BUILDING, Mode.READY)
    ]
    if len({each.steps for each in found}) > 1:
        raise Violation(f"epoch {worker.epoch} moves unlike state of the same shards")
    return found
