# SPDX-License-Identifier: Apache-2.0
"""The order in which each device runs the ops of known schedules, and each stage those of a plan.

Imports only `plan` and this package's basic types, no compiler: training processes and the coordinator need it.
"""

from collections.abc import Sequence

from megatron_resihp.pipeline.errors import ProgramError
from megatron_resihp.pipeline.op import Op, OpKind
from megatron_resihp.plan import PlannedOp, Replica
from megatron_resihp.plan.microbatches import can_be_grouped
from megatron_resihp.plan.schedule import ZERO_BUBBLE

F, B, W = OpKind

Orders = tuple[tuple[Op, ...], ...]
"""The ops of each device, in the order in which it runs them."""


def one_f_one_b_orders(stages: int, micro_batches: int) -> Orders:
    """The ops of 1F1B, by device."""
    return tuple(tuple(_one_f_one_b_ops(stages, stage, micro_batches)) for stage in range(stages))


def _one_f_one_b_ops(stages: int, stage: int, micro_batches: int) -> list[Op]:
    forwards = [Op(F, stage, micro_batch) for micro_batch in range(micro_batches)]
    backwards = [Op(B, stage, micro_batch) for micro_batch in range(micro_batches)]
    return _one_by_one(forwards, backwards, warm_up=stages - stage - 1)


def _one_by_one(forwards: list[Op], backwards: list[Op], warm_up: int) -> list[Op]:
    """At most `warm_up` forwards, then one forward before each backward while forwards are left."""
    ops = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        ops += (forward, backward)
    return ops + backwards[len(forwards[warm_up:]) :]


def interleaved_orders(devices: int, chunks: int, micro_batches: int, group_size: int | None = None) -> Orders:
    """The ops of interleaved 1F1B, by device; arguments and errors as in `schedules.interleaved`."""
    if min(devices, chunks, micro_batches, 1 if group_size is None else group_size) < 1:
        sizes = f"{devices} devices, {chunks} chunks and {micro_batches} micro-batches in groups of {group_size}"
        raise ProgramError(f"no pipeline has {sizes}")
    if chunks == 1:
        return one_f_one_b_orders(devices, micro_batches)
    group = smallest_group(devices, micro_batches) if group_size is None else min(group_size, micro_batches)
    smallest = micro_batches % group or group
    if smallest < min(devices, micro_batches):
        raise ProgramError(f"a group of {smallest} micro-batches is smaller than the {devices} devices")
    turns = [
        (chunk, micro_batch)
        for first in range(0, micro_batches, group)
        for chunk in range(chunks)
        for micro_batch in range(first, min(first + group, micro_batches))
    ]

    def ops(device: int) -> list[Op]:
        forwards = [Op(F, chunk * devices + device, m) for chunk, m in turns]
        backwards = [Op(B, (chunks - 1 - chunk) * devices + device, m) for chunk, m in turns]
        return _one_by_one(forwards, backwards, warm_up=2 * (devices - device - 1) + (chunks - 1) * group)

    return tuple(tuple(ops(device)) for device in range(devices))


def group_for(devices: int, micro_batches: int, wanted: int) -> int:
    """How many micro-batches go together in an interleaved pipeline: as many as wanted if Megatron can run that, or
    else the smallest number with which it can. There are as many micro-batches as devices at least."""
    return wanted if can_be_grouped(devices, micro_batches, wanted) else smallest_group(devices, micro_batches)


def smallest_group(devices: int, micro_batches: int) -> int:
    """The smallest group of at least `devices` micro-batches that leaves no smaller group at the end."""
    sizes = range(devices, micro_batches)
    return next((size for size in sizes if micro_batches % size == 0 or micro_batches % size >= devices), micro_batches)


def zero_bubble_h1_orders(stages: int, micro_batches: int) -> Orders:
    """The ops of ZB-H1, by device."""

    def ops(stage: int) -> list[Op]:
        ordered: list[Op] = []
        for op in _one_f_one_b_ops(stages, stage, micro_batches):
            ordered.append(op)
            if op.kind is B and op.micro_batch >= stage:
                ordered.append(Op(W, stage, op.micro_batch - stage))
        held_back = range(max(micro_batches - stage, 0), micro_batches)
        return ordered + [Op(W, stage, micro_batch) for micro_batch in held_back]

    return tuple(tuple(ops(stage)) for stage in range(stages))


def orders_of(replica: Replica) -> tuple[tuple[PlannedOp, ...], ...]:
    """The ops of each stage of a replica, in order; faster than `planned.program_of`, as it checks nothing.

    Raises:
        ProgramError: no such program exists for this size.
    """
    schedule = replica.schedule
    if schedule is not None and schedule.orders:
        return schedule.orders
    stages, micro_batches = len(replica.stages), replica.micro_batches
    if schedule is not None and schedule.name == ZERO_BUBBLE:
        orders = zero_bubble_h1_orders(stages, len(micro_batches))
    else:
        group_size = schedule.group_size if schedule is not None else None
        chunks = len(replica.stage_of_chunk) // stages
        orders = interleaved_orders(stages, chunks, len(micro_batches), group_size)
    return planned_ops(orders, micro_batches)


def planned_ops(orders: Sequence[Sequence[Op]], micro_batches: Sequence[int]) -> tuple[tuple[PlannedOp, ...], ...]:
    """A program's ops as a plan lists them; `micro_batches` are the global-batch indices of 0, 1, …"""
    return tuple(
        tuple(PlannedOp(OpKind(op.kind).name, op.stage, micro_batches[op.micro_batch]) for op in ops) for ops in orders
    )
