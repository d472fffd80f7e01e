"""What one worker measures in an iteration: its ops, transfers, workload and whatever else takes its time.

Knows nothing of Megatron; `probe_seams` calls it on the training thread. What is done for each op is kept to a few
assignments, and nothing waits for the device. Imports torch's events through the probes' clock only.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_resihp.detector.records import IterationRecord, OpKind, SpanKind
from megatron_resihp.integration.probe_clock import Clock
from megatron_resihp.integration.probe_sheet import Sheet

NAN = float("nan")
SAMPLE = 4
"""Where timing a collective costs events, only those of one micro-batch in so many are timed, taking turns."""

PadOp = Callable[[OpKind, int, float, float, float, float], None]
"""(kind, chunk, tokens, squares, started, waited), called at the end of an op, before its end is noted. `started`:
seconds of the monotonic clock; `waited`: seconds in tensor-parallel collectives since. On the host's clock only."""
PadTransfer = Callable[[int, float, float], None]
"""(peer, posted, bytes), called when a tensor has been received, before that is noted."""


class Probes:
    """Takes the notes of this worker's iterations, one at a time.

    Args:
        worker: this worker's id.
        make_clock: gives a clock for each set of notes.
        send: takes finished records; must not block.

    Attributes:
        recording: whether an iteration is under way; nothing else is to be called for ops and transfers if not.
        tp_group: the tensor-parallel group of this epoch.
    """

    def __init__(
        self,
        worker: int,
        make_clock: Callable[[], Clock],
        send: Callable[[IterationRecord], None],
    ) -> None:
        self.recording = False
        self.tp_group: Any = None
        self._worker = worker
        self._send = send
        # Marks of one iteration are read while the next one takes its own.
        self._sheet, self._spare = Sheet(make_clock()), Sheet(make_clock())
        self._unsent: Sheet | None = None
        self._clock = self._sheet.clock
        self._micro_batches: Sequence[int] = ()
        self._workers: Sequence[int] = ()
        self._pauses: list[tuple[SpanKind, float, float]] = []
        self._pause_began = 0.0
        self._op: tuple[OpKind, int, int] | None = None
        self._entered = self._batch_came = self._opened = self._waited = 0.0
        self._first_wait = 0
        self._times_waits = False
        self._of_output: dict[int, tuple[int, int]] = {}
        self._of_tensor: dict[int, tuple[int, int]] = {}
        self._received: dict[int, int] = {}

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
        self._sheet.start = time.monotonic()
        self.recording = True
        self.begin_schedule()

    def abandon(self) -> None:
        """The iteration under way, if there is one, will not be finished."""
        self.recording = False
        self._sheet.clear()

    def begin_schedule(self) -> None:
        """Ops begin; those of an earlier attempt at the same iteration are dropped."""
        self._sheet.clear_schedule()
        self._op = None
        for table in (self._of_output, self._of_tensor, self._received):
            table.clear()

    def synchronized(self) -> None:
        """The host has just waited for the device, for reasons of its own: marks can be read now."""
        self._clock.anchor()
        self.flush()

    def finish(self) -> None:
        """The iteration is over; its record is sent as soon as all its marks can be read."""
        self._sheet.end = time.monotonic()
        self.recording = False
        finished, self._sheet, self._spare = self._sheet, self._spare, self._sheet
        self._clock = self._sheet.clock
        self._unsent = finished
        if self._clock.immediate:
            self.flush()

    def flush(self) -> None:
        """Send what is finished; the host must have waited for the device since."""
        if self._unsent is None:
            return
        pauses, self._pauses = self._pauses, []
        for pause in pauses:
            self._unsent.spans.add(pause)
        self._send(self._unsent.record(self._worker))
        self._unsent.clear()
        self._unsent = None

    @property
    def immediate(self) -> bool:
        """Whether marks are seconds, as on CPUs."""
        return self._clock.immediate

    # ---- ops

    @property
    def in_op(self) -> bool:
        """Whether an op is under way."""
        return self._op is not None

    def open_forward(self, chunk: int, index: int, inputs: Iterable[Any]) -> None:
        """A forward op begins. `index`: among the replica's own micro-batches; `inputs`: received tensors or None."""
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

    def batch_came(self) -> None:
        """The micro-batch of the forward op under way is there: what came before was no work of the device."""
        if self._op is not None and self._op[0] is OpKind.F:
            self._batch_came = time.monotonic()
            self._sheet.waits.count = self._first_wait
            self._waited = 0.0
            self._opened = self._clock.mark()

    def _open(self, kind: OpKind, chunk: int, micro_batch: int, inputs: Iterable[Any]) -> None:
        self._op = (kind, chunk, micro_batch)
        for tensor in inputs:
            row = self._received.pop(id(tensor), None)
            if row is not None:
                self._sheet.transfers.set(row, "chunk", chunk)
                self._sheet.transfers.set(row, "micro_batch", micro_batch)
        self._times_waits = self._clock.immediate or (self._sheet.iteration + micro_batch) % SAMPLE == 0
        self._first_wait = self._sheet.waits.count
        self._waited = self._batch_came = 0.0
        self._entered = time.monotonic()
        self._opened = self._clock.mark()

    def _close(self, tensors: Iterable[Any], pad: PadOp | None) -> None:
        assert self._op is not None
        kind, chunk, micro_batch = self._op
        if pad is not None:
            tokens, squares = self._sheet.workload.get(micro_batch, (NAN, NAN))
            pad(kind, chunk, tokens, squares, self._opened, self._waited)
        end = self._clock.mark()
        self._op = None
        waited = self._waited if self._times_waits else NAN
        self._sheet.ops.add((kind, chunk, micro_batch, self._opened, end, waited))
        if self._batch_came:
            self._sheet.spans.add((SpanKind.DATA, self._entered, self._batch_came))
        for tensor in tensors:
            self._of_tensor[id(tensor)] = (chunk, micro_batch)

    # ---- waiting and transfers

    def times_collective(self, group: Any) -> bool:
        """Whether a collective of this group is to be timed now."""
        return self._op is not None and self._times_waits and group is self.tp_group

    def mark(self) -> float:
        """Now, on this worker's clock."""
        return self._clock.mark()

    def note_wait(self, since: float) -> None:
        """A collective inside an op is over."""
        now = self._clock.mark()
        if self._clock.immediate:
            self._waited += now - since
        else:
            self._sheet.waits.add((self._sheet.ops.count, since, now))

    def post(self, tensor: Any, rank: int, kind: OpKind, received: bool, posted: float) -> int:
        """A transfer has been posted; returns its number, for `done`."""
        chunk, micro_batch = (0, 0) if received else self._of_tensor.pop(id(tensor), (0, 0))
        row = self._sheet.transfers.add((
            self._workers[rank], received, kind, chunk, micro_batch, posted, NAN,
            tensor.numel() * tensor.element_size(),
        ))  # fmt: skip
        if received:
            # Which micro-batch it was is known when an op takes it as its input.
            self._received[id(tensor)] = row
        return row

    def done(self, rows: Sequence[int], pad: PadTransfer | None) -> None:
        """Transfers that were posted together are done."""
        transfers = self._sheet.transfers
        for row in rows:
            if pad is not None and transfers.rows["received"][row]:
                found = transfers.rows[row]
                pad(int(found["peer"]), float(found["posted"]), float(found["bytes"]))
            transfers.set(row, "done", self._clock.mark())

    # ---- spans

    @contextmanager
    def span(self, kind: SpanKind) -> Iterator[None]:
        """Note how long something took that the host waits for."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._sheet.spans.add((kind, began, time.monotonic()))

    @contextmanager
    def marked_span(self, kind: SpanKind) -> Iterator[None]:
        """Note how long something took that the host only starts."""
        began = self._clock.mark()
        try:
            yield
        finally:
            self._sheet.marked_spans.add((kind, began, self._clock.mark()))

    def watch_garbage_collection(self) -> None:
        """Note Python's garbage collections from now on; called once."""
        gc.callbacks.append(self._on_collection)

    def _on_collection(self, phase: str, _: dict[str, int]) -> None:
        # Comes at any moment and in any thread: touches nothing but a list.
        if phase == "start":
            self._pause_began = time.monotonic()
        else:
            self._pauses.append((SpanKind.GARBAGE_COLLECTION, self._pause_began, time.monotonic()))
