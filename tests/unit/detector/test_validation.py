# SPDX-License-Identifier: Apache-2.0
"""Which micro-benchmarks decide a suspicion, and what they say."""

import math
from dataclasses import replace

import numpy as np
import pytest

from megatron_resihp.detector.validation import Suspicion, culprits, products
from megatron_resihp.protocol.notices import MatrixProduct

PAIR = Suspicion((4, 5), 0.2, 60, 63)


def test_only_suspects_are_measured():
    assert products([PAIR], [(512, 1024, 256)]) == (MatrixProduct((4, 5), 512, 1024, 256),)


def test_without_suspicion_nothing_is_measured():
    assert products([], [(1, 1, 1)]) == ()


def test_the_slow_one_is_named_with_its_speed():
    assert culprits(PAIR, {4: [1.0, 1.0, 9.0], 5: [1.25, 1.25]}) == {5: pytest.approx(0.8)}


def test_all_are_named_when_all_are_slower_than_a_healthy_worker():
    suspicion = replace(PAIR, reference=6)
    assert culprits(suspicion, {4: [1.25], 5: [1.3], 6: [1.0]}) == {4: pytest.approx(0.8), 5: pytest.approx(1 / 1.3)}
    assert culprits(suspicion, {4: [1.0], 5: [1.25], 6: [1.0]}) == {5: pytest.approx(0.8)}


def test_nobody_is_named_by_a_faster_device_alone():
    small = Suspicion((4, 5), 0.06, 60, 63, reference=6)
    assert culprits(small, {4: [1.0], 5: [1.0], 6: [0.96]}) == {}
    assert culprits(replace(PAIR, reference=6), {4: [1.13], 5: [1.08], 6: [1.0]}) == {}
    assert culprits(replace(PAIR, reference=6), {4: [1.3], 6: [1.0]}) == {}, "one of them was not measured"


def test_nobody_is_named_when_all_are_alike():
    assert culprits(PAIR, {4: [1.0], 5: [1.01]}) == {}


def test_bad_results_name_nobody():
    assert culprits(PAIR, {4: [], 5: [math.nan]}) == {}
    assert culprits(PAIR, {}) == {}


def test_who_was_slow_and_could_not_be_measured_stays_slow() -> None:
    suspicion = Suspicion((3,), 0.5, 90, 100, reference=0, idle=True)
    assert culprits(suspicion, {3: [0.02], 0: [0.01]}) == {3: pytest.approx(0.5)}
    assert culprits(suspicion, {3: [0.01], 0: [0.01]}) == {}
    assert culprits(suspicion, {3: [], 0: [0.01]}) == culprits(suspicion, {3: [0.01], 0: []}) == {3: 0.5}


@pytest.mark.parametrize("slowdown", [0.03, 0.045, 0.08, 0.15])
def test_healthy_devices_that_are_not_equally_fast_are_not_named(slowdown: float) -> None:
    """Their group may be slow for another reason, such as a drift of its experts' loads."""
    suspicion = Suspicion(tuple(range(8)), slowdown, 150, 152, reference=8)
    random = np.random.default_rng(0)
    devices = 1 + 0.01 * random.standard_normal((300, 9))
    named = [culprits(suspicion, {worker: [time] * 5 for worker, time in enumerate(row)}) for row in devices]
    assert not any(named)


def test_who_is_slower_than_one_fast_device_only_is_not_named() -> None:
    suspicion = Suspicion((4, 5, 6), 0.15, 60, 63, reference=7)
    assert culprits(suspicion, {4: [0.9], 5: [1.0], 6: [1.2], 7: [1.0]}) == {6: pytest.approx(0.75)}


def test_a_small_suspicion_names_only_who_is_much_slower() -> None:
    suspicion = Suspicion((4, 5), 0.045, 60, 63, reference=6)
    assert culprits(suspicion, {4: [1.0], 5: [1.06], 6: [1.0]}) == {}
    assert culprits(suspicion, {4: [1.0], 5: [1.2], 6: [1.0]}) == {5: pytest.approx(1 / 1.2)}
