# SPDX-License-Identifier: Apache-2.0
"""Assembles the messages of all workers into observations of iterations, in order. Pure: the caller passes the time.
Imports numpy.

A worker sends its records in order, so an iteration is complete once every worker has sent it or a later one. If that
takes longer than `patience_s` after its first record, the iteration is judged without the missing records. An iteration
for which less than half of the workers reported is dropped. So one damaged iteration number cannot move the job into
the future.
"""

from dataclasses import dataclass, field
from typing import Final

from megatron_resihp.detector.input.counters import Counters
from megatron_resihp.detector.input.join import Joiner
from megatron_resihp.detector.input.observations import IterationObservations, Layout
from megatron_resihp.detector.input.records import IterationRecord
from megatron_resihp.detector.input.wire import WireError, unpack

PATIENCE_S: Final = 5.0
MOST_PENDING: Final = 16
"""Most iterations that wait for records at once; the oldest waits no longer."""


@dataclass
class _Pending:
    first_at: float
    settled: int
    """Number of workers that have sent this iteration's record or a later one."""
    records: dict[int, IterationRecord] = field(default_factory=dict)


class Assembler:
    """Assembles an epoch's records; a new epoch begins with `begin`."""

    def __init__(self, patience_s: float = PATIENCE_S, counters: Counters | None = None) -> None:
        self.counters = counters if counters is not None else Counters()
        self._patience_s = patience_s
        self._joiner: Joiner | None = None
        self._pending: dict[int, _Pending] = {}
        self._latest: dict[int, int] = {}
        self._judged = 0

    def begin(self, layout: Layout) -> None:
        """Accept only records of this epoch from now on; incomplete iterations are dropped with their epoch."""
        self._joiner = Joiner(layout)
        self._pending = {}
        self._latest = dict.fromkeys(map(int, layout.workers), 0)
        self._judged = 0

    def add(self, message: bytes, now: float) -> list[IterationObservations]:
        """Take a message; returns the iterations that it completes. Never raises because of the message's content.

        Args:
            message: the result of `wire.pack`, or any other bytes.
            now: seconds on any clock that does not go back.
        """
        self.counters.received += 1
        try:
            record = unpack(message)
        except WireError as error:
            setattr(self.counters, error.fault, getattr(self.counters, error.fault) + 1)
            return []
        return self.add_record(record, now)

    def add_record(self, record: IterationRecord, now: float) -> list[IterationObservations]:
        """Like `add`, for an unpacked record."""
        if self._joiner is None or record.epoch != self._joiner.layout.epoch:
            self.counters.other_epoch += 1
        elif self._joiner.row_of(record.worker) is None:
            self.counters.unknown_worker += 1
        elif record.iteration <= self._judged:
            self.counters.late += 1
        else:
            self._keep(record, now)
        return self.poll(now)

    def _keep(self, record: IterationRecord, now: float) -> None:
        pending = self._pending.get(record.iteration)
        if pending is None:
            pending = self._pending[record.iteration] = _Pending(now, self._settled(record.iteration))
        if record.worker in pending.records:
            self.counters.duplicate += 1
            return
        self.counters.lost += record.lost
        pending.records[record.worker] = record
        before = self._latest[record.worker]
        for iteration, each in self._pending.items():
            each.settled += before < iteration <= record.iteration
        self._latest[record.worker] = max(before, record.iteration)

    def _settled(self, iteration: int) -> int:
        return sum(latest >= iteration for latest in self._latest.values())

    def poll(self, now: float) -> list[IterationObservations]:
        """Iterations that are complete, or that have waited long enough."""
        judged = []
        while self._pending:
            iteration = min(self._pending)
            pending = self._pending[iteration]
            if not (
                pending.settled == len(self._latest)
                or len(self._pending) > MOST_PENDING
                or now >= pending.first_at + self._patience_s
            ):
                break
            del self._pending[iteration]
            judged += self._judge(iteration, pending)
        return judged

    def _judge(self, iteration: int, pending: _Pending) -> list[IterationObservations]:
        assert self._joiner is not None
        missing = len(self._latest) - len(pending.records)
        if missing > len(pending.records):
            self.counters.abandoned += 1
            # Its number may be damaged, so it does not show how far these workers are.
            self._latest.update(dict.fromkeys(pending.records, self._judged))
            for number, each in self._pending.items():
                each.settled = self._settled(number)
            return []
        self.counters.missing += missing
        self._judged = iteration
        return [self._joiner.join(iteration, list(pending.records.values()), self.counters)]
