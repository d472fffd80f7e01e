# SPDX-License-Identifier: Apache-2.0
"""Workers that become faster than they were in warm-up, or in an epoch's first iterations: nobody is slow because of
them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_resihp.detector.input.observations import IterationObservations, Layout
from megatron_resihp.detector.input.records import OpKind, SpanKind
from megatron_resihp.detector.monitor import Monitor
from megatron_resihp.detector.verdict import Change, Verdict

ITERATIONS, FASTER_FROM, EPOCH_FROM = 260, 90, 150


def layout_of(replicas: int, stages: int, epoch: int = 0) -> Layout:
    workers = np.arange(replicas * stages)
    return Layout(
        epoch, workers, workers // stages, workers % stages, np.zeros_like(workers), workers // 8,
        np.zeros((0, 2), np.int64),
    )  # fmt: skip


def verdicts_on(layout: Layout, factor: np.ndarray, epoch_from: int = 10**9) -> list[Verdict]:
    """Of a job whose workers take so many times as long, [iterations, workers], with 1 % noise."""
    random = np.random.default_rng(1)
    monitor, size, found = Monitor(layout, 0.01, 2000), layout.workers.size, []
    unknown = np.full((size, 4), np.nan)
    for number, row in enumerate(factor, 1):
        if number == epoch_from:
            layout = replace(layout, epoch=1)
            monitor.change_layout(layout)
        compute = np.full((size, len(OpKind), 1, 4), np.nan)
        shared = np.exp(0.01 * random.standard_normal((size, 1, 1)))
        compute[:, :2, 0] = row[:, None, None] * shared * np.exp(0.01 * random.standard_normal((size, 2, 4)))
        found += monitor.observe(IterationObservations(
            layout.epoch, number, compute, np.full_like(compute, np.nan), unknown, unknown, np.zeros((0, 0)),
            np.zeros((0, 0)), np.zeros((size, len(SpanKind))), row, np.ones(size, bool),
        ))  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("replicas", "stages", "at_first", "factor"),
    [
        (8, 1, [0, 1, 2, 3], 1.04),
        (8, 1, [0, 1, 2, 3, 4], 1.08),
        (4, 4, [0, 1, 2, 3, 4], 1.08),
        (2, 4, [0, 1, 2, 4, 5, 6, 7], 1.06),
        (2, 4, [0, 1, 2, 4], 1.15),
        (2, 1, [0], 1.3),
    ],
)
def test_nobody_is_slow_because_others_that_began_slow_became_normal(
    replicas: int, stages: int, at_first: list[int], factor: float
) -> None:
    factors = np.ones((ITERATIONS, replicas * stages))
    factors[: FASTER_FROM - 1, at_first] = factor
    assert verdicts_on(layout_of(replicas, stages), factors) == []


@pytest.mark.parametrize("stages", [[2, 3], [1, 2, 3], [3]])
def test_nobody_is_slow_because_other_stages_began_an_epoch_slowly(stages: list[int]) -> None:
    layout = layout_of(2, 4)
    factors = np.ones((ITERATIONS, 8))
    factors[EPOCH_FROM - 1 : EPOCH_FROM + 18, np.isin(layout.stage, stages)] = 1.06
    assert verdicts_on(layout, factors, EPOCH_FROM) == []


@pytest.mark.parametrize(("stages", "faster"), [(4, [1, 5, 9]), (2, [0, 2, 4])])
def test_nobody_is_slow_because_the_others_of_its_stage_became_faster(stages: int, faster: list[int]) -> None:
    factors = np.ones((ITERATIONS, 4 * stages))
    factors[FASTER_FROM - 1 :, faster] = 1 / 1.1
    assert verdicts_on(layout_of(4, stages), factors) == []


def test_who_became_faster_may_return_to_its_usual_speed() -> None:
    factors = np.ones((ITERATIONS, 8))
    factors[FASTER_FROM - 1 : 170, :4] = 1 / 1.06
    assert verdicts_on(layout_of(8, 1), factors) == []


@pytest.mark.parametrize("slow", [1 / 0.95, 1 / 0.9])
def test_who_becomes_slow_beside_faster_ones_is_named_at_once(slow: float) -> None:
    factors = np.ones((ITERATIONS, 16))
    factors[: FASTER_FROM - 1, :5] = 1.08
    factors[139:, 7] = slow
    (onset,) = verdicts_on(layout_of(4, 4), factors)
    assert (onset.change, onset.workers) == (Change.ONSET, (7,))
    assert 140 <= onset.iteration <= 145


def test_who_becomes_slow_after_the_whole_job_became_faster_is_named() -> None:
    factors = np.ones((ITERATIONS, 8))
    factors[: FASTER_FROM - 1] = 1.08
    factors[169:, 7] = 1 / 0.93
    (onset,) = verdicts_on(layout_of(4, 2), factors)
    assert onset.workers == (7,) and abs(onset.speed - 0.93) < 0.03
    assert 170 <= onset.iteration <= 180


def test_an_epoch_is_not_scaled_by_workers_that_became_faster() -> None:
    factors = np.ones((ITERATIONS, 8))
    factors[: FASTER_FROM - 1, :4] = 1.08
    assert verdicts_on(layout_of(8, 1), factors, EPOCH_FROM) == []


def test_of_two_workers_the_slow_one_is_told_with_its_speed() -> None:
    factors = np.ones((ITERATIONS, 2))
    factors[FASTER_FROM - 1 :, 0] = 1 / 0.7
    (onset,) = verdicts_on(layout_of(2, 1), factors)
    assert onset.workers == (0,) and abs(onset.speed - 0.7) < 0.01
