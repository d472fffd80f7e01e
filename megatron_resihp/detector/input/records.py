# SPDX-License-Identifier: Apache-2.0
"""A worker's measurements of one iteration: its ops, transfers, workload and other spans of time.

Imports numpy. The probes that fill these records are in `integration`.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.pipeline.op import OpKind as OpKind  # the kinds of OP and TRANSFER


class SpanKind(IntEnum):
    """Other spans of a worker's time in an iteration, or between two iterations."""

    DATA = 0
    GRADIENT_SYNC = 1
    AGREEMENT = 2
    OPTIMIZER = 3
    GARBAGE_COLLECTION = 4
    EVALUATION = 5
    SAVE = 6
    VALIDATION = 7
    ABSENT = 8
    """The worker's process was stopped."""


OP: Final = np.dtype([
    ("kind", "u1"),
    ("chunk", "u1"),
    ("micro_batch", "u2"),
    ("start", "f8"),
    ("end", "f8"),
    ("waited", "f4"),
])  # fmt: skip
"""An op. `chunk`: index of the worker's own model chunk; `micro_batch`: index in the global batch; `start`, `end`:
seconds on the worker's monotonic clock; `waited`: seconds of it in tensor-parallel collectives, NaN if not timed."""

TRANSFER: Final = np.dtype([
    ("peer", "u4"),
    ("received", "u1"),
    ("kind", "u1"),
    ("chunk", "u1"),
    ("micro_batch", "u2"),
    ("posted", "f8"),
    ("done", "f8"),
    ("bytes", "f8"),
])  # fmt: skip
"""One side of a P2P transfer. `peer`: worker id; `received`: 1 on the receiver's side, 0 on the sender's; `kind`:
OpKind.F for activations, OpKind.B for their gradients; `posted`, `done`: seconds on the worker's monotonic clock."""

WORKLOAD: Final = np.dtype([("micro_batch", "u2"), ("tokens", "f8"), ("squares", "f8")])
"""What a micro-batch holds. `tokens`: N; `squares`: Σ l² over its packed documents (unpacked: N · sequence length)."""

SPAN: Final = np.dtype([("kind", "u1"), ("start", "f8"), ("end", "f8")])
"""A SpanKind with seconds on the worker's monotonic clock."""


@dataclass(frozen=True)
class IterationRecord:
    """One worker's measurements of one iteration.

    Attributes:
        epoch: the epoch in which the iteration was run.
        iteration: its number, from 1.
        worker: worker id.
        lost: records of earlier iterations that this worker dropped since the last one that it sent.
        start, end: seconds on the worker's monotonic clock.
        ops, transfers, workload, spans: arrays of OP, TRANSFER, WORKLOAD and SPAN.
    """

    epoch: int
    iteration: int
    worker: int
    lost: int
    start: float
    end: float
    ops: NDArray[np.void]
    transfers: NDArray[np.void]
    workload: NDArray[np.void]
    spans: NDArray[np.void]
