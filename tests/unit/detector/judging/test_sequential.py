# SPDX-License-Identifier: Apache-2.0
"""The sequential test: its false-alarm rate on simulated noise, what a stall can do, and where a change began."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.detector.judging.noise import Noise
from megatron_resihp.detector.judging.sequential import (
    LONGEST,
    MEANS,
    RUNS,
    OnsetLimits,
    change_point,
    crossing,
    thresholds,
    window_probability,
)

SMALLEST = 0.025
FAMILIES, UNITS = 2, 40


def learned(residuals):
    return Noise(residuals - np.median(residuals, axis=0), smallest_clip=2 * SMALLEST)


def draw(kind, iterations, rng):
    shape = (iterations, FAMILIES, UNITS)
    if kind == "gaussian":
        return 0.02 * rng.standard_normal(shape)
    if kind == "student":
        return 0.02 / np.sqrt(3) * rng.standard_t(3, shape)
    stalled = rng.random(shape) < 0.002
    return 0.01 * rng.standard_normal(shape) + stalled * rng.uniform(0.4, 1.1, shape)


@pytest.mark.parametrize("kind", ["gaussian", "student", "stalls"])
def test_windows_alarm_no_more_often_than_stated(kind):
    rng = np.random.default_rng(3)
    noise = learned(draw(kind, 400, rng))
    alpha = 1e-4
    limits = thresholds(noise, alpha, 0.0, RUNS[0])
    alarms, trials = 0, 1500
    count = np.full((FAMILIES, UNITS), LONGEST)
    for _ in range(trials):
        alarms += int((crossing(draw(kind, LONGEST, rng), count, noise.clip, limits) > 0).sum())
    # Bonferroni over the windows; three standard deviations of a Poisson variable above it.
    expected = alpha * (len(RUNS) + len(MEANS)) * trials * FAMILIES * UNITS
    assert alarms <= expected + 3 * np.sqrt(expected)


def test_budget_is_shared_by_units_iterations_families_and_windows():
    alpha = window_probability(0.01, 300, 28)
    assert alpha * 300 * 28 * FAMILIES * (len(RUNS) + len(MEANS)) == pytest.approx(0.01)


def test_heavier_tails_raise_the_thresholds_of_short_runs():
    rng = np.random.default_rng(0)
    light, heavy = (
        thresholds(learned(draw(kind, 400, rng)), 1e-7, 0.0, 3).runs[0].mean() for kind in ("gaussian", "student")
    )
    assert heavy > light


def test_drift_raises_the_thresholds_of_long_windows():
    rng = np.random.default_rng(0)
    white = 0.005 * rng.standard_normal((200, FAMILIES, UNITS))
    walk = np.cumsum(0.001 * rng.standard_normal(white.shape), axis=0)
    steady, drifting = (thresholds(learned(each), 1e-7, 0.0, 3).means[-1].mean() for each in (white, white + walk))
    assert drifting > 2 * steady


@given(st.floats(0.03, 3.0), st.integers(0, LONGEST - 1), st.integers(0, 2**32 - 1))
def test_one_stalled_iteration_never_alarms(height, place, seed):
    rng = np.random.default_rng(seed)
    noise = learned(0.005 * rng.standard_normal((60, FAMILIES, UNITS)))
    residuals = 0.005 * np.clip(rng.standard_normal((LONGEST, FAMILIES, UNITS)), -3, 3)
    residuals[place] = height
    found = crossing(residuals, np.full((FAMILIES, UNITS), LONGEST), noise.clip, thresholds(noise, 1e-7, SMALLEST, 3))
    assert not found.any()


@given(st.floats(0.06, 2.0), st.floats(0.0, 2.0))
def test_a_worse_slowdown_is_not_found_in_a_longer_window(height, more):
    rng = np.random.default_rng(1)
    noise = learned(0.01 * rng.standard_normal((100, FAMILIES, UNITS)))
    limits = thresholds(noise, 1e-7, SMALLEST, 3)
    residuals, count = 0.01 * rng.standard_normal((LONGEST, FAMILIES, UNITS)), np.full((FAMILIES, UNITS), LONGEST)
    windows = []
    for step in (height, height + more):
        risen = residuals.copy()
        risen[:6] += step
        found = crossing(risen, count, noise.clip, limits)
        windows.append(np.where(found == 0, LONGEST + 1, found))
    assert (windows[1] <= windows[0]).all()


@given(st.integers(3, 25), st.floats(0.05, 2.0), st.integers(0, 2**32 - 1))
def test_change_point_is_where_the_mean_changed(length, level, seed):
    series = 0.004 * np.random.default_rng(seed).standard_normal(LONGEST)
    series[:length] += level
    assert abs(change_point(series) - length) <= 1


def test_a_unit_that_is_noisier_than_the_others_gets_its_own_variance():
    rng = np.random.default_rng(0)
    residuals = 0.01 * rng.standard_normal((100, FAMILIES, UNITS))
    residuals[..., 7] *= 4
    noise = learned(residuals)
    assert noise.variance[0, 7] > 5 * noise.variance[0, 8]


def test_runs_as_short_as_a_transient_that_was_seen_count_no_more():
    limits = OnsetLimits(SMALLEST, known=None)
    limits.budget(0.01, 1000, UNITS)
    noise = learned(draw("gaussian", 200, np.random.default_rng(5)))
    assert limits.due()
    limits.refresh(noise)
    assert not limits.due() and np.isfinite(limits.thresholds.runs[0]).all()
    limits.remember_transient(RUNS[0] - 1)
    assert limits.shortest_run == RUNS[0] and not limits.due()
    limits.remember_transient(RUNS[0])
    assert limits.due(), "the thresholds in force are those of before"
    limits.refresh(noise)
    assert np.isinf(limits.thresholds.runs[0]).all() and np.isfinite(limits.thresholds.runs[1]).all()
