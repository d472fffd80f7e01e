# SPDX-License-Identifier: Apache-2.0
"""A whole job: the coordinator, its workers, what is under way between them, and the faults that may still happen.

A state of the job is a tuple of numbers, of the states of its parts. What a part does by itself is computed once.
May import `plan`, `protocol` and the other files of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import model_checks as checks
import model_worker as does
from model_coordinator import TAKES_OVER, CheckedCoordinator, Reaction, TakesOver
from model_fence import may_decide_when_deposed
from model_values import FINAL, GONE, Faults, Frozen, Mode, Published, Scope, Seat, Violation, Worker

from megatron_resihp.control.coordination.actions import Phase
from megatron_resihp.plan.slots import slot_of
from megatron_resihp.protocol.job import JobDescription
from megatron_resihp.protocol.messages import (
    HeartbeatsMissing,
    JoinRequest,
    NodeLost,
    NodesDown,
    SaveRequest,
    WorkerRestarted,
)
from megatron_resihp.protocol.notices import EpochIsBroken, WorkersTakenIn
from megatron_resihp.protocol.published import EpochPlan
from megatron_resihp.protocol.records import IterationPhase

Job = tuple[int, ...]
"""Numbers of: the coordinator's state, what is published, the faults that are left, and each worker's seat."""
Next = tuple[str, Job]
"""What happens, and what it leads to."""
LEFT = frozenset({Mode.SUSPECTING, Mode.REPORTED, Mode.SAVED, Mode.OUT, Mode.DEAD, Mode.CUT})
"""Workers whose communicators of their epoch are aborted."""


class Numbers[T: Hashable]:
    """Values, and a number for each."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._numbers: dict[T, int] = {}

    def of(self, value: T) -> int:
        """The number of a value."""
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class ModelJob:
    """All that can happen to a job of this scope."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.coordinator = CheckedCoordinator(scope)
        self._deposed_decides = bool(scope.deposed) and may_decide_when_deposed()
        self._published = Numbers[Published]()
        self._faults = Numbers[Faults]()
        self._seats = Numbers[Seat]()
        self._done: dict[Hashable, int] = {}

    @property
    def coordinator_states(self) -> int:
        """How many states of the coordinator have been met."""
        return len(self.coordinator.known)

    def first(self) -> Job:
        """All have heard Go for epoch 0."""
        state, own, scope = self.coordinator.state, self.coordinator.own, self.scope
        plan = state.plan
        assert plan is not None and state.phase is Phase.RUNNING
        workers = [does.at_start(worker, does.shards_under(plan, worker, own)) for worker in range(scope.workers)]
        published = Published((Frozen(EpochPlan(0, plan, None)),), frozenset({0}))
        faults = Faults(*(getattr(scope, name) for name in Faults._fields))
        seats = [self._seats.of(Seat(worker)) for worker in workers]
        return (0, self._published.of(published), self._faults.of(faults), *seats)

    def is_over(self, job: Job) -> bool:
        return self.coordinator.known[job[0]].phase is Phase.ENDED

    def seats(self, job: Job) -> list[Seat]:
        values = self._seats.values
        return [values[number] for number in job[3:]]

    def next(self, job: Job) -> tuple[list[Next], list[Next]]:
        """All that can happen next: what goes its way, and faults. Nothing, once the job is over.

        Raises:
            Violation.
        """
        if self.is_over(job):
            return [], []
        seats = self.seats(job)
        found = [*self._deliveries(job, seats), *self._deeds(job, seats)]
        waits = self.coordinator.known[job[0]].waits and not any(seat.words for seat in seats)
        if not found:
            # The coordinator's waits have bounds for workers that hang, which none does here.
            raise Violation("all wait for each other" + (", until a wait of the coordinator runs out" if waits else ""))
        return found, list(self._faults_of(job, seats, waits))

    # ---- messages

    def _deliveries(self, job: Job, seats: list[Seat]) -> Iterator[Next]:
        resent = self._faults.values[job[2]].resent
        for index, seat in enumerate(seats, 3):
            if seat.words:
                name = type(seat.words[0].value).__name__
                label = f"{name} of worker {seat.worker.id} is heard"
                yield label, self._react(self._taken(job, index, keep=False), seat.words[0], seat.resent)
                if resent and not seat.resent:
                    kept = self._spent(self._taken(job, index, keep=True), "resent")
                    yield f"{label}, and sent again", self._react(kept, seat.words[0], resent=True)
            if seat.notices:
                label = f"worker {seat.worker.id} hears {seat.notices[0]}"
                yield label, self._put(job, index, self._heard(job[index], job[1]))

    def _taken(self, job: Job, index: int, keep: bool) -> Job:
        """A word is taken from a seat, or is to come once more."""

        def take(seat: Seat) -> Seat:
            return seat._replace(resent=True) if keep else seat._replace(words=seat.words[1:], resent=False)

        return self._put(job, index, self._once(("take", job[index], keep), job[index], take))

    def _heard(self, seat: int, published: int) -> int:
        def hear(before: Seat) -> Seat:
            rest = before._replace(notices=before.notices[1:])
            did = does.hear(before.worker, before.notices[0], self._published.values[published], self.coordinator.own)
            return _after(rest, did)

        return self._once(("hear", seat, published), seat, hear)

    def _react(self, job: Job, letter: Frozen[Any] | TakesOver | None, resent: bool = False) -> Job:
        """The coordinator hears something, or a wait of it runs out."""
        reaction = self.coordinator.react(job[0], letter, resent)
        job = (reaction.after, *job[1:])
        asked = self.scope.saves - self._faults.values[job[2]].saves
        checks.check_saves(self.coordinator.known[job[0]], asked)
        if reaction.notices:
            seats = [self._told(number, reaction) for number in job[3:]]
            job = (*job[:3], *seats)
        if reaction.asked:
            down = reaction.asked if self.scope.manager else ()
            job = self._put(job, 3, self._says(job[3], NodesDown(down, 0.0)))
        if reaction.decisions or reaction.begun or reaction.end:
            job = self._publish(job, reaction)
        return job

    def _told(self, number: int, reaction: Reaction) -> int:
        seat = self._seats.values[number]
        notices = tuple(notice for notice in reaction.notices if _concerns(seat.worker, notice))
        if not notices:
            return number

        def tell(before: Seat) -> Seat:
            return before._replace(notices=(*before.notices, *notices))

        return self._once(("tell", number, notices), number, tell)

    def _publish(self, job: Job, reaction: Reaction) -> Job:
        published, known, seats = self._published.values[job[1]], self.coordinator.known[job[0]], self.seats(job)
        unheard = checks.unheard(published, seats, self.scope.manager)
        for decision in reaction.decisions:
            checks.check_accounts(decision.value, unheard)
            checks.check_decision(decision.value, published, known, seats)
            published = published._replace(decisions=(*published.decisions, decision))
        for epoch in reaction.begun:
            checks.check_go(epoch, published, seats, self.coordinator.own)
            published = published._replace(begun=published.begun | {epoch})
        if reaction.end is not None:
            checks.check_end(
                reaction.end, published, known, seats, self.coordinator.own, self.scope.iterations, unheard
            )  # fmt: skip
        return (job[0], self._published.of(published), *job[2:])

    # ---- what workers do

    def _deeds(self, job: Job, seats: list[Seat]) -> Iterator[Next]:
        for index, seat in enumerate(seats, 3):
            worker = seat.worker
            match worker.mode:
                case Mode.TRAINING if worker.computes:
                    yield from self._computing(job, index, seats)
                case Mode.TRAINING:
                    begun = self._do(job, index, "begin", lambda each: does.begin(each, self.scope.iterations))
                    yield f"worker {worker.id} goes on after iteration {worker.iteration}", begun
                case Mode.FINISHING:
                    yield from self._finishing(job, index, seats)
                case Mode.REPORTED if worker.epoch + 1 < len(self._published.values[job[1]].decisions):
                    yield f"worker {worker.id} reads plan {worker.epoch + 1}", self._entered(job, index)
                case Mode.BUILDING:
                    yield from self._building(job, index, seats)
                case Mode.READY if worker.epoch in self._published.values[job[1]].begun:
                    yield (
                        f"worker {worker.id} takes go {worker.epoch}",
                        self._with_published(job, index, "adopt", does.adopt),
                    )

    def _computing(self, job: Job, index: int, seats: list[Seat]) -> Iterator[Next]:
        worker = seats[index - 3].worker
        others, working = self._others(job, worker, seats), self._working(job, worker)
        if worker.stage is IterationPhase.COMPUTE:
            needed = [seat.worker for seat in others if worker.works and seat.worker.id in working]
            if all(_has_begun(other, worker) for other in needed):
                reduced = self._do(job, index, "reduce", does.reduce)
                yield f"worker {worker.id} has reduced {worker.iteration}", reduced
        elif all(_has_sent(seat.worker, worker, self.scope.iterations) for seat in others):
            yield from self._agreeing(job, index, worker, [seat.worker for seat in others])
        if any(_has_left(seat, worker) for seat in others):
            failed = self._do(job, index, "suspect", does.suspect)
            yield f"worker {worker.id} fails in iteration {worker.iteration}", failed

    def _agreeing(self, job: Job, index: int, worker: Worker, others: list[Worker]) -> Iterator[Next]:
        checks.check_agreement(worker, others)
        leaving = bool(worker.change) and all(other.sent == worker.sent for other in others)
        agreed = self._do(job, index, f"agree {leaving}", lambda each: does.agree(each, leaving))
        self._check_step(agreed, index)
        yield f"worker {worker.id} takes step {worker.iteration}", agreed
        if self._faults.values[job[2]].interruptions:
            struck = self._do(job, index, f"strike {leaving}", lambda each: does.agree(each, leaving, True))
            label = f"worker {worker.id} is interrupted before step {worker.iteration}"
            yield label, self._spent(struck, "interruptions")

    def _check_step(self, job: Job, index: int) -> None:
        seats = self.seats(job)
        checks.check_step(seats[index - 3].worker, seats, self.coordinator.known[job[0]].dead)

    def _finishing(self, job: Job, index: int, seats: list[Seat]) -> Iterator[Next]:
        worker = seats[index - 3].worker
        working = self._working(job, worker)
        others = [seat for seat in self._others(job, worker, seats) if seat.worker.id in working]
        if all(seat.worker.sent == worker.sent for seat in others):
            yield f"worker {worker.id} ends", self._do(job, index, "end", does.finish_script)
        elif any(_has_left(seat, worker) for seat in others):
            yield f"worker {worker.id} fails after training", self._do(job, index, "suspect", does.suspect)

    def _entered(self, job: Job, index: int) -> Job:
        entered = self._with_published(
            job, index, "enter", lambda worker, published, own: does.enter(worker, worker.epoch + 1, published)
        )
        self._check_step(entered, index)
        return entered

    def _building(self, job: Job, index: int, seats: list[Seat]) -> Iterator[Next]:
        worker, own = seats[index - 3].worker, self.coordinator.own
        decision = self._decision(job, worker)
        wanted = does.shards_under(decision.plan, worker.id, own)
        sources = [worker] if wanted == worker.shards else checks.sources(wanted, worker, decision, seats)
        if not wanted or sources:
            moved = sources[0].steps if wanted else None
            label = f"build {moved} {wanted}"
            yield (
                f"worker {worker.id} is ready for epoch {worker.epoch}",
                self._do(job, index, label, lambda each: does.build(each, moved, wanted, own)),
            )
        if any(_has_left(seat, worker) for seat in self._others(job, worker, seats)):
            yield f"worker {worker.id} fails to build", self._do(job, index, "suspect", does.suspect)

    def _decision(self, job: Job, worker: Worker) -> EpochPlan:
        decision = self._published.values[job[1]].decision(worker.epoch)
        assert isinstance(decision, EpochPlan)
        return decision

    def _working(self, job: Job, worker: Worker) -> tuple[int, ...]:
        return self._decision(job, worker).plan.working

    def _others(self, job: Job, worker: Worker, seats: list[Seat]) -> list[Seat]:
        """The other members of a worker's epoch."""
        members = self._decision(job, worker).plan.members
        return [seat for seat in seats if seat.worker.id in members and seat.worker.id != worker.id]

    # ---- faults

    def _faults_of(self, job: Job, seats: list[Seat], waits: bool) -> Iterator[Next]:
        left, known = self._faults.values[job[2]], self.coordinator.known[job[0]]
        for index, seat in enumerate(seats, 3):
            worker = seat.worker
            if worker.mode in GONE:
                if left.joins and worker.mode is Mode.DEAD and not seat.words and worker.id in known.dead:
                    yield f"worker {worker.id} is started anew", self._spent(self._joined(job, seats, worker), "joins")
                continue
            if left.deaths:
                yield f"worker {worker.id} is killed", self._spent(self._do(job, index, "die", does.die), "deaths")
            if left.silences and worker.id in known.living:
                silent = Frozen(HeartbeatsMissing(worker.id, 6.0, 0.0))
                yield f"worker {worker.id} counts as silent", self._react(self._spent(job, "silences"), silent)
            if left.partitions and worker.id in known.living and (node := slot_of(worker.id, self.scope.workers)):
                lost = self._spent(self._do(job, index, "cut", does.cut), "partitions")
                yield f"node {node} is lost", self._react(lost, Frozen(NodeLost(node, "silent", 0.0)))
            if left.errors and worker.mode in (Mode.TRAINING, Mode.FINISHING, Mode.BUILDING):
                failed = self._do(job, index, "suspect", does.suspect)
                yield f"a connection of worker {worker.id} fails", self._spent(failed, "errors")
        if left.takeovers:
            after = self._react(self._spent(job, "takeovers"), TAKES_OVER)
            yield "another coordinator takes over", self._leaving(after, job[0]) if left.deposed else after
        if left.deposed and (deposed := self._published.values[job[1]].deposed) is not None:
            yield from self._heard_by_deposed(self._spent(job, "deposed"), seats, deposed)
        if left.late and waits:
            yield "a wait runs out early", self._react(self._spent(job, "late"), None)
        if left.saves:
            yield (
                "a checkpoint is asked for",
                self._spent(self._put(job, 3, self._says(job[3], SaveRequest(0.0))), "saves"),
            )

    def _heard_by_deposed(self, job: Job, seats: list[Seat], deposed: int) -> Iterator[Next]:
        """What its senders tell the next coordinator, too. If that leads to anything, it has to write first."""
        for seat in seats:
            if not seat.words:
                continue
            reaction = self.coordinator.react(deposed, seat.words[0])
            label = f"the coordinator before hears {type(seat.words[0].value).__name__} of worker {seat.worker.id}"
            if not any(reaction[1:]):
                yield label, self._leaving(job, reaction.after)
            elif not self._deposed_decides:
                yield f"{label}, and ends", self._leaving(job, None)
            else:
                after = self._react((deposed, *job[1:]), seat.words[0])
                yield f"{label}, and decides", self._leaving((job[0], *after[1:]), reaction.after)

    def _leaving(self, job: Job, deposed: int | None) -> Job:
        """A coordinator in whose place another has come is in this state; None: it has found out."""
        published = self._published.values[job[1]]._replace(deposed=deposed)
        return (job[0], self._published.of(published), *job[2:])

    def _says(self, seat: int, message: SaveRequest | NodesDown) -> int:
        """The agent of the first worker passes something on."""
        word = Frozen(message)
        return self._once(("says", seat, word), seat, lambda before: before._replace(words=(*before.words, word)))

    def _joined(self, job: Job, seats: list[Seat], before: Worker) -> Job:
        slots = self.scope.workers
        latest = max(seat.worker.id for seat in seats if slot_of(seat.worker.id, slots) == slot_of(before.id, slots))
        number = latest + slots
        words = (Frozen(WorkerRestarted(number, latest, 0.0)), Frozen(JoinRequest(number, self._description())))
        return (*job, self._seats.of(Seat(does.joining(number), words)))

    def _description(self) -> JobDescription:
        return self.coordinator.state.job.described

    def _spent(self, job: Job, fault: str) -> Job:
        left = self._faults.values[job[2]]
        spent = left._replace(**{fault: getattr(left, fault) - 1})
        return (*job[:2], self._faults.of(spent), *job[3:])

    # ---- parts

    def _put(self, job: Job, index: int, seat: int) -> Job:
        return (*job[:index], seat, *job[index + 1 :])

    def _do(self, job: Job, index: int, name: str, deed: Callable[[Worker], does.Did]) -> Job:
        """A worker does something that depends on nothing else than the name says."""
        seat = job[index]
        done = self._once((name, seat), seat, lambda before: _after(before, deed(before.worker)))
        return self._put(job, index, done)

    def _with_published(self, job: Job, index: int, name: str, deed: Callable[..., does.Did]) -> Job:
        published, own = self._published.values[job[1]], self.coordinator.own
        return self._do(job, index, f"{name} {job[1]}", lambda each: deed(each, published, own))

    def _once(self, key: Hashable, seat: int, deed: Callable[[Seat], Seat]) -> int:
        found = self._done.get(key)
        if found is None:
            found = self._done[key] = self._seats.of(deed(self._seats.values[seat]))
        return found


def _after(seat: Seat, did: does.Did) -> Seat:
    worker, said = did
    notices = () if worker.mode in GONE else seat.notices
    return seat._replace(worker=worker, words=(*seat.words, *said), notices=notices)


def _concerns(worker: Worker, notice: object) -> bool:
    """Whether a worker would do anything else for having heard this."""
    if worker.mode in GONE:
        return False
    match notice:
        case WorkersTakenIn(_, workers):
            return worker.id in workers
        case EpochIsBroken(epoch):
            return epoch >= worker.epoch
    return True


def _has_begun(other: Worker, worker: Worker) -> bool:
    """Whether another member has computed gradients for this worker's iteration."""
    return other.epoch > worker.epoch or (other.epoch == worker.epoch and other.cursor > worker.iteration)


def _has_sent(other: Worker, worker: Worker, iterations: int) -> bool:
    """Whether another member has brought its part into the agreement on this worker's iteration."""
    if other.sent is None or other.sent[0] != worker.epoch:
        return False
    # Who has brought the next part has had all of this one. Only standbys go on after the last iteration.
    if other.sent[1] == FINAL:
        return worker.iteration <= iterations
    return other.sent[1] in (worker.iteration, worker.iteration + 1)


def _has_left(other: Seat, worker: Worker) -> bool:
    """Whether the connections between a worker and another member of its epoch have failed, or may have."""
    if other.worker.epoch != worker.epoch:
        return other.worker.epoch > worker.epoch
    if other.worker.mode is Mode.DONE:
        # What it has said came before its end.
        return len(other.words) < 2
    return other.worker.mode in LEFT
