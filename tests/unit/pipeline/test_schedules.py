# SPDX-License-Identifier: Apache-2.0
"""The programs of known schedules: their ops, how long they take and what they hold, by the published formulas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_words import device_orders

from megatron_resihp.pipeline.memory import peak_live_activations
from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.pipeline.program import ProgramError
from megatron_resihp.pipeline.schedules import interleaved, one_f_one_b, zero_bubble_h1
from megatron_resihp.pipeline.simulate import simulate

stages = st.integers(1, 7)
micro_batches = st.integers(1, 20)
times = st.floats(0.1, 10)


def by_kind(forward: float, backward: float, weights: float = 0.0) -> np.ndarray:
    return np.array([forward, backward, weights])[:, np.newaxis, np.newaxis]


def test_1f1b_looks_as_in_the_books():
    assert device_orders(one_f_one_b(3, 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@given(stages, micro_batches, times, times)
def test_1f1b_idles_for_one_forward_and_backward_per_other_stage(stages, micro_batches, forward, backward):
    program = one_f_one_b(stages, micro_batches)
    timeline = simulate(program, by_kind(forward, backward))
    np.testing.assert_allclose(timeline.bubble, (stages - 1) * (forward + backward), atol=1e-9)
    expected = [min(stages - stage, micro_batches) for stage in range(stages)]
    assert peak_live_activations(program).tolist() == expected


@given(stages, st.integers(1, 4), st.integers(1, 5), times, times)
def test_interleaving_divides_the_bubble_by_the_chunks(devices, chunks, groups, forward, backward):
    program = interleaved(devices, chunks, groups * devices)
    timeline = simulate(program, by_kind(forward / chunks, backward / chunks))
    np.testing.assert_allclose(timeline.bubble, (devices - 1) * (forward + backward) / chunks, atol=1e-9)


@given(stages, st.integers(1, 4), micro_batches)
def test_interleaving_runs_for_any_sizes(devices, chunks, micro_batches):
    program = interleaved(devices, chunks, micro_batches)
    assert program.stages == devices * chunks
    assert simulate(program, 1.0).makespan >= 2 * chunks * max(micro_batches, devices)


@given(stages, st.integers(2, 4), micro_batches, st.integers(1, 20))
def test_interleaving_runs_groups_that_are_no_smaller_than_the_pipeline(devices, chunks, micro_batches, group_size):
    group_size = min(group_size, micro_batches)
    if min(group_size, micro_batches % group_size or group_size) >= min(devices, micro_batches):
        assert interleaved(devices, chunks, micro_batches, group_size).micro_batches == micro_batches
    else:
        with pytest.raises(ProgramError, match="is smaller than the"):
            interleaved(devices, chunks, micro_batches, group_size)


@given(stages, st.integers(1, 30), times, times, times)
def test_zb_h1_idles_as_published(stages, extra, forward, backward, weights):
    """Table 1 of the paper, which takes T_W ≤ T_F and T_W ≤ T_B, and enough micro-batches for a steady state."""
    weights = min(forward, backward, weights)
    program = zero_bubble_h1(stages, 2 * stages + extra)
    timeline = simulate(program, by_kind(forward, backward, weights))
    expected = timeline.busy.max() + (stages - 1) * (forward + backward - weights)
    assert timeline.makespan == pytest.approx(expected)


@given(stages, micro_batches, st.floats(0, 1))
def test_zb_h1_never_holds_more_than_1f1b(stages, micro_batches, kept_until_w):
    held = peak_live_activations(zero_bubble_h1(stages, micro_batches), kept_until_w=kept_until_w).max()
    assert held <= peak_live_activations(one_f_one_b(stages, micro_batches)).max() + 1e-9


@given(stages, micro_batches, times, times, times)
def test_zb_h1_is_never_slower_than_1f1b(stages, micro_batches, forward, backward, weights):
    split = simulate(zero_bubble_h1(stages, micro_batches), by_kind(forward, backward, weights))
    fused = simulate(one_f_one_b(stages, micro_batches), by_kind(forward, backward + weights))
    assert split.makespan <= fused.makespan * (1 + 1e-12)


def test_zb_h1_holds_weight_gradients_back_by_the_stage():
    program = zero_bubble_h1(4, 8)
    for stage, ops in enumerate(program.ops):
        behind = [ops.index((OpKind.W, stage, m)) - ops.index((OpKind.B, stage, m + stage)) for m in range(8 - stage)]
        assert set(behind) == {1}


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (one_f_one_b, (0, 4)),
        (one_f_one_b, (4, 0)),
        (zero_bubble_h1, (0, 4)),
        (zero_bubble_h1, (4, 0)),
        (interleaved, (0, 2, 8)),
        (interleaved, (4, 0, 8)),
        (interleaved, (4, 2, 0)),
        (interleaved, (4, 2, 8, 0)),
    ],
)
def test_refuses_nothing_to_do(make, sizes):
    with pytest.raises(ProgramError):
        make(*sizes)
