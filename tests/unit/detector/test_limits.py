# SPDX-License-Identifier: Apache-2.0
"""How far healthy rows of a series may be apart: few rows next to those under test tell it best in quiet series."""

import numpy as np

from megatron_resihp.detector.series.limits import drift_and_noise
from megatron_resihp.detector.series.spread import WINDOWS, Noise


def limits(noise: float) -> tuple[np.ndarray, np.ndarray]:
    known = Noise()
    level = known.describe(noise * np.random.default_rng(0).standard_normal(96))
    return drift_and_noise(known, level, WINDOWS, 96, 1e-5)


def test_a_quiet_series_is_compared_with_the_rows_right_before() -> None:
    _, quiet = limits(0.01)
    _, noisy = limits(0.08)
    assert quiet.max() <= 24
    assert noisy.max() == 96
    assert (noisy > quiet).all()


def test_what_did_not_drift_for_long_is_allowed_less_drift() -> None:
    noise = Noise()
    level = noise.describe(0.01 * np.random.default_rng(0).standard_normal(96))
    before, _ = drift_and_noise(noise, level, WINDOWS, 96, 1e-5)
    noise.learn_differences(0.002 * np.random.default_rng(1).standard_normal((300, WINDOWS.size)))
    after, _ = drift_and_noise(noise, level, WINDOWS, 96, 1e-5)
    assert (after < before).all()
