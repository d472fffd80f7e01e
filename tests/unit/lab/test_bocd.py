# SPDX-License-Identifier: Apache-2.0
"""Bayesian online change-point detection."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.lab.baselines.bocd import ChangePointFilter, Prior


@given(st.lists(st.floats(0.2, 5.0), min_size=1, max_size=40))
def test_run_lengths_are_a_distribution_whatever_comes(values: list[float]) -> None:
    filter_ = ChangePointFilter(Prior())
    for value in values:
        filter_.update(value)
    assert filter_.run_length.shape == (len(values) + 1,)
    assert filter_.run_length.sum() == pytest.approx(1.0)


def test_a_run_length_of_zero_is_as_likely_as_the_hazard_at_any_time() -> None:
    filter_ = ChangePointFilter(Prior(hazard=0.01))
    for value in (1.0, 1.01, 0.99, 2.0, 2.01):
        filter_.update(value)
        assert filter_.run_length[0] == pytest.approx(0.01)


def test_the_likeliest_run_began_at_the_change() -> None:
    rng = np.random.default_rng(1)
    filter_ = ChangePointFilter(Prior())
    for value in np.concatenate([np.full(60, 1.0), np.full(7, 1.3)]) + 0.01 * rng.standard_normal(67):
        filter_.update(value)
    assert filter_.run_length.argmax() == 7
    assert filter_.run_length[:11].sum() > 0.9
