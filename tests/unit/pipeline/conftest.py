# SPDX-License-Identifier: Apache-2.0
"""Programs that no schedule would make."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from megatron_resihp.pipeline.op import Op, OpKind
from megatron_resihp.pipeline.program import Program

F, B, W = OpKind


def needs(op: Op, stages: int) -> list[Op]:
    """The ops whose results `op` needs."""
    kind, stage, micro_batch = op
    if kind == F:
        return [Op(F, stage - 1, micro_batch)] if stage else []
    if kind == W:
        return [Op(B, stage, micro_batch)]
    above = [Op(B, stage + 1, micro_batch)] if stage < stages - 1 else []
    return [Op(F, stage, micro_batch), *above]


def draw_program(source: random.Random) -> Program:
    """Any program: stages anywhere, ops drawn one by one from those that can be run."""
    devices, stages, micro_batches = source.randint(1, 4), source.randint(1, 5), source.randint(1, 4)
    splits_backward = source.choice([False, True])
    homes = tuple(source.randrange(devices) for _ in range(stages))
    kinds = (F, B, W) if splits_backward else (F, B)
    left = [Op(kind, stage, m) for kind in kinds for stage in range(stages) for m in range(micro_batches)]
    orders: list[list[Op]] = [[] for _ in range(devices)]
    done: set[Op] = set()
    while left:
        op = source.choice([op for op in left if done.issuperset(needs(op, stages))])
        left.remove(op)
        done.add(op)
        orders[homes[op.stage]].append(op)
    return Program(tuple(map(tuple, orders)), homes, micro_batches, splits_backward)


@pytest.fixture(scope="session", name="draw_program")
def give_draw_program() -> Callable[[random.Random], Program]:
    return draw_program


@pytest.fixture(scope="session", name="needs")
def give_needs() -> Callable[[Op, int], list[Op]]:
    return needs
