# SPDX-License-Identifier: Apache-2.0
"""Programs in plans and back: what a replica's schedule says is the program that was meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.coding import decode
from megatron_resihp.pipeline.orders import orders_of
from megatron_resihp.pipeline.planned import explicit_schedule, program_of
from megatron_resihp.pipeline.program import ProgramError
from megatron_resihp.pipeline.schedules import interleaved, one_f_one_b, zero_bubble_h1
from megatron_resihp.plan import Chunk, Migration, ParallelPlan, Replica, Schedule

SIZE = st.integers(1, 4)


def replica(stages: int, chunks: int, micro_batches: tuple[int, ...], schedule: Schedule | None) -> Replica:
    members = tuple((stage,) for stage in range(stages))
    layers = tuple(Chunk(number % stages, number, number + 1) for number in range(stages * chunks))
    return Replica(members, micro_batches, layers, schedule)


@given(stages=SIZE, micro_batches=st.integers(1, 9))
def test_schedules_known_by_name(stages: int, micro_batches: int) -> None:
    indices = tuple(range(micro_batches))
    assert program_of(replica(stages, 1, indices, None)) == one_f_one_b(stages, micro_batches)
    assert program_of(replica(stages, 1, indices, Schedule("1f1b"))) == one_f_one_b(stages, micro_batches)
    zero_bubble = replica(stages, 1, indices, Schedule("zero-bubble-h1"))
    assert program_of(zero_bubble) == zero_bubble_h1(stages, micro_batches)
    twice = replica(stages, 2, indices, Schedule("interleaved"))
    assert program_of(twice) == program_of(replica(stages, 2, indices, None)) == interleaved(stages, 2, micro_batches)


@given(
    stages=SIZE, micro_batches=st.integers(1, 9), name=st.sampled_from([None, "1f1b", "zero-bubble-h1", "interleaved"])
)
def test_what_a_worker_runs_is_the_program(stages: int, micro_batches: int, name: str | None) -> None:
    indices = tuple(range(micro_batches))
    planned = replica(stages, 2 if name == "interleaved" else 1, indices, Schedule(name) if name else None)
    assert orders_of(planned) == explicit_schedule(program_of(planned), indices).orders


@given(stages=SIZE, chunks=st.integers(1, 3), micro_batches=st.integers(1, 6), first=st.integers(0, 1))
def test_any_program_comes_back_from_a_plan(stages: int, chunks: int, micro_batches: int, first: int) -> None:
    program = interleaved(stages, chunks, micro_batches)
    # Every other micro-batch of the global batch.
    indices = tuple(range(first, 2 * micro_batches, 2))
    others = tuple(range(1 - first, 2 * micro_batches, 2))
    here = replica(stages, chunks, indices, explicit_schedule(program, indices))
    there = Replica(tuple((stages + stage,) for stage in range(stages)), others, here.chunks)
    plan = ParallelPlan.from_dict(ParallelPlan((here, there)).to_dict())
    assert program_of(plan.replicas[0]) == program


def test_a_replica_that_runs_work_of_another_has_no_program_of_its_own() -> None:
    orders = {"name": "explicit", "orders": ["F1.0 B1.0 F0.0 B0.0"]}
    plan = ParallelPlan(
        (
            Replica(((),), (0,), schedule=decode(Schedule, {"name": "explicit", "orders": [""]})),
            Replica(((1,),), (1,), schedule=decode(Schedule, orders)),
        ),
        migrations=(Migration(0, 0, 1),),
    )
    with pytest.raises(ProgramError, match=r"F0\.0 is of another replica's micro-batch"):
        program_of(plan.replicas[1])
