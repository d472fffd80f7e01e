# SPDX-License-Identifier: Apache-2.0
"""Converts a plan's schedules to and from programs. Imports `plan` and this package."""

from collections.abc import Sequence
from functools import lru_cache

from megatron_resihp.pipeline.joint import JointProgram
from megatron_resihp.pipeline.op import Op, OpKind
from megatron_resihp.pipeline.orders import planned_ops
from megatron_resihp.pipeline.program import Program, ProgramError
from megatron_resihp.pipeline.schedules import interleaved, zero_bubble_h1
from megatron_resihp.plan import Replica, Schedule
from megatron_resihp.plan.schedule import EXPLICIT, ZERO_BUBBLE


def program_of(replica: Replica) -> Program:
    """The program of a replica: its chunks are the stages, and its own micro-batches count from 0.

    The job's own schedule counts as 1F1B, or as interleaved 1F1B if a stage has several chunks.

    Raises:
        ProgramError: the replica takes part in migrations, so its ops alone form no program.
    """
    schedule, homes = replica.schedule, replica.stage_of_chunk
    if schedule is None or schedule.name != EXPLICIT:
        return known_program(schedule, len(replica.stages), len(homes), len(replica.micro_batches))
    return _explicit_program(schedule, homes, tuple(replica.micro_batches))


@lru_cache(maxsize=256)
def _explicit_program(schedule: Schedule, homes: tuple[int, ...], micro_batches: tuple[int, ...]) -> Program:
    local = {micro_batch: number for number, micro_batch in enumerate(micro_batches)}
    foreign = next((op for order in schedule.orders for op in order if op.micro_batch not in local), None)
    if foreign is not None:
        raise ProgramError(f"{foreign} is of another replica's micro-batch; its ops alone make no program")
    orders = tuple(
        tuple(Op(OpKind[op.kind], op.chunk, local[op.micro_batch]) for op in order) for order in schedule.orders
    )
    return Program(orders, homes, len(local), schedule.splits_backward)


def joint_program_of(replicas: Sequence[Replica]) -> JointProgram:
    """The program of replicas that take part in migrations and list their ops.

    Devices are the stages, replica after replica; micro-batches are numbered across the replicas in their order.

    Raises:
        ProgramError: a replica does not list its ops, or lists an op of a micro-batch of no replica here.
    """
    indices = [micro_batch for replica in replicas for micro_batch in replica.micro_batches]
    local = {micro_batch: number for number, micro_batch in enumerate(indices)}
    devices = []
    for replica in replicas:
        if replica.schedule is None or not replica.schedule.orders:
            raise ProgramError("a replica that takes part in migrations doesn't list its ops")
        for order in replica.schedule.orders:
            foreign = next((op for op in order if op.micro_batch not in local), None)
            if foreign is not None:
                raise ProgramError(f"{foreign} is of a micro-batch of none of these replicas")
            devices.append([Op(OpKind[op.kind], op.chunk, local[op.micro_batch]) for op in order])
    last = (len(replica.stage_of_chunk) - 1 for replica in replicas for _ in replica.micro_batches)
    return JointProgram(tuple(devices), tuple(last))


@lru_cache(maxsize=256)
def known_program(schedule: Schedule | None, stages: int, chunks: int, micro_batches: int) -> Program:
    """The program of a schedule known by name, or of the job's own (None).

    Raises:
        ProgramError: no such program exists for this size.
    """
    if schedule is not None and schedule.name == ZERO_BUBBLE:
        return zero_bubble_h1(stages, micro_batches)
    group_size = schedule.group_size if schedule is not None else None
    return interleaved(stages, chunks // stages, micro_batches, group_size)


def explicit_schedule(program: Program, micro_batches: Sequence[int]) -> Schedule:
    """A program as a schedule for a plan; `micro_batches` are the global-batch indices of micro-batches 0, 1, …"""
    return Schedule(EXPLICIT, orders=planned_ops(program.ops, micro_batches))
