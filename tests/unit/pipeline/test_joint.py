# SPDX-License-Identifier: Apache-2.0
"""Pipelines that work for each other, against a slow and obvious reference."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.pipeline.joint import JointProgram, simulate_joint
from megatron_resihp.pipeline.op import Op, OpKind
from megatron_resihp.pipeline.program import ProgramError
from megatron_resihp.pipeline.schedules import one_f_one_b
from megatron_resihp.pipeline.simulate import simulate
from megatron_resihp.pipeline.times import Array

F, B, W = OpKind


def reference(program: JointProgram, durations: Array, transfers: Array) -> dict[Op, float]:
    """The end of each op: whatever it waits for is looked up until nothing changes."""
    home = {op: device for device, ops in enumerate(program.ops) for op in ops}
    before = {op: ops[at - 1] if at else None for ops in program.ops for at, op in enumerate(ops)}
    ends: dict[Op, float] = {}
    while len(ends) < len(home):
        for op, device in home.items():
            waits = [(before[op], 0.0)] if before[op] else []
            if op.kind is F and op.stage:
                waits.append((op._replace(stage=op.stage - 1), transfers[0, op.stage - 1, op.micro_batch]))
            if op.kind is B and op.stage < program.last_stage[op.micro_batch]:
                waits.append((op._replace(stage=op.stage + 1), transfers[1, op.stage, op.micro_batch]))
            if all(other in ends for other, _ in waits):
                arrivals = [ends[other] + (delay if home[other] != device else 0.0) for other, delay in waits]
                ends[op] = max(arrivals, default=0.0) + durations[op]
    return ends


@st.composite
def joint_programs(draw: st.DrawFn) -> JointProgram:
    """Replicas of unlike length, any device for each stage of each micro-batch, and an order that can be run."""
    lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    devices = draw(st.integers(1, 4))
    homes = {
        (stage, m): draw(st.integers(0, devices - 1)) for m, length in enumerate(lengths) for stage in range(length)
    }
    chains = [
        [Op(F, s, m) for s in range(length)] + [Op(kind, s, m) for s in reversed(range(length)) for kind in (B, W)]
        for m, length in enumerate(lengths)
    ]
    orders: list[list[Op]] = [[] for _ in range(devices)]
    while any(chains):
        waiting = [chain for chain in chains if chain]
        op = waiting[draw(st.integers(0, len(waiting) - 1))].pop(0)
        orders[homes[op.stage, op.micro_batch]].append(op)
    return JointProgram(tuple(map(tuple, orders)), tuple(length - 1 for length in lengths))


@given(joint_programs(), st.integers(0, 2**32 - 1))
def test_agrees_with_the_obvious_way(program: JointProgram, seed: int) -> None:
    random = np.random.default_rng(seed)
    durations = random.random(program.shape)
    transfers = random.random((2, program.stages - 1, program.micro_batches))
    timeline = simulate_joint(program, durations, transfers)
    ends = reference(program, durations, transfers)
    assert {op: timeline.end[op] for op in ends} == pytest.approx(ends)
    assert np.isfinite(timeline.end).sum() == len(ends)
    assert timeline.makespan == pytest.approx(max(ends.values()))
    assert timeline.finish == pytest.approx(
        [max(end for op, end in ends.items() if op.micro_batch == m) for m in range(program.micro_batches)]
    )


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_one_pipeline_alone_is_a_program(stages: int, micro_batches: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    program = one_f_one_b(stages, micro_batches)
    joint = JointProgram(program.ops, (stages - 1,) * micro_batches)
    durations, transfers = random.random(joint.shape), random.random((2, stages - 1, micro_batches))
    alone = simulate(program, durations, transfers)
    together = simulate_joint(joint, durations, transfers)
    np.testing.assert_array_equal(together.end[:2], alone.end[:2])
    assert together.makespan == alone.makespan


def test_a_program_that_cannot_be_run_is_refused() -> None:
    with pytest.raises(ProgramError, match="F of stage 0, micro-batch 0 stands twice"):
        JointProgram(((Op(F, 0, 0),), (Op(F, 0, 0),)), (0,))
    with pytest.raises(ProgramError, match="F of stage 1, micro-batch 0 waits for an op that isn't there"):
        JointProgram(((Op(F, 1, 0),),), (1,))
