# SPDX-License-Identifier: Apache-2.0
"""Noise: its sizes, and what has it in common."""

import numpy as np
import pytest

from megatron_resihp.lab.detection.noise import NOISES, Noise, op_factors, shared_factors

NODE = np.repeat(np.arange(8), 8)


@pytest.mark.parametrize("heavy_tailed", [False, True])
def test_noise_of_ops_has_the_stated_spread(heavy_tailed: bool) -> None:
    noise = Noise("op", op=0.03, heavy_tailed=heavy_tailed)
    factors = op_factors(noise, (300_000,), np.random.default_rng(1))
    assert factors.mean() == pytest.approx(1.0, abs=1e-3)
    assert factors.std() == pytest.approx(0.03, rel=0.1)
    far = np.mean(np.abs(factors - 1) > 0.15)  # five standard deviations
    assert far > 1e-3 if heavy_tailed else far < 1e-5


def test_workers_of_a_node_share_its_noise() -> None:
    factors = shared_factors(Noise("node", node=0.02), 500, NODE, np.random.default_rng(2))
    correlation = np.corrcoef(factors.T)
    assert correlation[0, 7] == pytest.approx(1.0)
    assert abs(correlation[0, 8]) < 0.2
    assert factors.std() == pytest.approx(0.02, rel=0.1)


def test_drift_is_stationary_and_slow() -> None:
    factors = shared_factors(Noise("drift", drift=0.005), 400, np.arange(2000), np.random.default_rng(3))
    assert factors[0].std() == pytest.approx(0.005, rel=0.1)
    assert factors[-1].std() == pytest.approx(0.005, rel=0.1)
    apart = np.corrcoef(factors[100], factors[200])[0, 1]
    assert apart == pytest.approx(np.exp(-1), abs=0.1)


def test_a_stall_lasts_as_long_as_stated_and_is_rare() -> None:
    noise = Noise("stalls", stall_rate=5e-4, stall_iterations=3)
    factors = shared_factors(noise, 300, np.arange(1000), np.random.default_rng(4))
    stalled = factors > 1
    assert stalled.mean() == pytest.approx(3 * 5e-4, rel=0.3)
    assert factors[stalled].min() >= 1.5 and factors.max() <= 3.0


def test_no_kind_of_noise_makes_an_op_much_too_fast() -> None:
    rng = np.random.default_rng(5)
    for noise in NOISES:
        assert op_factors(noise, (100_000,), rng).min() >= 0.5
        assert shared_factors(noise, 300, NODE, rng).min() >= 0.5
