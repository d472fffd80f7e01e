# SPDX-License-Identifier: Apache-2.0
"""What a worker has heard from the coordinator, and the thread that listens.

May import `protocol`, `control.exit_codes`, `control.slowness`, the store and this package's errors.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from megatron_resihp.control import exit_codes
from megatron_resihp.control.slowness import Slowness
from megatron_resihp.control.transport.sockets import StoreError
from megatron_resihp.control.transport.store.lasting import LastingStore
from megatron_resihp.control.transport.store.reader import NoticeReader
from megatron_resihp.control.transport.store.store import Store
from megatron_resihp.control.worker.errors import CoordinatorLost, EpochBroken, JobEnded
from megatron_resihp.protocol.notices import (
    DrainOrder,
    EpochIsBroken,
    JobEnds,
    NodeReleased,
    Notice,
    NoticesForgotten,
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

NO_EPOCH: Final = -1
"""The epoch of a worker that was started anew, until a plan has it in it."""
NOTICE_S: Final = 10.0
"""How often the listening thread asks again, whatever the connection's state."""
LED_S: Final = 1.0
"""Likewise where another coordinator may come: no other thread may notice that."""
READ_S: Final = 60.0
"""For a value that is there: it comes at once, or as soon as the coordinator gets its share of a busy machine."""


class Order[T: (ValidationOrder, PlanChange)]:
    """The last order of its kind that this worker has heard of and not taken."""

    def __init__(self) -> None:
        self._order: T | None = None

    def hear(self, order: T) -> None:
        self._order = order

    def of_epoch(self, epoch: int) -> T | None:
        """The order, if it is one of this epoch."""
        order = self._order
        return order if order is not None and order.epoch == epoch else None

    def drop(self, order: T | None) -> None:
        """Drop an order that has been taken; one that came meanwhile stays."""
        if self._order is order:
            self._order = None


class Heard:
    """What one worker has heard.

    Args:
        worker: this worker's id.
        on_broken: called in the listening thread when the current epoch is marked as broken or the job ends; must make
            blocked collectives of the epoch return with an error.
        epoch: that this worker begins in.

    Attributes:
        epoch: that this worker is in.
        stop_signal: with which the job was asked to end; None: it wasn't.
        to_save: number of the last order to write a checkpoint; 0: none.
        slowness: what fault injections have slowed.
        on_change: called in the listening thread with the notice of a change of plan.
        validation, change: orders that this worker has not taken.
        to_probe: epochs after which workers look for the members that they can reach.
    """

    def __init__(self, worker: int, on_broken: Callable[[], None], epoch: int) -> None:
        self.epoch = epoch
        self.stop_signal: int | None = None
        self.to_save = 0
        self.slowness = Slowness()
        self.on_change: Callable[[PlanChange], None] = lambda change: None
        self.validation = Order[ValidationOrder]()
        self.change = Order[PlanChange]()
        self.to_probe: set[int] = set()
        self._worker = worker
        self._on_broken = on_broken
        self._broken: dict[int, tuple[str, float]] = {}
        self._finishing = False
        self._joins: int | None = None
        self._end: JobEnded | None = None
        self._news = threading.Condition()

    # ---- questions

    def broken(self) -> bool:
        """Whether the current epoch is marked as broken or the job has ended."""
        return self.epoch in self._broken or self._end is not None

    def broken_at(self) -> float | None:
        """Unix time at which this worker heard that its current epoch is broken."""
        return self._broken[self.epoch][1] if self.epoch in self._broken else None

    def check_job(self) -> None:
        """Raises JobEnded if the job is over."""
        if self._end is not None:
            raise self._end

    def check(self) -> None:
        """Raise if the job is over or the current epoch is broken.

        Raises:
            JobEnded, EpochBroken.
        """
        self.check_job()
        if self.epoch in self._broken:
            raise EpochBroken(self._broken[self.epoch][0])

    # ---- waits

    def await_broken(self, timeout_s: float) -> bool:
        """Wait until the current epoch is marked as broken or the job has ended; whether that happened in time."""
        with self._news:
            return self._news.wait_for(self.broken, timeout_s)

    def await_answer(self, timeout_s: float) -> None:
        """Wait until an error that this worker has reported has broken the epoch, or turns out not to matter.

        Raises:
            JobEnded: the job has ended, or the coordinator counts as lost, having said nothing for `timeout_s`.
        """
        with self._news:
            answered = self._news.wait_for(lambda: self._finishing or self.broken(), timeout_s)
        if not answered:
            self.lose(f"it has not answered for {timeout_s:g} s")
        with self._news:
            # The others are leaving because they are done, unless one of them dies on the way. This worker hears of
            # either, and of the end of the coordinator.
            self._news.wait_for(self.broken)
        self.check_job()

    def await_call(self) -> int:
        """Wait until a plan takes this worker in; returns its epoch. Ends with the job or the coordinator.

        Raises:
            JobEnded.
        """
        with self._news:
            self._news.wait_for(lambda: self._joins is not None or self._end is not None)
        self.check_job()
        assert self._joins is not None
        return self._joins

    def await_end(self) -> JobEnded:
        """Wait until the job is over."""
        with self._news:
            self._news.wait_for(lambda: self._end is not None)
        assert self._end is not None
        return self._end

    # ---- news

    def stay(self) -> None:
        """This worker was about to leave because the others finish, and goes on with them instead."""
        self._finishing = False

    def lose(self, why: str) -> JobEnded:
        """The coordinator is gone, as far as this worker can know; returns how the job has ended for it."""
        with self._news:
            self._end = self._end or CoordinatorLost(why)
            self._news.notify_all()
        self._abort_epoch()
        return self._end

    def hear(self, notice: Notice) -> None:
        """Take a notice in."""
        match notice:
            case StopTraining(signal):
                self.stop_signal = signal
            case SaveOrder(number):
                # Orders from before a worker was there have been carried out.
                self.to_save = 0 if self.epoch == NO_EPOCH else number
            case NodeReleased() | DrainOrder() | NoticesForgotten():
                pass  # for agents, and for the reader
            case SlownessChanged():
                self.slowness = Slowness.of(notice)
            case ValidationOrder():
                self.validation.hear(notice)
            case PlanChange():
                self._prepare(notice)
                self.change.hear(notice)
            case _:
                with self._news:
                    self._hear_awaited(notice)
                    self._news.notify_all()
                if self.broken():
                    self._abort_epoch()

    def _prepare(self, change: PlanChange) -> None:
        try:
            self.on_change(change)
        except Exception as error:  # like that of an abort below
            print(f"resihp: worker {self._worker} does not prepare a change: {error}", file=sys.stderr, flush=True)

    def _hear_awaited(
        self, notice: EpochIsBroken | OthersFinish | WorkersTakenIn | WorkersGivenUp | WorkerDismissed | JobEnds
    ) -> None:
        """Notices that a thread of this worker may wait for."""
        match notice:
            case EpochIsBroken(epoch, cause, probe):
                if probe:
                    self.to_probe.add(epoch)
                self._broken[epoch] = (cause, time.time())
            case OthersFinish():
                self._finishing = True
            case WorkersTakenIn(epoch, workers):
                self._joins = epoch if self._worker in workers else self._joins
            case WorkersGivenUp(workers, reason):
                if self._worker in workers:
                    self._end = self._end or JobEnded(exit_codes.FENCED, reason)
            case WorkerDismissed(worker, reason):
                if self._worker == worker:
                    self._end = self._end or JobEnded(exit_codes.REFUSED, reason)
            case JobEnds(code, reason):
                self._end = self._end or JobEnded(code, reason)

    def _abort_epoch(self) -> None:
        try:
            self._on_broken()
        except Exception as error:  # the listening thread must live on: no other hears of the end
            print(f"resihp: worker {self._worker} could not abort its groups: {error}", file=sys.stderr, flush=True)


class Listener:
    """A thread that reads notices, and drops what is malformed.

    Args:
        store: a connection of its own.
        leave: called with the term of a coordinator that has taken the place of the last one; may raise JobEnded.
    """

    def __init__(
        self, store: Store, worker: int, heard: Heard, leave: Callable[[int], None] = lambda term: None
    ) -> None:  # fmt: skip
        self._store = store
        self._notices = NoticeReader(store, f"worker {worker}", READ_S)
        self._heard = heard
        self._leave = leave
        if isinstance(store, LastingStore):
            store.follow(lambda successor: self._notices.begin_again())
        threading.Thread(target=self._listen, name="resihp-notices", daemon=True).start()

    def _listen(self) -> None:
        term = self._term
        try:
            while True:
                notice = self._notices.next(NOTICE_S if term is None else LED_S)
                if term is not None and (now := self._term) is not None and now > term:
                    term = now
                    self._leave(term)
                if notice is not None:
                    self._heard.hear(notice)
        except (StoreError, TimeoutError) as error:
            self._heard.lose(str(error))
        except JobEnded:
            pass  # it is told

    @property
    def _term(self) -> int | None:
        """Of the coordinator that is heard; None: no other may come."""
        return self._store.term if isinstance(self._store, LastingStore) else None
