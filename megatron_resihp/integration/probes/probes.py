# SPDX-License-Identifier: Apache-2.0
"""What one worker measures in an iteration: its ops, transfers, workload and whatever else takes its time.

Knows nothing of Megatron; `patches` calls it on the training thread. What is done for each op is kept to a few
assignments, and nothing waits for the device. Imports torch's events through the probes' clock only.
"""

import gc
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_resihp.detector.input.records import OpKind, SpanKind
from megatron_resihp.integration.probes.probe_clock import Clock, DeviceClock
from megatron_resihp.integration.probes.probe_sheet import (
    BYTES,
    CHUNK,
    DONE,
    MICRO_BATCH,
    PEER,
    POSTED,
    RECEIVED,
    Sheet,
)

NAN = float("nan")
NOBODY = object()
"""Stands where no group is."""
SAMPLE = 4
"""Where timing a collective costs events, only those of one micro-batch in so many are timed, taking turns."""

STALL_S = 1e-3
"""A wait for data that is shorter is none to tell of, whatever the thread did meanwhile."""

MOST_PAUSES = 256
"""Of garbage collections since the last record; the newest count."""

PadOp = Callable[[OpKind, int, float, float, float, float], float]
"""(kind, chunk, tokens, squares, started, waited), called at the end of an op, before its end is noted. `started`:
when, as a mark; `waited`: seconds in tensor-parallel collectives since, on the host's clock only. Returns the seconds
by which the host has made the op last longer than it would have on the device."""
PadTransfer = Callable[[int, float, float], float]
"""(peer, came, bytes), called when a tensor has been received, before that is noted. `came`: when that was. Returns the
seconds by which the host has made it later than it would have been on the device."""


class Probes:
    """Takes the notes of this worker's iterations, one at a time.

    Args:
        worker: this worker's id.
        make_clock: gives a clock; two are used in turns.
        send: takes what has been noted of an iteration; must not block. Its record is made where `record` is called.
        run_delay: seconds for which the training thread has waited for a core so far. Those are no wait for data.

    Attributes:
        recording: whether an iteration is under way; nothing else is to be called for ops and transfers if not.
        running_chunk: which of this worker's chunks is being run, where Megatron's own schedule doesn't say.
        tp_group: the tensor-parallel group of this epoch.
        timed_group: the group whose collectives are to be timed now: that one, inside of ops that are sampled.
        mark: gives the moment, as the clock has it.
        emulated: whether ops are padded. Then an op's first wait in a collective counts, which is that for members who
            began it later: what collectives take on the device is in its costs, and what they really take is not. What
            the host has made the op longer by counts as waiting, too: no device would have.
    """

    def __init__(
        self, worker: int, make_clock: Callable[[], Clock], send: Callable[[Sheet], None],
        run_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:  # fmt: skip
        self.running_chunk = 0
        self.recording = False
        self.tp_group: Any = None
        self.timed_group: Any = NOBODY
        self.emulated = False
        self._worker = worker
        self._send = send
        self._run_delay = run_delay
        self._delay = 0.0
        # Marks of one iteration are read while the next one takes its own.
        self._clock, self._other_clock = make_clock(), make_clock()
        self.mark = self._clock.mark
        self._sheet = Sheet(self._clock, worker)
        self._unsent: Sheet | None = None
        self._micro_batches: Sequence[int] = ()
        self._workers: Sequence[int] = ()
        self._sampled: set[int] = set()
        # Nobody takes those of a standby.
        self._pauses: deque[tuple[int, float, float]] = deque(maxlen=MOST_PAUSES)
        self._broken = False
        self._pause_began = 0.0
        self._op: tuple[OpKind, int, int] | None = None
        self._entered = self._batch_came = self._opened = self._waited = 0.0
        self._first_wait = 0
        self._of_output: dict[int, tuple[int, int]] = {}
        self._of_tensor: dict[int, tuple[int, int]] = {}
        self._received: dict[int, list[Any]] = {}

    # ---- iterations

    def begin(self, epoch: int, iteration: int, micro_batches: Sequence[int], workers: Sequence[int]) -> None:
        """An iteration begins.

        Args:
            epoch, iteration: what it is.
            micro_batches: for each of the replica's own micro-batches, its index in the global batch.
            workers: id of the worker that has each torch rank.
        """
        self._sheet.epoch, self._sheet.iteration = epoch, iteration
        self._micro_batches, self._workers = micro_batches, workers
        self._sampled = {each for turn, each in enumerate(micro_batches) if (iteration + turn) % SAMPLE == 0}
        self._sheet.start = time.monotonic()
        self.recording = not self._broken
        self.running_chunk = 0
        self.begin_schedule()

    def abandon(self) -> None:
        """The iteration under way, if there is one, will not be finished."""
        self.recording = False
        self._clock.reset()
        self._sheet = Sheet(self._clock, self._worker)
        # Groups of the old epoch are to be freed now, not when the next iteration begins.
        self.tp_group = None
        self._op, self.timed_group = None, NOBODY

    def begin_schedule(self) -> None:
        """Ops begin; those of an earlier attempt at the same iteration are dropped."""
        sheet = self._sheet
        for notes in (sheet.ops, sheet.transfers, sheet.waits):
            notes.clear()
        for table in (sheet.workload, self._of_output, self._of_tensor, self._received):
            table.clear()
        self._op, self.timed_group = None, NOBODY

    def synchronized(self) -> None:
        """The host has just waited for the device, for reasons of its own: marks can be read from now on."""
        self._clock.anchor()
        if self._unsent is not None:
            self._unsent.fetch()

    def finish(self) -> None:
        """The iteration is over; its record is sent as soon as all its marks can be read."""
        if not self.recording:
            return
        self._sheet.end = time.monotonic()
        self.recording = False
        self._unsent = self._sheet
        self._clock, self._other_clock = self._other_clock, self._clock
        self.mark = self._clock.mark
        self._sheet = Sheet(self._clock, self._worker)
        if self._clock.immediate:
            self.flush()

    def flush(self) -> None:
        """Send what is finished; the host must have waited for the device since."""
        if self._unsent is None:
            return
        sheet, self._unsent = self._unsent, None
        while self._pauses:
            sheet.spans.append(self._pauses.popleft())
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
        return self._clock.immediate

    def event(self, mark: float) -> Any:
        """The device's event behind a mark of the iteration under way; not on CPUs."""
        assert isinstance(self._clock, DeviceClock)
        return self._clock.event(mark)

    # ---- ops

    @property
    def in_op(self) -> bool:
        """Whether an op is under way."""
        return self._op is not None

    def open_forward(self, chunk: int, index: int, inputs: Iterable[Any]) -> None:
        """A forward op begins. `index`: among the replica's own micro-batches; `inputs`: received tensors or None."""
        self._delay = self._run_delay()
        self._open(OpKind.F, chunk, self._micro_batches[index], inputs)

    def open_backward(self, output: Any, gradients: Iterable[Any]) -> None:
        """A backward op begins. `output`: what `close_forward` was given; `gradients`: received tensors or None."""
        self._open(OpKind.B, *self._of_output.pop(id(output)), gradients)

    def close_forward(self, output: Any, tensors: Iterable[Any], workload: Any, pad: PadOp | None) -> None:
        """A forward op ends.

        Args:
            output: the object by which the schedule will ask for the backward op.
            tensors: in it, which may be sent.
            workload: N and Σ l², as numbers or as a tensor of the two; None where they are not known.
            pad: called before the end is noted.
        """
        assert self._op is not None
        _, chunk, micro_batch = self._op
        if workload is not None:
            self._sheet.workload[micro_batch] = workload
        self._of_output[id(output)] = (chunk, micro_batch)
        self._close(tensors, pad)

    def close_backward(self, tensors: Iterable[Any], pad: PadOp | None) -> None:
        """A backward op ends. `tensors`: gradients that may be sent."""
        self._close(tensors, pad)

    @contextmanager
    def weight_gradient(self, chunk: int, micro_batch: int, pad: PadOp | None) -> Iterator[None]:
        """An op that computes the weight gradients that a backward op has left, while it lasts."""
        if not self.recording:
            yield
            return
        self._open(OpKind.W, chunk, micro_batch, ())
        yield
        self._close((), pad)

    def batch_came(self) -> None:
        """The micro-batch of the forward op under way is there: what came before was no work of the device."""
        if self._op is not None and self._op[0] is OpKind.F:
            self._batch_came = time.monotonic()
            if self._batch_came - self._entered > STALL_S:
                self._batch_came = max(self._entered, self._batch_came - (self._run_delay() - self._delay))
            del self._sheet.waits[self._first_wait :]
            self._waited = 0.0
            self._opened = self.mark()

    def _open(self, kind: OpKind, chunk: int, micro_batch: int, inputs: Iterable[Any]) -> None:
        self._op = (kind, chunk, micro_batch)
        for tensor in inputs:
            row = self._received.pop(id(tensor), None)
            if row is not None:
                row[CHUNK], row[MICRO_BATCH] = chunk, micro_batch
        if self._clock.immediate or micro_batch in self._sampled:
            self.timed_group = self.tp_group
        self._first_wait = len(self._sheet.waits)
        self._waited = self._batch_came = 0.0
        self._entered = time.monotonic()
        self._opened = self.mark()

    def _close(self, tensors: Iterable[Any], pad: PadOp | None) -> None:
        assert self._op is not None
        kind, chunk, micro_batch = self._op
        late = 0.0
        if pad is not None:
            tokens, squares = self._sheet.workload.get(micro_batch, (NAN, NAN))
            late = pad(kind, chunk, tokens, squares, self._opened, self._waited)
        end = self.mark()
        waited = NAN if self.timed_group is NOBODY else self._waited + late
        self._op, self.timed_group = None, NOBODY
        self._sheet.ops.append((kind, chunk, micro_batch, self._opened, end, waited))
        if self._batch_came:
            self._sheet.spans.append((SpanKind.DATA, self._entered, self._batch_came))
        for tensor in tensors:
            self._of_tensor[id(tensor)] = (chunk, micro_batch)

    # ---- waiting and transfers

    def note_wait(self, since: float) -> None:
        """A collective of `timed_group` is over."""
        now = self.mark()
        if self._clock.immediate:
            if not (self.emulated and self._waited):
                self._waited += now - since
        else:
            self._sheet.waits.append((len(self._sheet.ops), since, now))

    def post(self, tensor: Any, rank: int, kind: OpKind, received: bool, posted: float) -> list[Any]:
        """A transfer has been posted; returns its row, for `done`."""
        chunk, micro_batch = (0, 0) if received else self._of_tensor.pop(id(tensor), (0, 0))
        row = [self._workers[rank], received, kind, chunk, micro_batch, posted, NAN, tensor.nbytes]
        self._sheet.transfers.append(row)
        if received:
            # Which micro-batch it was is known when an op takes it as its input.
            self._received[id(tensor)] = row
        return row

    def done(self, rows: Iterable[list[Any]], pad: PadTransfer | None) -> None:
        """Transfers that were posted together are done.

        One that is padded begins when it has really come: what gloo took for it is not what the device's links take.
        """
        for row in rows:
            row[DONE] = came = self.mark()
            if pad is not None and row[RECEIVED]:
                late = pad(row[PEER], came, float(row[BYTES]))
                row[POSTED], row[DONE] = came, self.mark() - late

    def note_transfer(
        self, peer: int, received: bool, kind: OpKind, chunk: int, micro_batch: int, posted: float, done: float,
        size: float,
    ) -> None:  # fmt: skip
        """A transfer of which all is known, as a row of TRANSFER says it. `done`: NaN if it was not timed."""
        self._sheet.transfers.append([peer, received, kind, chunk, micro_batch, posted, done, size])

    # ---- spans

    @contextmanager
    def span(self, kind: SpanKind) -> Iterator[None]:
        """Note how long something took that the host waits for."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._sheet.spans.append((kind, began, time.monotonic()))

    @contextmanager
    def marked_span(self, kind: SpanKind) -> Iterator[None]:
        """Note how long something took that the host only starts."""
        began = self.mark()
        try:
            yield
        finally:
            self._sheet.marked_spans.append((kind, began, self.mark()))

    def watch_garbage_collection(self) -> None:
        """Note Python's garbage collections from now on; called once."""
        gc.callbacks.append(self._on_collection)

    def _on_collection(self, phase: str, _: dict[str, int]) -> None:
        # Comes at any moment and in any thread: touches nothing but a queue.
        if phase == "start":
            self._pause_began = time.monotonic()
        else:
            self._pauses.append((SpanKind.GARBAGE_COLLECTION, self._pause_began, time.monotonic()))
