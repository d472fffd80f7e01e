# SPDX-License-Identifier: Apache-2.0
"""Pipelines without data parallelism: each worker is alone in its stage, and its first iterations may be slow ones."""

import numpy as np

from megatron_resihp.detector.input.observations import IterationObservations, Layout
from megatron_resihp.detector.input.records import SpanKind
from megatron_resihp.detector.monitor import Monitor
from megatron_resihp.detector.verdict import Change, Verdict

STAGES, ITERATIONS = 4, 200


def verdicts_on(factor: np.ndarray) -> list[Verdict]:
    """Of a job whose stages take so many times as long, [iterations, stages]."""
    random = np.random.default_rng(0)
    workers, zero = np.arange(STAGES), np.zeros(STAGES, np.int64)
    monitor = Monitor(Layout(0, workers, zero, workers, zero, zero, np.zeros((0, 2), np.int64)), 0.01, ITERATIONS)
    unknown, found = np.full((STAGES, 1), np.nan), []
    for number, row in enumerate(factor * (1 + 0.02 * random.standard_normal(factor.shape)), 1):
        compute = np.full((STAGES, 3, 1, 1), np.nan)
        compute[:, 0, 0, 0] = row
        found += monitor.observe(IterationObservations(
            0, number, compute, np.full_like(compute, np.nan), unknown, unknown, np.zeros((0, 0)), np.zeros((0, 0)),
            np.zeros((STAGES, len(SpanKind))), row, np.ones(STAGES, bool),
        ))  # fmt: skip
    return found


def test_who_is_slow_from_early_in_warm_up_on_is_named_and_recovers() -> None:
    factor = np.ones((ITERATIONS, STAGES))
    factor[14:90, 2] *= 1.4
    onset, recovery = verdicts_on(factor)
    assert (onset.change, onset.workers, recovery.change, recovery.workers) == (
        Change.ONSET, (2,), Change.RECOVERY, (2,),
    )  # fmt: skip
    assert abs(onset.since - 15) <= 2
    assert 91 <= recovery.iteration <= 96


def test_who_became_faster_is_held_to_it() -> None:
    factor = np.ones((ITERATIONS, STAGES))
    factor[80:, 1] *= 0.8
    factor[130:, 1] *= 1.25
    (onset,) = verdicts_on(factor)
    assert (onset.change, onset.workers) == (Change.ONSET, (1,))
    assert 131 <= onset.iteration <= 136


def test_nobody_is_slow_in_a_healthy_pipeline() -> None:
    assert verdicts_on(np.ones((ITERATIONS, STAGES))) == []
