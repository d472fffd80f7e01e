# SPDX-License-Identifier: Apache-2.0
"""What workers share is taken out of residuals without hiding faults that several of them have."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.detector.judging.common_mode import job_level, peer_medians

values = st.lists(st.floats(-1, 1), min_size=1, max_size=40).map(np.array)


def test_a_shift_of_everybody_is_the_jobs():
    assert job_level(np.full(8, 0.3), np.ones(8, bool)) == 0.3


def test_half_of_the_workers_do_not_move_the_jobs_level():
    residuals = np.repeat([0.0, 0.2], 8)
    assert job_level(residuals, np.ones(16, bool)) == 0.0


def test_nobody_known_has_no_level():
    assert job_level(np.full(4, np.nan), np.zeros(4, bool)) == 0.0


@given(values)
def test_jobs_level_lies_between_the_quartiles_or_at_zero(residuals):
    level = job_level(residuals, np.ones(residuals.size, bool))
    lower, upper = np.quantile(residuals, 0.25, method="lower"), np.quantile(residuals, 0.75, method="higher")
    assert level == 0.0 or lower <= level <= upper


@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_peer_medians_are_medians_of_the_others(units, groups, seed):
    rng = np.random.default_rng(seed)
    residuals, usable = rng.standard_normal(units), rng.random(units) < 0.8
    group = rng.integers(0, groups, units)
    found = peer_medians(residuals, usable, group)
    for unit in range(units):
        others = usable & (group == group[unit]) & (np.arange(units) != unit)
        expected = np.median(residuals[others]) if others.sum() >= 3 else np.nan
        np.testing.assert_allclose(found[unit], expected)
