# SPDX-License-Identifier: Apache-2.0
"""Programs in words, for tests to compare."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.pipeline.program import Program


def device_orders(program: Program) -> Sequence[str]:
    """One line per device for people: "F0 F1 B0 …", with the stage after a dot where a device holds several."""
    several = program.stages > program.devices
    return [
        " ".join(f"{OpKind(op.kind).name}{op.micro_batch}" + (f".{op.stage}" if several else "") for op in ops)
        for ops in program.ops
    ]
