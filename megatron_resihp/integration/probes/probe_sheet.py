# SPDX-License-Identifier: Apache-2.0
"""Notes of one iteration as they are taken, in plain lists, and the record that is made of them later.

Times are marks of the clock. Making the record costs more than taking the notes: where marks are seconds already it is
left to the thread that sends it. Imports numpy, torch, `detector.input.records` and the probes' clock.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_resihp.detector.input.records import OP, SPAN, TRANSFER, WORKLOAD, IterationRecord, SpanKind
from megatron_resihp.integration.probes.probe_clock import Clock

Workload = tuple[float, float]
"""N and Σ l² of a micro-batch."""

PEER, RECEIVED, CHUNK, MICRO_BATCH, POSTED, DONE, BYTES = map(
    TRANSFER.names.index,  # type: ignore[union-attr]
    ("peer", "received", "chunk", "micro_batch", "posted", "done", "bytes"),
)
"""Places in a row of `Sheet.transfers`."""

SHARE_OF_FORWARD: Final = 1 / 3
"""Of the time of two ops that were run in turns: a backward pass has about twice the work of a forward pass."""


class Sheet:
    """One iteration's notes.

    Args:
        clock: where the marks come from.
        worker, epoch, iteration: what the notes are of.

    Attributes:
        start, end: host's monotonic seconds.
        in_turns: indices of backward ops that were run in turns with the forward op before them: neither's own time can
            be told, so both rows have the time of both.
        ops, transfers, spans: rows as in OP, TRANSFER and SPAN; those of transfers are lists, to be completed.
        marked_spans: spans in marks, where `spans` are in the host's seconds.
        waits: time in collectives, (index of the op, start, end); unused where it is summed up at once.
        workload: N and Σ l² by micro-batch, as numbers or as a tensor of the two.
    """

    def __init__(self, clock: Clock, worker: int, epoch: int = 0, iteration: int = 0) -> None:
        self.clock = clock
        self.worker, self.epoch, self.iteration = worker, epoch, iteration
        self.start = self.end = 0.0
        self.ops: list[tuple[Any, ...]] = []
        self.in_turns: list[int] = []
        self.transfers: list[list[Any]] = []
        self.waits: list[tuple[int, float, float]] = []
        self.spans: list[tuple[int, float, float]] = []
        self.marked_spans: list[tuple[int, float, float]] = []
        self.workload: dict[int, Any] = {}
        self._record: IterationRecord | None = None

    def fetch(self) -> None:
        """Copy from the device what is there, all at once; it must have been reached."""
        if self.workload:
            self.workload = dict(zip(self.workload, _numbers(list(self.workload.values())), strict=True))

    def record(self) -> IterationRecord:
        """The notes as a record; every mark must have been reached. Made once, no notes may be taken afterwards."""
        if self._record is None:
            self._record = self._make_record()
        return self._record

    def _make_record(self) -> IterationRecord:
        ops = np.array(self.ops, OP)
        transfers = np.array([tuple(row) for row in self.transfers], TRANSFER)
        marked = np.array(self.marked_spans, SPAN)
        if not self.clock.immediate:
            self._add_waits(ops)
            for rows, first, last in ((ops, "start", "end"), (transfers, "posted", "done"), (marked, "start", "end")):
                rows[first], rows[last] = self.clock.resolve(rows[first]), self.clock.resolve(rows[last])
        _share_out(ops, np.array(self.in_turns, np.int64))
        workload = np.zeros(len(self.workload), WORKLOAD)
        if self.workload:
            workload["micro_batch"] = list(self.workload)
            workload["tokens"], workload["squares"] = np.array(_numbers(list(self.workload.values()))).T
        spans = np.concatenate([np.array(self.spans, SPAN), marked])
        return IterationRecord(
            self.epoch, self.iteration, self.worker, 0, self.start, self.end, ops, transfers, workload, spans
        )

    def _add_waits(self, ops: NDArray[np.void]) -> None:
        numbers = np.array([op for op, _, _ in self.waits], np.int64)
        marks = np.array([wait[1:] for wait in self.waits], np.float64).reshape(-1, 2)
        seconds = self.clock.resolve(marks[:, 1]) - self.clock.resolve(marks[:, 0])
        ops["waited"] += np.bincount(numbers, seconds, minlength=len(ops))[: len(ops)]


def _share_out(ops: NDArray[np.void], backwards: NDArray[np.int64]) -> None:
    """Give each of two ops that were run in turns its share of their time, one after the other."""
    forwards = backwards - 1
    start, end, waited = (ops[name][forwards] for name in ("start", "end", "waited"))
    ops["end"][forwards] = ops["start"][backwards] = start + SHARE_OF_FORWARD * (end - start)
    ops["waited"][forwards] = SHARE_OF_FORWARD * waited
    ops["waited"][backwards] = (1 - SHARE_OF_FORWARD) * waited


def with_absences(record: IterationRecord, absences: Sequence[tuple[float, float]]) -> IterationRecord:
    """The record with when its worker's process was stopped; it has not noticed that itself."""
    if not absences:
        return record
    spans = np.array([(SpanKind.ABSENT, start, end) for start, end in absences], SPAN)
    return replace(record, spans=np.concatenate([record.spans, spans]))


def _numbers(found: Sequence[Any]) -> list[Workload]:
    """Pairs of numbers, from such pairs or from tensors of two, which are copied from the device at once."""
    if isinstance(found[0], torch.Tensor):
        return [(tokens, squares) for tokens, squares in torch.stack(list(found)).tolist()]
    return list(found)
