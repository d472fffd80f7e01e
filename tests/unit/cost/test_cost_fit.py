# SPDX-License-Identifier: Apache-2.0
"""Fits of T = αN + βΣl² + γ: exact where they can be, robust, never negative, silent about what they cannot know."""

import time
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.cost.fitted.fit import LONG, Finding, fit, masked_median, nonnegative_least_squares

ALPHA, BETA, GAMMA = 1e-6, 3e-10, 2e-3


def documents(samples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.uniform(1e3, 8e3, samples), random.uniform(1e6, 3e7, samples)


@given(st.floats(1e-8, 1e-4), st.floats(0, 1e-8), st.floats(0, 1.0), st.integers(0, 1000))
def test_noiseless_coefficients_are_found(alpha: float, beta: float, gamma: float, seed: int) -> None:
    tokens, squares = documents(60, seed)
    found = fit(tokens, squares, alpha * tokens + beta * squares + gamma)
    other_tokens, other_squares = documents(20, seed + 1)
    expected = alpha * other_tokens + beta * other_squares + gamma
    if found.informative:
        # A coefficient that explains next to nothing of what was measured is left out; it may show elsewhere.
        assert found.predict(other_tokens, other_squares) == pytest.approx(expected, rel=3e-4)
    else:  # gamma is so large that the workload moves the duration by less than rounding
        assert found.gamma == pytest.approx(gamma, rel=0.05)


@given(st.integers(0, 10_000), st.floats(0.3, 3.0))
def test_coefficients_are_never_negative(seed: int, noise: float) -> None:
    tokens, squares = documents(30, seed)
    seconds = ALPHA * tokens * np.exp(noise * np.random.default_rng(seed).standard_normal(30))
    found = fit(tokens, squares, seconds)
    assert min(found.alpha, found.beta, found.gamma) >= 0


def test_stalls_do_not_bend_the_fit() -> None:
    tokens, squares = documents(400)
    healthy = ALPHA * tokens + BETA * squares + GAMMA
    random = np.random.default_rng(1)
    seconds = healthy * (1 + 0.02 * random.standard_normal(400))
    seconds[::10] *= 3
    found = fit(tokens, squares, seconds)
    assert np.abs(found.predict(tokens, squares) / healthy - 1).max() < 0.01
    assert found.noise == pytest.approx(0.02, rel=0.3)


def test_groups_are_fitted_each_on_its_own() -> None:
    tokens, squares = documents(100)
    first, second = ALPHA * tokens + GAMMA, BETA * squares + GAMMA
    together = fit(tokens, squares, np.stack([first, second]))
    for row, seconds in enumerate((first, second)):
        alone = fit(tokens, squares, seconds)
        assert together.alpha[row] == pytest.approx(alone.alpha)
        assert together.beta[row] == pytest.approx(alone.beta)


def test_how_many_groups_are_fitted_at_once_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    shape = (5, 3, 400)
    tokens, squares = random.uniform(1e3, 8e3, shape), random.uniform(1e6, 3e7, shape)
    seconds = (ALPHA * tokens + BETA * squares) * random.normal(1.0, 0.03, shape)
    seconds[random.random(shape) < 0.1] = np.nan
    seconds[1] = np.nan
    together = fit(tokens, squares, seconds)
    monkeypatch.setattr("megatron_resihp.cost.fitted.fit.AT_ONCE", 1000)
    for name, values in vars(fit(tokens, squares, seconds)).items():
        np.testing.assert_array_equal(values, getattr(together, name))


@pytest.mark.parametrize("count", [LONG - 1, LONG, LONG + 1])
def test_medians_of_many_measurements_are_exact(count: int) -> None:
    random = np.random.default_rng(0)
    values, valid = random.standard_normal((4, count)), random.random((4, count)) < 0.5
    valid[2], valid[3] = False, True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a row without values
        expected = np.nanmedian(np.where(valid, values, np.nan), axis=1)
    np.testing.assert_array_equal(masked_median(values, valid), expected)


def test_micro_batches_all_alike_give_a_level_and_say_so() -> None:
    random = np.random.default_rng(0)
    seconds = 0.01 * (1 + 0.02 * random.standard_normal(200))
    found = fit(np.full(200, 4096.0), np.full(200, 4096.0**2), seconds)
    assert not found.informative
    assert found.finding == Finding.ALIKE
    assert (found.alpha, found.beta) == (0, 0)
    assert found.gamma == pytest.approx(0.01, rel=0.01)
    assert "alike" in str(Finding(int(found.finding)))


def test_constant_tokens_still_tell_what_squares_cost() -> None:
    _, squares = documents(200)
    found = fit(np.full(200, 8192.0), squares, 8192 * ALPHA + BETA * squares + GAMMA)
    assert found.finding == Finding.FITTED
    assert found.beta == pytest.approx(BETA, rel=1e-6)
    assert found.gamma == 0
    assert found.alpha * 8192 == pytest.approx(8192 * ALPHA + GAMMA, rel=1e-6)


def test_squares_that_follow_from_tokens_are_called_collinear() -> None:
    tokens, _ = documents(200)
    found = fit(tokens, tokens * 4096, ALPHA * tokens + BETA * tokens * 4096 + GAMMA)
    assert found.finding == Finding.COLLINEAR
    assert found.informative
    assert found.predict(tokens, tokens * 4096) == pytest.approx(ALPHA * tokens + BETA * tokens * 4096 + GAMMA)


def test_times_that_do_not_follow_the_workload_give_a_level() -> None:
    tokens, squares = documents(200)
    seconds = 0.01 * (1 + 0.02 * np.random.default_rng(3).standard_normal(200))
    found = fit(tokens, squares, seconds)
    assert found.finding == Finding.UNRELATED
    assert found.gamma == pytest.approx(0.01, rel=0.01)


def test_damaged_measurements_are_left_out() -> None:
    tokens, squares = documents(100)
    seconds = ALPHA * tokens + BETA * squares + GAMMA
    seconds[:4] = np.nan, np.inf, -1.0, 0.0
    tokens[4] = np.nan
    found = fit(tokens, squares, seconds)
    assert found.samples == 95
    assert found.alpha == pytest.approx(ALPHA, rel=1e-6)


def test_nothing_measured_gives_no_number() -> None:
    found = fit(np.zeros((2, 0)), np.zeros((2, 0)), np.zeros((2, 0)))
    assert np.isnan(found.gamma).all()
    assert (found.finding == Finding.TOO_FEW).all()


def test_columns_that_rounding_makes_singular_do_not_end_the_fit() -> None:
    matrix = np.ones((1, 3, 3))
    matrix[0, 0, 2] = matrix[0, 2, 0] = 1 + 1e-13  # more than perfectly correlated
    only_constant = np.array([[False, False, True]])
    assert nonnegative_least_squares(matrix, np.full((1, 3), 2.0), only_constant) == pytest.approx(
        np.array([[0.0, 0.0, 2.0]])
    )


def test_a_warm_up_of_256_workers_is_fitted_quickly() -> None:
    random = np.random.default_rng(0)
    shape = (512, 400)  # workers × (F, B), 50 iterations × 8 micro-batches
    squares = random.uniform(1e6, 3e7, shape)
    seconds = (8e-3 + BETA * squares) * (1 + 0.03 * random.standard_normal(shape))
    began = time.process_time()
    fit(np.full(shape, 8192.0), squares, seconds)
    assert time.process_time() - began < 1.0
