# SPDX-License-Identifier: Apache-2.0
"""Programs made to measure: valid for any durations, within any limit that lets one micro-batch pass, and fast."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.pipeline.memory import peak_live_activations
from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.pipeline.program import ProgramError
from megatron_resihp.pipeline.schedules import one_f_one_b, zero_bubble_h1
from megatron_resihp.pipeline.search.bounds import makespan_lower_bound
from megatron_resihp.pipeline.search.list_scheduling import list_schedule
from megatron_resihp.pipeline.simulate import simulate

F, B, W = OpKind


def equal(stages: int, micro_batches: int, times: tuple[float, float, float]) -> np.ndarray:
    return np.broadcast_to(np.array(times)[:, np.newaxis, np.newaxis], (3, stages, micro_batches))


@given(st.integers(1, 4), st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 6), st.integers(0, 2**32))
def test_any_job_fits_into_any_limit_that_lets_one_micro_batch_pass(more, homes, micro_batches, seed):
    """Stages anywhere, some without layers, and micro-batches of any size, some of none."""
    generator = np.random.default_rng(seed)
    shape = (len(homes), micro_batches)
    durations = generator.exponential(1.0, (3, *shape)) * (generator.random((1, len(homes), 1)) < 0.8)
    transfers = generator.exponential(0.3, (2, len(homes) - 1, micro_batches))
    sizes, kept = generator.random((2, *shape))
    sizes[generator.random(shape) < 0.3] = 0.0
    alone = [sizes[np.array(homes) == device].sum(axis=0).max(initial=0.0) for device in range(max(homes) + 1)]
    limit = np.array(alone) * generator.uniform(1.0, more)
    program = list_schedule(homes, durations, transfers, limit, sizes, kept)
    assert np.all(peak_live_activations(program, sizes, kept) <= limit * (1 + 1e-6))
    makespan = simulate(program, durations, transfers).makespan
    assert makespan >= makespan_lower_bound(homes, durations, transfers, True) * (1 - 1e-12)


@given(st.integers(1, 6), st.integers(1, 12))
def test_finds_zb_h1_on_equal_stages_in_the_memory_of_1f1b(stages, micro_batches):
    durations = equal(stages, micro_batches, (1.0, 1.0, 1.0))
    memory = peak_live_activations(one_f_one_b(stages, micro_batches)).max()
    program = list_schedule(range(stages), durations, limit=memory)
    assert simulate(program, durations).makespan <= simulate(zero_bubble_h1(stages, micro_batches), durations).makespan


def test_twice_the_memory_leaves_only_what_no_program_can_avoid():
    durations = equal(8, 24, (1.0, 1.2, 0.8))
    makespan = simulate(list_schedule(range(8), durations, limit=16), durations).makespan
    assert makespan == pytest.approx(makespan_lower_bound(range(8), durations, splits_backward=True))


def test_a_stage_on_the_way_back_fills_the_way_there():
    """ZB-V (Qi et al., arXiv 2405.15362): two stages per device in a V need no more memory than 1F1B."""
    there_and_back = [0, 1, 2, 3, 3, 2, 1, 0]
    durations = equal(8, 12, (0.5, 0.5, 0.5))
    timeline = simulate(list_schedule(there_and_back, durations, limit=8.0), durations)
    straight = equal(4, 12, (1.0, 1.0, 1.0))
    assert timeline.makespan < simulate(zero_bubble_h1(4, 12), straight).makespan


def test_names_the_device_that_has_too_little_memory():
    with pytest.raises(ProgramError, match="device 1 needs 2 for one micro-batch; its limit is 1"):
        list_schedule([0, 1, 1], equal(3, 4, (1.0, 1.0, 1.0)), limit=1.0)


@pytest.mark.parametrize("wrong", [-1.0, np.nan])
def test_refuses_times_that_are_none(wrong):
    with pytest.raises(ValueError, match="durations must be finite"):
        list_schedule([0, 1], equal(2, 4, (1.0, wrong, 1.0)))
