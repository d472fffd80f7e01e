# SPDX-License-Identifier: Apache-2.0
"""No program beats the lower bound, and where the best program is known the bound is its makespan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.pipeline.program import Program
from megatron_resihp.pipeline.schedules import interleaved, one_f_one_b, zero_bubble_h1
from megatron_resihp.pipeline.search.bounds import makespan_lower_bound
from megatron_resihp.pipeline.simulate import simulate

F, B, W = OpKind
seeds = st.integers(0, 2**32)


def bound_and_makespan(
    program: Program, durations: np.ndarray, transfers: np.ndarray | float = 0.0
) -> tuple[float, float]:
    bound = makespan_lower_bound(program.device_of_stage, durations, transfers, program.splits_backward)
    return bound, simulate(program, durations, transfers).makespan


@given(random=st.randoms(use_true_random=False), seed=seeds)
def test_no_program_beats_it(draw_program, random, seed):
    program = draw_program(random)
    generator = np.random.default_rng(seed)
    durations = generator.exponential(1.0, (3, program.stages, program.micro_batches))
    transfers = generator.exponential(0.5, (2, program.stages - 1, program.micro_batches))
    bound, makespan = bound_and_makespan(program, durations, transfers)
    assert bound <= makespan * (1 + 1e-12)


@given(st.integers(1, 6), seeds)
def test_one_micro_batch_takes_its_critical_path(stages, seed):
    durations = np.random.default_rng(seed).random((3, stages, 1))
    bound, makespan = bound_and_makespan(one_f_one_b(stages, 1), durations, 0.3)
    assert bound == pytest.approx(makespan)
    assert bound == pytest.approx(durations[:2].sum() + 2 * (stages - 1) * 0.3)


@given(st.integers(1, 6), st.integers(1, 12), st.floats(0.1, 5), st.floats(0.1, 5))
def test_1f1b_on_equal_stages_is_the_best_without_split(stages, micro_batches, forward, backward):
    durations = np.empty((3, stages, micro_batches))
    durations[F], durations[B], durations[W] = forward, backward, np.nan
    bound, makespan = bound_and_makespan(one_f_one_b(stages, micro_batches), durations)
    assert bound == pytest.approx(makespan)


@pytest.mark.parametrize("program", [interleaved(4, 2, 8), zero_bubble_h1(4, 8)])
def test_never_below_head_work_and_tail_of_a_device(program):
    durations = np.random.default_rng(0).random((3, program.stages, program.micro_batches))
    kinds = len(program.kinds)
    bound, makespan = bound_and_makespan(program, durations)
    forward, backward = durations[F].cumsum(axis=0), durations[B].cumsum(axis=0)
    for device in range(program.devices):
        held = [stage for stage, home in enumerate(program.device_of_stage) if home == device]
        work = durations[:kinds, held].sum()
        head = min(forward[stage - 1].min() if stage else 0.0 for stage in held)
        tail = 0.0 if program.splits_backward else min(backward[stage - 1].min() if stage else 0.0 for stage in held)
        assert head + work + tail <= bound <= makespan


@pytest.mark.parametrize("wrong", [-1.0, np.nan, np.inf])
def test_refuses_times_that_are_none(wrong):
    durations = np.ones((3, 2, 2))
    durations[B, 1, 1] = wrong
    with pytest.raises(ValueError, match="durations must be finite"):
        makespan_lower_bound((0, 1), durations)
