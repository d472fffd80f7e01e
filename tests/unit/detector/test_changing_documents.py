# SPDX-License-Identifier: Apache-2.0
"""Jobs whose mix of documents changes while all workers of a node share their noise."""

import numpy as np
import pytest

from megatron_resihp.detector.judging.common_mode import Places
from megatron_resihp.detector.judging.tracker import Tracker
from megatron_resihp.detector.monitor import Monitor
from megatron_resihp.detector.verdict import Change
from megatron_resihp.lab.detection.draws import Purpose, draw_job
from megatron_resihp.lab.detection.noise import NOISES
from megatron_resihp.lab.detection.shapes import SHAPES


@pytest.mark.parametrize("index", [88, 400])
def test_noise_of_a_node_is_not_taken_for_the_cost_of_other_documents(index: int) -> None:
    noise = next(each for each in NOISES if each.name == "node")
    job = draw_job(Purpose.TUNING, 2, noise, SHAPES[0], index)
    monitor = Monitor(job.layout, 0.01, job.spec.iterations)
    assert [verdict for each in job.observations() for verdict in monitor.observe(each)] == []


def test_a_level_that_luck_made_look_high_is_no_recovery_when_luck_ends() -> None:
    """5 % slow, at first with three high residuals, then with three low ones."""
    rng = np.random.default_rng(0)
    units = Places(np.zeros(8, dtype=np.int64))
    history = 0.02 * rng.standard_normal((50, 8))
    tracker = Tracker(units, history, np.arange(50), 0.03, np.median(history, axis=0), np.zeros(8, dtype=bool))
    tracker.budget(0.01, 300, 8)
    residuals = np.zeros((20, 8))
    residuals[:3, 2], residuals[3:6, 2], residuals[6:, 2] = 0.09, 0.02, 0.05
    found = [finding for number, row in enumerate(residuals) for finding in tracker.update(row, 50 + number)]
    assert [(each.unit, each.change) for each in found] == [(2, Change.ONSET)]


def test_a_large_change_is_told_from_small_ones_just_before_it() -> None:
    """A link at 0.3 after two iterations a bit slow by chance: two residuals tell since when, and how slow."""
    rng = np.random.default_rng(0)
    units = Places(np.zeros(4, dtype=np.int64))
    history = 0.012 * rng.standard_normal((50, 4))
    tracker = Tracker(units, history, np.arange(50), 0.03, np.median(history, axis=0), np.zeros(4, dtype=bool))
    tracker.budget(0.01, 300, 4)
    residuals = np.zeros((12, 4))
    residuals[4, 1], residuals[5, 1], residuals[6:, 1] = 0.05, 0.03, -np.log(0.3)
    found = [finding for number, row in enumerate(residuals) for finding in tracker.update(row, 50 + number)]
    assert [(each.unit, each.change, each.since) for each in found] == [(1, Change.ONSET, 56)]
    assert abs(np.exp(-found[0].excess) - 0.3) < 0.03
