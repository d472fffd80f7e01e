# SPDX-License-Identifier: Apache-2.0
"""Least squares where an iteration's measurements have noise in common: the textbook's solution is met."""

import numpy as np
import pytest

from megatron_resihp.cost.fitted.shared_noise import SharedNoise, summed

MEASUREMENTS = 12


def drawn(iterations: int, own: float, shared: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Columns, times near 1, and which were measured."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0.1, 1.0, (iterations, MEASUREMENTS, 3))
    x /= x.sum(axis=2, keepdims=True)
    noise = own * rng.standard_normal((iterations, MEASUREMENTS)) + shared * rng.standard_normal((iterations, 1))
    return x, 1 + noise, rng.random((iterations, MEASUREMENTS)) < 0.8


@pytest.mark.parametrize(("own", "shared"), [(0.01, 0.02), (0.03, 0.01), (0.01, 0.0)])
def test_moments_are_those_of_generalised_least_squares(own: float, shared: float) -> None:
    x, y, valid = drawn(2000, own, shared)
    noise = SharedNoise(0.02)
    seen = summed(x, y, valid)
    noise.learn(seen, 1.0)
    matrix, vector = noise.moments(seen)
    columns, times = x[0][valid[0]], y[0][valid[0]]
    covariance = own**2 * np.eye(len(times)) + shared**2
    weighted = own**2 * np.linalg.solve(covariance, columns).T
    assert matrix[0] == pytest.approx(weighted @ columns, rel=0.1, abs=1e-2)
    assert vector[0] == pytest.approx(weighted @ times, rel=0.1, abs=1e-2)


def test_nothing_measured_says_nothing() -> None:
    x, y, _ = drawn(3, 0.01, 0.02)
    noise = SharedNoise(0.02)
    seen = summed(x, y, np.zeros(y.shape, dtype=bool))
    noise.learn(seen, 0.9)
    matrix, vector = noise.moments(seen)
    assert not matrix.any() and not vector.any()
