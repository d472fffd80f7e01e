# SPDX-License-Identifier: Apache-2.0
"""Live activations, counted by hand and against a replay op by op."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.pipeline.memory import peak_live_activations
from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.pipeline.schedules import interleaved, one_f_one_b, zero_bubble_h1

F, B, W = OpKind


def test_weight_gradients_keep_their_share():
    program = zero_bubble_h1(4, 8)
    assert peak_live_activations(program, kept_until_w=1.0).tolist() == [4, 4, 4, 4]
    assert peak_live_activations(program, kept_until_w=0.0).tolist() == [4, 3, 2, 1]
    assert peak_live_activations(program, kept_until_w=0.5).tolist() == [4, 3.5, 3, 2.5]


def test_counts_in_what_is_given():
    sizes = np.array([10.0, 1.0])[:, np.newaxis]
    assert peak_live_activations(one_f_one_b(2, 4), sizes).tolist() == [20.0, 1.0]
    long_first = np.array([[9.0, 1.0, 1.0, 1.0]] * 2)
    assert peak_live_activations(one_f_one_b(2, 4), long_first).tolist() == [10.0, 9.0]


def test_interleaving_needs_more_than_1f1b():
    """Narayanan et al. (arXiv 2104.04473): warm-up 2 (p − 1) + (v − 1) p, and one more in the steady state."""
    assert peak_live_activations(interleaved(4, 2, 16)).tolist() == [11, 9, 7, 5]


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**32), st.booleans())
def test_agrees_with_a_replay(stages, micro_batches, seed, split):
    program = zero_bubble_h1(stages, micro_batches) if split else one_f_one_b(stages, micro_batches)
    generator = np.random.default_rng(seed)
    sizes, kept = generator.random((2, stages, micro_batches))
    peaks = []
    for ops in program.ops:
        live: dict[tuple[int, int], float] = {}
        peak = 0.0
        for kind, *cell in ops:
            key = (cell[0], cell[1])
            if kind == F:
                live[key] = sizes[key]
            elif kind == B and split:
                live[key] *= kept[key]
            else:
                del live[key]
            peak = max(peak, sum(live.values()))
        peaks.append(peak)
    np.testing.assert_allclose(peak_live_activations(program, sizes, kept), peaks)


@pytest.mark.parametrize(("size", "kept"), [(-1.0, 0.0), (1.0, 1.5), (1.0, -0.1), (np.nan, 0.0), (np.inf, 0.0)])
def test_refuses_sizes_and_shares_that_are_none(size, kept):
    with pytest.raises(ValueError, match="sizes must be finite and not negative"):
        peak_live_activations(one_f_one_b(2, 2), size, kept)
