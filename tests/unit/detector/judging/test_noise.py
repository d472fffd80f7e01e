# SPDX-License-Identifier: Apache-2.0
"""What is taken for drift, and what for chance."""

import numpy as np

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
    # 1.5 standard errors of a Gaussian are exceeded in 7 of 100 cases.
    assert np.mean(found) < 0.06


def test_a_drift_as_large_as_the_noise_is_found() -> None:
    random = np.random.default_rng(0)
    drift = np.cumsum(0.01 * random.standard_normal((300, 1, 4)), axis=0)
    found = Noise(drift - np.median(drift, axis=0) + 0.01 * random.standard_normal((300, 1, 4)), 1.0).drift
    assert (found > 0.1 * HORIZON * 0.01**2).all()
