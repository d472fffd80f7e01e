# SPDX-License-Identifier: Apache-2.0
"""What one worker notes of its ops: when they begin and end, what they wait for in collectives, and their workload.

Called on the training thread: a few assignments for each op, and nothing waits for the device. Imports the probes'
modules.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_resihp.detector.input.records import OpKind, SpanKind
from megatron_resihp.integration.probes.page import Page
from megatron_resihp.integration.probes.probe_sheet import CHUNK, MICRO_BATCH
from megatron_resihp.integration.probes.transfer_notes import InTransit

NAN = float("nan")
SAMPLE = 4
"""Where timing a collective costs events, only those of one micro-batch in so many are timed, taking turns."""

STALL_S = 1e-3
"""A wait for data that is shorter is none to tell of, whatever the thread did meanwhile."""

PadOp = Callable[[OpKind, int, float, float, float, float], float]
"""(kind, chunk, tokens, squares, started, waited), called at the end of an op, before its end is noted. `started`:
when, as a mark; `waited`: seconds in tensor-parallel collectives since, on the host's clock only. Returns the seconds
by which the host has made the op last longer than it would have on the device."""


class OpNotes:
    """Takes the notes of ops, one at a time.

    Args:
        page: where they go.
        transit: tensors that are sent or received.
        run_delay: seconds for which the training thread has waited for a core so far. Those are no wait for data.

    Attributes:
        running_chunk: which of this worker's chunks is being run, where Megatron's own schedule doesn't say.
        tp_group: the tensor-parallel group of this epoch.
        stage_groups: it, and the groups of experts and others that have none but its members.
        tells_waits: whether the waits of these groups' collectives are all there are. Where replicas share sequences
            or experts, members wait for each other inside kernels and for other replicas, too.
        timed_groups: the groups whose collectives are to be timed now: those, inside of ops that are sampled.
        emulated: whether ops are padded. Then an op's first wait in a collective counts, which is that for members that
            began it later: what collectives take on the device is in its costs, and what they really take is not. What
            the host has made the op longer by counts as waiting, too: no device would have.
    """

    def __init__(self, page: Page, transit: InTransit, run_delay: Callable[[], float]) -> None:
        self.running_chunk = 0
        self.tp_group: Any = None
        self.stage_groups: tuple[Any, ...] = ()
        self.tells_waits = True
        self.timed_groups: tuple[Any, ...] = ()
        self.emulated = False
        self._page, self._transit = page, transit
        self._run_delay = run_delay
        self._delay = 0.0
        self._micro_batches: Sequence[int] = ()
        self._sampled: set[int] = set()
        self._op: tuple[OpKind, int, int] | None = None
        self._beside: tuple[int, int] | None = None
        self._entered = self._batch_came = self._opened = self._waited = 0.0
        self._first_wait = 0
        self._of_output: dict[int, tuple[int, int]] = {}

    def begin(self, iteration: int, micro_batches: Sequence[int]) -> None:
        """An iteration begins. `micro_batches`: for each of the replica's own, its index in the global batch."""
        self._micro_batches = micro_batches
        self._sampled = {each for turn, each in enumerate(micro_batches) if (iteration + turn) % SAMPLE == 0}
        self.running_chunk = 0

    def clear(self) -> None:
        """No op is under way."""
        self._of_output.clear()
        self._op, self._beside, self.timed_groups = None, None, ()

    def leave_groups(self) -> None:
        """The epoch's groups are to be freed."""
        self.tp_group, self.stage_groups = None, ()

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

    def open_beside(self, output: Any, gradients: Iterable[Any]) -> None:
        """A backward op begins that is run in turns with the forward op under way, and ends with it. Arguments as of
        `open_backward`."""
        self._beside = self._of_output.pop(id(output))
        self._take(gradients, *self._beside)

    def work_begins(self) -> None:
        """What the ops under way need has come only now: the time since they were opened was no work."""
        del self._page.sheet.waits[self._first_wait :]
        self._waited = 0.0
        self._opened = self._page.clock.mark()

    def will_send(self, kind: OpKind, tensor: Any) -> None:
        """The op of this kind, of two that are run in turns, hands over what it has made before it ends."""
        assert self._op is not None and self._beside is not None
        self._transit.of_tensor[id(tensor)] = self._op[1:] if kind is OpKind.F else self._beside

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
            self._page.sheet.workload[micro_batch] = workload
        self._of_output[id(output)] = (chunk, micro_batch)
        self._close(tensors, pad)

    def close_backward(self, tensors: Iterable[Any], pad: PadOp | None) -> None:
        """A backward op ends. `tensors`: gradients that may be sent."""
        self._close(tensors, pad)

    @contextmanager
    def weight_gradient(self, chunk: int, micro_batch: int, pad: PadOp | None) -> Iterator[None]:
        """An op that computes the weight gradients that a backward op has left, while it lasts."""
        self._open(OpKind.W, chunk, micro_batch, ())
        yield
        self._close((), pad)

    def batch_came(self) -> None:
        """The micro-batch of the forward op under way is there: what came before was no work of the device."""
        if self._op is not None and self._op[0] is OpKind.F:
            self._batch_came = time.monotonic()
            if self._batch_came - self._entered > STALL_S:
                self._batch_came = max(self._entered, self._batch_came - (self._run_delay() - self._delay))
            self.work_begins()

    def _open(self, kind: OpKind, chunk: int, micro_batch: int, inputs: Iterable[Any]) -> None:
        self._op = (kind, chunk, micro_batch)
        self._take(inputs, chunk, micro_batch)
        if self.tells_waits and (self._page.clock.immediate or micro_batch in self._sampled):
            self.timed_groups = self.stage_groups
        self._first_wait = len(self._page.sheet.waits)
        self._waited = self._batch_came = 0.0
        self._entered = time.monotonic()
        self._opened = self._page.clock.mark()

    def _take(self, inputs: Iterable[Any], chunk: int, micro_batch: int) -> None:
        """These are the inputs of an op: it is known now what was received."""
        for tensor in inputs:
            row = self._transit.received.pop(id(tensor), None)
            if row is not None:
                row[CHUNK], row[MICRO_BATCH] = chunk, micro_batch

    def _close(self, tensors: Iterable[Any], pad: PadOp | None) -> None:
        assert self._op is not None
        kind, chunk, micro_batch = self._op
        late = 0.0
        if pad is not None:
            late = self._pad(pad, self._op, self._opened, self._waited)
            if self._beside is not None:
                late += self._pad(pad, (OpKind.B, *self._beside), self._page.clock.mark(), 0.0)
        end = self._page.clock.mark()
        waited = self._waited + late if self.timed_groups else NAN
        sheet = self._page.sheet
        sheet.ops.append((kind, chunk, micro_batch, self._opened, end, waited))
        if self._beside is not None:
            sheet.in_turns.append(len(sheet.ops))
            sheet.ops.append((OpKind.B, *self._beside, self._opened, end, waited))
        self._op, self._beside, self.timed_groups = None, None, ()
        if self._batch_came:
            self._page.sheet.spans.append((SpanKind.DATA, self._entered, self._batch_came))
        for tensor in tensors:
            self._transit.of_tensor[id(tensor)] = (chunk, micro_batch)

    def _pad(self, pad: PadOp, op: tuple[OpKind, int, int], started: float, waited: float) -> float:
        kind, chunk, micro_batch = op
        tokens, squares = self._page.sheet.workload.get(micro_batch, (NAN, NAN))
        return pad(kind, chunk, tokens, squares, started, waited)

    def note_parameters(self, since: float) -> None:
        """What the op under way needs of its parameters has come from other replicas: waiting, as for its group."""
        now = self._page.clock.mark()
        if self._page.clock.immediate:
            self._waited += now - since
        if self._page.clock.immediate or not self.tells_waits:
            return
        # Where not all waits of an op are timed, none can be told apart from its work.
        self.timed_groups = self.stage_groups
        self._page.sheet.waits.append((len(self._page.sheet.ops), since, now))

    def note_wait(self, since: float) -> None:
        """A collective of one of `timed_groups` is over."""
        now = self._page.clock.mark()
        if self._page.clock.immediate:
            if not (self.emulated and self._waited):
                self._waited += now - since
        else:
            self._page.sheet.waits.append((len(self._page.sheet.ops), since, now))
