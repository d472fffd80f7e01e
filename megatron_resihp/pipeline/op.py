# SPDX-License-Identifier: Apache-2.0
"""The smallest piece of work that a pipeline schedule orders. Imports only the standard library."""

from enum import IntEnum
from typing import NamedTuple


class OpKind(IntEnum):
    """F: forward. B: backward, or its input-gradient half if the program splits it. W: the weight-gradient half."""

    F = 0
    B = 1
    W = 2


class Op(NamedTuple):
    """One kind of work of one stage for one micro-batch.

    Attributes:
        kind: F, B or W.
        stage: global index of the (virtual) stage, in the order of the model's layers.
        micro_batch: index among the micro-batches that the pipeline runs in an iteration.
    """

    kind: OpKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{OpKind(self.kind).name} of stage {self.stage}, micro-batch {self.micro_batch}"
