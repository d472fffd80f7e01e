# SPDX-License-Identifier: Apache-2.0
"""What one worker measures in an iteration: its ops, transfers, workload and whatever else takes its time.

Knows nothing of Megatron; `patches` calls it on the training thread. What is done for each op is kept to a few
assignments, and nothing waits for the device. Imports torch's events through the probes' clock only.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_resihp.detector.input.records import SpanKind
from megatron_resihp.integration.probes.op_notes import OpNotes, PadOp
from megatron_resihp.integration.probes.page import Page
from megatron_resihp.integration.probes.pauses import Pauses
from megatron_resihp.integration.probes.probe_clock import Clock, DeviceClock
from megatron_resihp.integration.probes.probe_sheet import Sheet
from megatron_resihp.integration.probes.transfer_notes import InTransit, TransferNotes


class Probes:
    """Takes the notes of this worker's iterations, one at a time.

    Args:
        worker: this worker's id.
        make_clock: gives a clock; two are used in turns.
        send: takes what has been noted of an iteration; must not block. Its record is made where `record` is called.
        run_delay: seconds for which the training thread has waited for a core so far. Those are no wait for data.

    Attributes:
        recording: whether an iteration is under way; nothing else is to be called for ops and transfers if not.
        mark: gives the moment, as the clock has it.
        ops, transfers, pauses: what is noted of each.
    """

    def __init__(
        self, worker: int, make_clock: Callable[[], Clock], send: Callable[[Sheet], None],
        run_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:  # fmt: skip
        self.recording = False
        self._worker = worker
        self._send = send
        # Marks of one iteration are read while the next one takes its own.
        self._page, self._other_clock = Page(worker, make_clock()), make_clock()
        self.mark = self._page.clock.mark
        self._unsent: Sheet | None = None
        self._broken = False
        self._transit = InTransit()
        self.ops = OpNotes(self._page, self._transit, run_delay)
        self.transfers = TransferNotes(self._page, self._transit)
        self.pauses = Pauses()

    def begin(self, epoch: int, iteration: int, micro_batches: Sequence[int], workers: Sequence[int]) -> None:
        """An iteration begins.

        Args:
            epoch, iteration: what it is.
            micro_batches: for each of the replica's own micro-batches, its index in the global batch.
            workers: id of the worker that has each torch rank.
        """
        sheet = self._page.sheet
        sheet.epoch, sheet.iteration = epoch, iteration
        self.transfers.workers = workers
        self.ops.begin(iteration, micro_batches)
        sheet.start = time.monotonic()
        self.recording = not self._broken
        self.begin_schedule()

    def abandon(self) -> None:
        """The iteration under way, if there is one, will not be finished."""
        self.recording = False
        self._page.clock.reset()
        self._page.turn(self._page.clock)
        # Groups of the old epoch are to be freed now, not when the next iteration begins.
        self.ops.leave_groups()
        self.ops.clear()

    def begin_schedule(self) -> None:
        """Ops begin; those of an earlier attempt at the same iteration are dropped."""
        sheet = self._page.sheet
        for notes in (sheet.ops, sheet.in_turns, sheet.transfers, sheet.waits):
            notes.clear()
        sheet.workload.clear()
        self._transit.clear()
        self.ops.clear()

    def synchronized(self) -> None:
        """The host has just waited for the device, for reasons of its own: marks can be read from now on."""
        self._page.clock.anchor()
        if self._unsent is not None:
            self._unsent.fetch()

    def finish(self) -> None:
        """The iteration is over; its record is sent as soon as all its marks can be read."""
        if not self.recording:
            return
        self._page.sheet.end = time.monotonic()
        self.recording = False
        clock = self._page.clock
        self._unsent, self._other_clock = self._page.turn(self._other_clock), clock
        self.mark = self._page.clock.mark
        if self._page.clock.immediate:
            self.flush()

    def flush(self) -> None:
        """Send what is finished; the host must have waited for the device since."""
        if self._unsent is None:
            return
        sheet, self._unsent = self._unsent, None
        sheet.spans += self.pauses.take()
        if not sheet.clock.immediate:
            try:
                sheet.record()
            except Exception as error:  # measuring must not end a job
                print(f"resihp: worker {self._worker} measures no more ({error!r}); training goes on", file=sys.stderr)
                self._broken = True
                return
            finally:
                sheet.clock.reset()
        self._send(sheet)

    @property
    def immediate(self) -> bool:
        """Whether marks are seconds, as on CPUs."""
        return self._page.clock.immediate

    def event(self, mark: float) -> Any:
        """The device's event behind a mark of the iteration under way; not on CPUs."""
        assert isinstance(self._page.clock, DeviceClock)
        return self._page.clock.event(mark)

    @contextmanager
    def weight_gradient(self, chunk: int, micro_batch: int, pad: PadOp | None) -> Iterator[None]:
        """Note an op that computes the weight gradients that a backward op has left, if an iteration is under way."""
        if not self.recording:
            yield
            return
        with self.ops.weight_gradient(chunk, micro_batch, pad):
            yield

    # ---- spans

    @contextmanager
    def span(self, kind: SpanKind) -> Iterator[None]:
        """Note how long something took that the host waits for."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._page.sheet.spans.append((kind, began, time.monotonic()))

    @contextmanager
    def marked_span(self, kind: SpanKind) -> Iterator[None]:
        """Note how long something took that the host only starts."""
        began = self.mark()
        try:
            yield
        finally:
            self._page.sheet.marked_spans.append((kind, began, self.mark()))
