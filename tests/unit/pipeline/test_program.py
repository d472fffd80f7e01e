# SPDX-License-Identifier: Apache-2.0
"""What a program may not be: each broken rule is named with the op that breaks it."""

from __future__ import annotations

import pytest
from program_words import device_orders

from megatron_resihp.pipeline.op import Op, OpKind
from megatron_resihp.pipeline.program import Program, ProgramError

F, B, W = OpKind


def program(*orders: str, homes: tuple[int, ...], micro_batches: int = 1, splits_backward: bool = False) -> Program:
    """A program from lines like "F0.1 B0.1": kind, micro-batch, stage."""

    def op(word: str) -> Op:
        micro_batch, stage = word[1:].split(".")
        return Op(OpKind[word[0]], int(stage), int(micro_batch))

    ops = tuple(tuple(op(word) for word in line.split()) for line in orders)
    return Program(ops, homes, micro_batches, splits_backward)


def test_says_its_sizes_and_reads_as_lines():
    made = program("F0.0 F0.2 B0.2 B0.0", "F0.1 B0.1", homes=(0, 1, 0))
    assert (made.devices, made.stages, made.micro_batches) == (2, 3, 1)
    assert device_orders(made) == ["F0.0 F0.2 B0.2 B0.0", "F0.1 B0.1"]
    assert device_orders(program("F0.0 B0.0 W0.0", homes=(0,), splits_backward=True)) == ["F0 B0 W0"]


@pytest.mark.parametrize(
    ("orders", "options", "message"),
    [
        (["F0.0"], {"homes": (0,)}, "B of stage 0, micro-batch 0 stands 0 times"),
        (["F0.0 F0.0 B0.0"], {"homes": (0,)}, "F of stage 0, micro-batch 0 stands 2 times"),
        (["B0.0 F0.0"], {"homes": (0,)}, "B of stage 0, micro-batch 0 stands before its F"),
        (
            ["F0.0 W0.0 B0.0"],
            {"homes": (0,), "splits_backward": True},
            "W of stage 0, micro-batch 0 stands before its B",
        ),
        (["F0.0 B0.0 W0.0"], {"homes": (0,)}, r"\[2, 0, 0\] is outside of \[2, 1, 1\]"),
        (["F0.0 B0.0 F1.0 B1.0"], {"homes": (0,)}, r"\[0, 0, 1\] is outside"),
        (
            ["F0.0 B0.0 F0.1", "B0.1"],
            {"homes": (0, 1)},
            "F of stage 1, micro-batch 0 is on device 0; the stage is on dev",
        ),
        (["F0.0 B0.0"], {"homes": (1,)}, "stage 0 is on device 1; devices are 0 to 0"),
        ([], {"homes": ()}, "at least one device"),
        (["F0.0 B0.0"], {"homes": (0,), "micro_batches": 0}, "at least one device, one stage and one micro-batch"),
    ],
)
def test_refuses_an_impossible_program_by_name(orders, options, message):
    with pytest.raises(ProgramError, match=message):
        program(*orders, **options)


def test_names_an_op_of_a_circle():
    """Device 0 runs micro-batch 0's backward before micro-batch 1's forward, device 1 the other way round."""
    with pytest.raises(ProgramError, match=r"waits for B of stage 1, micro-batch 0.* in a circle"):
        program("F0.0 B0.0 F1.0 B1.0", "F0.1 F1.1 B0.1 B1.1", homes=(0, 1), micro_batches=2)
