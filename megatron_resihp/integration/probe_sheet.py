"""Notes of one iteration as they are taken, in arrays that are used again, and the record that they become.

Imports numpy, torch, `detector.records` and the probes' clock. Times are marks of the clock until the record is made.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_resihp.detector.records import OP, SPAN, TRANSFER, WORKLOAD, IterationRecord
from megatron_resihp.integration.probe_clock import Clock

FIRST_ROWS = 64

Workload = tuple[float, float]
"""N and Σ l² of a micro-batch."""


class Table:
    """Rows of a structured array that grows and is used again."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._rows = np.zeros(FIRST_ROWS, dtype)
        self.count = 0

    def add(self, row: tuple[Any, ...]) -> int:
        """Append a row; returns its index."""
        index = self.count
        if index == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        self._rows[index] = row
        self.count = index + 1
        return index

    def set(self, index: int, field: str, value: float) -> None:
        """Change one value."""
        self._rows[field][index] = value

    @property
    def rows(self) -> NDArray[np.void]:
        """A view of the rows in use."""
        return self._rows[: self.count]

    def clear(self) -> None:
        self.count = 0


WAIT = np.dtype([("op", "u4"), ("start", "f8"), ("end", "f8")])
"""Time in a collective. `op`: index of the row in `ops` that it belongs to."""


class Sheet:
    """One iteration's notes.

    Attributes:
        epoch, iteration: what they are of.
        start, end: host's monotonic seconds.
        ops, transfers: rows of OP and TRANSFER.
        waits: rows of WAIT; unused where marks are seconds and waiting is summed up at once.
        spans, marked_spans: rows of SPAN, in the host's seconds and in marks.
        workload: N and Σ l² by micro-batch, as numbers or as a tensor of the two.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.epoch = self.iteration = 0
        self.start = self.end = 0.0
        self.ops = Table(OP)
        self.transfers = Table(TRANSFER)
        self.waits = Table(WAIT)
        self.marked_spans = Table(SPAN)
        self.spans = Table(SPAN)
        self.workload: dict[int, Any] = {}

    def clear(self) -> None:
        """Forget everything."""
        self.clear_schedule()
        self.marked_spans.clear()
        self.spans.clear()
        self.clock.reset()

    def clear_schedule(self) -> None:
        """Forget the ops and what belongs to them."""
        for table in (self.ops, self.transfers, self.waits):
            table.clear()
        self.workload.clear()

    def record(self, worker: int) -> IterationRecord:
        """The notes as a record; every mark must have been reached."""
        ops, transfers = self.ops.rows.copy(), self.transfers.rows.copy()
        marked = self.marked_spans.rows.copy()
        if not self.clock.immediate:
            self._add_waits(ops)
            for rows, first, last in ((ops, "start", "end"), (transfers, "posted", "done"), (marked, "start", "end")):
                rows[first], rows[last] = self.clock.resolve(rows[first]), self.clock.resolve(rows[last])
        workload = np.zeros(len(self.workload), WORKLOAD)
        if self.workload:
            pairs = read_workload(list(self.workload.values()))
            workload["micro_batch"] = list(self.workload)
            workload["tokens"], workload["squares"] = np.array(pairs).T
        spans = np.concatenate([self.spans.rows, marked])
        return IterationRecord(
            self.epoch, self.iteration, worker, 0, self.start, self.end, ops, transfers, workload, spans
        )

    def _add_waits(self, ops: NDArray[np.void]) -> None:
        waits = self.waits.rows
        seconds = self.clock.resolve(waits["end"]) - self.clock.resolve(waits["start"])
        ops["waited"] += np.bincount(waits["op"], seconds, minlength=len(ops))


def read_workload(found: Sequence[Any]) -> list[Workload]:
    """Pairs of numbers, from such pairs or from tensors of two, which are copied from the device at once."""
    if found and isinstance(found[0], torch.Tensor):
        return [(tokens, squares) for tokens, squares in torch.stack(list(found)).tolist()]
    return list(found)
