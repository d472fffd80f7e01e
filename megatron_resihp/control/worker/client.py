# SPDX-License-Identifier: Apache-2.0
"""A worker's side of the control plane: what it tells the coordinator, and the thread that hears notices.

May import `plan`, `protocol`, `events` and this package's other modules.
"""

import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from megatron_resihp.control import exit_codes, keys
from megatron_resihp.control.slowness import Slowness
from megatron_resihp.control.transport.address import Address, parse_address
from megatron_resihp.control.transport.store import Store, StoreError
from megatron_resihp.control.worker.reach import unreachable
from megatron_resihp.events.codec import plain
from megatron_resihp.events.event import Event
from megatron_resihp.plan import ParallelPlan, Shard
from megatron_resihp.protocol.job import JobDescription
from megatron_resihp.protocol.messages import (
    MESSAGES,
    CommunicationFailed,
    EventsReported,
    FirstStepFailed,
    JoinRequest,
    Message,
    Ready,
    SurvivorReport,
)
from megatron_resihp.protocol.notices import (
    NOTICES,
    EpochIsBroken,
    JobEnds,
    NodeReleased,
    Notice,
    OthersFinish,
    PlanChange,
    SaveOrder,
    SlownessChanged,
    StopTraining,
    ValidationOrder,
    WorkerDismissed,
    WorkersGivenUp,
    WorkersTakenIn,
)
from megatron_resihp.protocol.published import DECISIONS, GO, Decision, EpochPlan
from megatron_resihp.protocol.records import Record
from megatron_resihp.protocol.wire import MalformedError

NO_EPOCH = -1
"""That of a worker which was started anew, until a plan has it in it."""
NOTICE_S = 10.0
"""The thread that hears notices asks again this often, whatever the connection's state."""
SLICE_S = 0.1
"""Bounded waits look up this often whether what they wait for can still come."""
READ_S = 60.0
"""For what is known to be there: it comes at once, or as soon as the coordinator gets a share of a busy machine."""

DROPPED_SHOWN = 10
"""So many malformed notices get a line each."""


class EpochBroken(Exception):
    """The control plane has marked the epoch as broken."""


class UnreachableError(RuntimeError):
    """A member of the plan can't be reached: a communication error like others."""


class JobEnded(Exception):
    """The job is over for this worker; `code` is the exit code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class CoordinatorLost(JobEnded):
    """Nobody is left to say how the job goes on: a worker that holds state saves it (`integration.loop.last_save`)."""

    def __init__(self, why: str) -> None:
        super().__init__(exit_codes.RETRY, f"the coordinator is gone: {why}")


class WorkerControl:
    """Connects one worker to the coordinator.

    Args:
        store: a connection of its own; the notice thread clones another.
        worker: this worker's id.
        on_broken: called in the notice thread when the current epoch is marked as broken or the job ends; must make
            blocked collectives of the epoch return with an error.
        epoch: that this worker begins in.
        door: where others find out whether they can reach this worker; None: nowhere.

    Attributes:
        slowness: what fault injections have slowed, as far as this worker has heard.
        to_save: number of the last order to write a checkpoint that this worker has heard of; 0: none.
        on_change: called in the notice thread with the notice of a change of plan.
    """

    def __init__(
        self, store: Store, worker: int, on_broken: Callable[[], None], epoch: int = 0, door: Address | None = None
    ) -> None:
        self.worker = worker
        self.epoch = epoch
        self.stop_signal: int | None = None
        self.to_save = 0
        self.peer_ports: set[int] = set()
        self.slowness = Slowness()
        self.on_change: Callable[[PlanChange], None] = lambda change: None
        self._store = store
        self._lock = threading.Lock()
        self._name, self._told = secrets.token_hex(4), 0
        self._on_broken = on_broken
        self._broken: dict[int, tuple[str, float]] = {}
        self._finishing = False
        self._validation: ValidationOrder | None = None
        self._change: PlanChange | None = None
        self._joins: int | None = None
        self._end: JobEnded | None = None
        self._dropped = 0
        self._members: tuple[int, ...] = ()
        self._to_probe: set[int] = set()
        self._unreachable: list[int] = []
        self._doors: dict[int, Address] = {}
        self._reached: set[str] = set()
        if door is not None:
            store.set(f"{keys.KNOCK_AT}{worker}", str(door))
        self._news = threading.Condition()
        self._notice_store = store.clone()
        self._thread = threading.Thread(target=self._listen, name="resihp-notices", daemon=True)
        self._thread.start()

    def tell(self, message: Message) -> None:
        """Send a message to the coordinator.

        Raises:
            JobEnded: it is gone.
        """
        with self._asked() as store:
            self._told += 1
            text = MESSAGES.write(message, f"worker {self.worker}", f"{self._name}.{self._told}")
            store.push(keys.INBOX, text)

    @contextmanager
    def _asked(self) -> Iterator[Store]:
        """The store, for one thread at a time; who loses it there has lost the coordinator."""
        try:
            with self._lock:
                yield self._store
        except (StoreError, TimeoutError) as error:
            self._lose(str(error))
            assert self._end is not None
            raise self._end from error

    def event(self, *events: Event) -> None:
        """Write events to the run's log, all at once."""
        now = time.time()
        lines = tuple(plain(event, now, self.epoch, self.worker) for event in events)
        self.tell(EventsReported(self.worker, lines))

    @property
    def members(self) -> tuple[int, ...]:
        """Those of the plan of this worker's epoch."""
        return self._members

    @property
    def validation(self) -> ValidationOrder | None:
        """The validation of this epoch that this worker has heard of and not taken."""
        order = self._validation
        return order if order is not None and order.epoch == self.epoch else None

    def drop_validation(self, order: ValidationOrder | None) -> None:
        """This one has been taken; one that came meanwhile stays."""
        if self._validation is order:
            self._validation = None

    @property
    def change(self) -> PlanChange | None:
        """The change of plan in this epoch that this worker has heard of and not taken."""
        order = self._change
        return order if order is not None and order.epoch == self.epoch else None

    def drop_change(self, order: PlanChange | None) -> None:
        """All leave the epoch for this one; one that came meanwhile stays."""
        if self._change is order:
            self._change = None

    def broken(self) -> bool:
        """Whether the current epoch is marked as broken or the job has ended."""
        return self.epoch in self._broken or self._end is not None

    def broken_at(self) -> float | None:
        """Unix time at which this worker heard that its current epoch is broken."""
        return self._broken[self.epoch][1] if self.epoch in self._broken else None

    def await_broken(self, timeout_s: float) -> bool:
        """Wait until the current epoch is marked as broken or the job has ended; whether that happened in time."""
        with self._news:
            return self._news.wait_for(self.broken, timeout_s)

    def check(self) -> None:
        """Raise if the job is over or the current epoch is broken.

        Raises:
            JobEnded, EpochBroken.
        """
        if self._end is not None:
            raise self._end
        if self.epoch in self._broken:
            raise EpochBroken(self._broken[self.epoch][0])

    def suspect(self, error: BaseException, timeout_s: float) -> None:
        """Report a communication error and wait until the control plane has marked the epoch as broken.

        The agent, which lives as long as this worker, ends the wait if it loses the coordinator; one that is stopped
        with node 0 goes on some time.

        Raises:
            JobEnded: the job ended meanwhile, or the coordinator counts as lost, having said nothing for `timeout_s`.
        """
        self._report(CommunicationFailed(self.worker, self.epoch, _first_line(error)), timeout_s)

    def blame_plan(self, error: BaseException, timeout_s: float) -> None:
        """Report that the first step under a plan on trial has failed, and wait as in `suspect`; raises the same."""
        name = type(error).__name__
        said = _first_line(error)
        told = said if said == name else f"{name}: {said}"
        self._report(FirstStepFailed(self.worker, self.epoch, told), timeout_s)

    def _report(self, failure: CommunicationFailed | FirstStepFailed, timeout_s: float) -> None:
        if not self.broken():
            self.tell(failure)
        with self._news:
            answered = self._news.wait_for(lambda: self._finishing or self.broken(), timeout_s)
        if not answered:
            self._lose(f"it has not answered for {timeout_s:g} s")
        with self._news:
            # The others are leaving because they are done, unless one of them dies on the way. Either is heard of,
            # and so is the end of the coordinator.
            self._news.wait_for(self.broken)
        if self._end is not None:
            raise self._end

    def report(self, record: Record, held: tuple[Shard, ...]) -> Decision:
        """Report how far this worker got in the epoch and what it holds, and wait for what comes next.

        Raises:
            JobEnded: there is nothing to come, or this worker was given up for dead.
        """
        self._finishing = False  # who was about to leave has to stay
        self._unreachable = self.silent(self._members) if self.epoch in self._to_probe else []
        self.tell(SurvivorReport(self.worker, self.epoch, record, held, tuple(self._unreachable)))
        return self._enter(self.epoch + 1)

    def check_reach(self, plan: ParallelPlan) -> None:
        """Look once more for those that could not be reached: building groups with them would take minutes to fail.

        Raises:
            UnreachableError: one still can't be.
        """
        silent = self.silent(worker for worker in self._unreachable if worker in plan.members)
        if silent:
            raise UnreachableError(f"rendezvous: worker {silent[0]} can't be reached")

    @property
    def knocked_at(self) -> frozenset[int]:
        """Workers that `silent` has looked for; one that is still starting has no door yet."""
        return frozenset(self._doors)

    def silent(self, workers: Iterable[int]) -> list[int]:
        """Those of these whose machines could be reached from here once and can't now; takes seconds. From any thread.

        A machine that has never answered may be behind a firewall that lets communicators through.

        Raises:
            JobEnded: the coordinator is gone.
        """
        wanted = [worker for worker in workers if worker != self.worker]
        for worker in wanted:
            key = f"{keys.KNOCK_AT}{worker}"
            with self._asked() as store:
                if worker not in self._doors and store.check(key):
                    self._doors[worker] = parse_address(store.get(key, READ_S))
        doors = {worker: self._doors[worker] for worker in wanted if worker in self._doors}
        missed = unreachable(doors)
        self._reached |= {doors[worker].host for worker in doors.keys() - set(missed)}
        return [worker for worker in missed if doors[worker].host in self._reached]

    def join(self, job: JobDescription) -> Decision:
        """Ask for a place in a plan, for a worker that was started anew, and wait for one.

        Args:
            job: what this worker's arguments say of the job; it is dismissed if they say something else.

        Raises:
            JobEnded: there is no place any more.
        """
        self.tell(JoinRequest(self.worker, job))
        with self._news:
            # As long as the job lasts, whose end is heard of, and so is the coordinator's.
            self._news.wait_for(lambda: self._joins is not None or self._end is not None)
        if self._end is not None:
            raise self._end
        assert self._joins is not None
        return self._enter(self._joins)

    def _enter(self, epoch: int) -> Decision:
        decision = DECISIONS.read(self._await(keys.plan_key(epoch), mind_epoch=False)).body
        if isinstance(decision, EpochPlan):
            if self.worker in decision.leaving:
                raise JobEnded(0, "its node leaves")
            if self.worker not in decision.plan.members:
                raise JobEnded(exit_codes.FENCED, "this worker was given up for dead and is fenced")
            self._members = decision.plan.members
        self.epoch = epoch
        return decision

    def first_plan(self) -> ParallelPlan:
        """Wait for the plan of epoch 0."""
        decision = DECISIONS.read(self._await(keys.plan_key(0))).body
        assert isinstance(decision, EpochPlan), "nothing is held yet that could be saved"
        self._members = decision.plan.members
        return decision.plan

    def count(self, name: str) -> int:
        """Add one to a counter that all workers share and return its new value."""
        with self._asked() as store:
            return store.add(name, 1)

    def ready(self, digests: dict[str, str], bytes_received: int, steps_redone: int, ports: list[int]) -> None:
        """Report that this worker is ready for the epoch and wait until all are; then `peer_ports` is known.

        Args:
            digests: of the state that this worker holds, which others who report the same key must agree on; see
                `control.coordination.digests` for keys.
            bytes_received: of state, from other holders.
            steps_redone: iterations that are computed again.
            ports: at which this worker's gloo groups listen.

        Raises:
            EpochBroken, JobEnded: somebody died or state differed meanwhile.
        """
        self.tell(Ready(self.worker, self.epoch, digests, tuple(ports), bytes_received, steps_redone))
        self.peer_ports = set(GO.read(self._await_go()).body.ports)

    def _await_go(self) -> str:
        """Go holds for all members or for none: others may have given up what they held before it."""
        key = keys.go_key(self.epoch)
        try:
            return self._await(key)
        except EpochBroken:
            # The coordinator says neither go after this nor that it was broken before it.
            with self._asked() as store:
                if not store.check(key):
                    raise
                return store.get(key, READ_S)

    def await_end(self) -> JobEnded:
        """Wait until the job is over."""
        with self._news:
            self._news.wait_for(lambda: self._end is not None)
        assert self._end is not None
        return self._end

    def _await(self, key: str, mind_epoch: bool = True) -> str:
        while True:
            if mind_epoch:
                self.check()
            elif self._end is not None:
                raise self._end
            with self._asked() as store:
                if store.wait(key, SLICE_S):
                    return store.get(key, READ_S)

    def _listen(self) -> None:
        number = 0
        try:
            while True:
                while not self._notice_store.wait(keys.notice_key(number), NOTICE_S):
                    pass
                self._read(self._notice_store.get(keys.notice_key(number), READ_S))
                number += 1
        except (StoreError, TimeoutError) as error:
            self._lose(str(error))

    def _lose(self, why: str) -> None:
        """There is no coordinator any more, as far as this worker can know."""
        with self._news:
            self._end = self._end or CoordinatorLost(why)
            self._news.notify_all()
        self._abort_epoch()

    def _read(self, text: str) -> None:
        try:
            notice = NOTICES.read(text).body
        except MalformedError as error:
            self._dropped += 1
            if self._dropped <= DROPPED_SHOWN:
                print(f"resihp: worker {self.worker} drops a malformed notice: {error}", file=sys.stderr, flush=True)
            return
        self._hear(notice)

    def _hear(self, notice: Notice) -> None:
        match notice:
            case StopTraining(signal):
                self.stop_signal = signal
            case SaveOrder(number):
                # What was ordered before a worker was there has been done.
                self.to_save = 0 if self.epoch == NO_EPOCH else number
            case NodeReleased():
                pass  # for agents
            case SlownessChanged():
                self.slowness = Slowness.of(notice)
            case ValidationOrder():
                self._validation = notice
            case PlanChange():
                self._hear_of_change(notice)
            case _:
                with self._news:
                    self._hear_news(notice)
                    self._news.notify_all()
                if self.broken():
                    self._abort_epoch()

    def _hear_of_change(self, change: PlanChange) -> None:
        try:
            self.on_change(change)
        except Exception as error:  # like that of an abort below
            print(f"resihp: worker {self.worker} does not prepare a change: {error}", file=sys.stderr, flush=True)
        self._change = change

    def _hear_news(
        self, notice: EpochIsBroken | OthersFinish | WorkersTakenIn | WorkersGivenUp | WorkerDismissed | JobEnds
    ) -> None:
        """What somebody may wait for."""
        match notice:
            case EpochIsBroken(epoch, cause, probe):
                if probe:
                    self._to_probe.add(epoch)
                self._broken[epoch] = (cause, time.time())
            case OthersFinish():
                self._finishing = True
            case WorkersTakenIn(epoch, workers):
                self._joins = epoch if self.worker in workers else self._joins
            case WorkersGivenUp(workers, reason):
                if self.worker in workers:
                    self._end = self._end or JobEnded(exit_codes.FENCED, reason)
            case WorkerDismissed(worker, reason):
                if self.worker == worker:
                    self._end = self._end or JobEnded(exit_codes.REFUSED, reason)
            case JobEnds(code, reason):
                self._end = self._end or JobEnded(code, reason)

    def _abort_epoch(self) -> None:
        try:
            self._on_broken()
        except Exception as error:  # the notice thread must live on: it is the only one that hears of the end
            print(f"resihp: worker {self.worker} could not abort its groups: {error}", file=sys.stderr, flush=True)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
