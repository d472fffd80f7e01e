# SPDX-License-Identifier: Apache-2.0
"""What is taken for drift, and what for chance."""

import numpy as np
import pytest

from megatron_resihp.detector.judging.noise import HORIZON, Noise

WARM_UP = 30


def drift_beyond_the_level(noise: Noise) -> np.ndarray:
    """Drift without what is there because the level itself is uncertain."""
    return noise.drift - noise.variance / (WARM_UP - 1)


def test_white_noise_is_rarely_taken_for_drift() -> None:
    random = np.random.default_rng(0)
    found = [
        drift_beyond_the_level(Noise(0.03 * random.standard_normal((WARM_UP, 1, 4)), 0.06)).max() > 1e-9
        for _ in range(200)
    ]
    # 1.6 standard errors of a Gaussian are exceeded in 5 of 100 cases, and lags are tried together.
    assert np.mean(found) < 0.06


def test_a_drift_as_large_as_the_noise_is_found() -> None:
    random = np.random.default_rng(0)
    drift = np.cumsum(0.01 * random.standard_normal((300, 1, 4)), axis=0)
    found = Noise(drift - np.median(drift, axis=0) + 0.01 * random.standard_normal((300, 1, 4)), 1.0).drift
    assert (found > 0.1 * HORIZON * 0.01**2).all()


@pytest.mark.parametrize("period", [12, 17, 20, 24, 31, 48])
def test_a_device_that_is_faster_and_slower_by_turns_is_not_steady(period: int) -> None:
    """No lag of the variogram may be a period of all; cycles shorter than these mostly cancel in a mean."""
    random = np.random.default_rng(0)
    cycle = 0.04 * np.sin(2 * np.pi * np.arange(300) / period)[:, None, None]
    found = Noise(cycle + 0.005 * random.standard_normal((300, 1, 1)), 1.0)
    # The cycle's own variance is 8e-4.
    assert (found.variance + found.drift).min() > 7e-4
