# SPDX-License-Identifier: Apache-2.0
"""Which micro-benchmarks decide a suspicion, and what they say."""

import math

import pytest

from megatron_resihp.detector.validation import Suspicion, culprits, plan_validation

PAIR = Suspicion((4, 5), 0.2, 60, 63)


def test_only_suspects_and_their_links_are_measured():
    plan = plan_validation([PAIR], [(512, 1024, 256)], [(0, 4), (1, 5), (2, 6)], 1 << 20)
    assert plan.gemms[0].workers == (4, 5) and (plan.gemms[0].m, plan.gemms[0].n, plan.gemms[0].k) == (512, 1024, 256)
    assert [(each.sender, each.receiver) for each in plan.transfers] == [(0, 4), (1, 5)]


def test_without_suspicion_nothing_is_measured():
    plan = plan_validation([], [(1, 1, 1)], [(0, 1)], 1)
    assert plan.gemms == () and plan.transfers == ()


def test_the_slow_one_is_named_with_its_speed():
    assert culprits(PAIR, {4: [1.0, 1.0, 9.0], 5: [1.25, 1.25]}) == {5: pytest.approx(0.8)}


def test_both_are_named_when_both_are_slower_than_they_were():
    assert set(culprits(PAIR, {4: [1.3], 5: [1.25]}, healthy={4: 1.0, 5: 1.0})) == {4, 5}


def test_nobody_is_named_when_all_are_alike():
    assert culprits(PAIR, {4: [1.0], 5: [1.01]}) == {}


def test_bad_results_name_nobody():
    assert culprits(PAIR, {4: [], 5: [math.nan]}) == {}
    assert culprits(PAIR, {}) == {}


def test_who_was_slow_and_could_not_be_measured_stays_slow() -> None:
    suspicion = Suspicion((3, 0), 0.5, 90, 100, idle=True)
    assert culprits(suspicion, {3: [0.02], 0: [0.01]}) == {3: pytest.approx(0.5)}
    assert culprits(suspicion, {3: [0.01], 0: [0.01]}) == {}
    assert culprits(suspicion, {3: [], 0: [0.01]}) == culprits(suspicion, {3: [0.01], 0: []}) == {3: 0.5}
