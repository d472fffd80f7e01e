# SPDX-License-Identifier: Apache-2.0
"""Predicted iterations: the simulator's makespan of predicted ops, plus what is beside the pipeline."""

from typing import Any

import numpy as np
import pytest

from megatron_resihp.detector.input.layout import layout_of
from megatron_resihp.detector.input.observations import IterationObservations, Layout, stacked
from megatron_resihp.detector.input.records import SpanKind
from megatron_resihp.detector.judging.prediction import Prediction, mape
from megatron_resihp.pipeline.schedules import one_f_one_b, zero_bubble_h1
from megatron_resihp.pipeline.simulate import simulate
from megatron_resihp.plan.parallel_plan import ParallelPlan, Replica

MICRO_BATCHES, HOP, SYNC, STEP, REST = 4, 0.002, 0.03, 0.01, 0.005
COSTS = np.array([[1e-6, 2e-6, 1e-6], [1.5e-6, 3e-6, 1.5e-6]])  # seconds a token, [stages, kinds]


def job() -> Layout:
    replicas = [Replica(((r * 4, r * 4 + 1), (r * 4 + 2, r * 4 + 3)), tuple(range(r * 4, r * 4 + 4))) for r in (0, 1)]
    return layout_of(ParallelPlan(tuple(replicas)), 0, dict.fromkeys(range(8), 0))


def iterations(
    layout: Layout, count: int, split: bool, seed: int = 0, noise: float = 0.0
) -> list[IterationObservations]:
    """Iterations that last exactly what the pipeline, gradient sync, optimizer and a rest take."""
    random = np.random.default_rng(seed)
    program = (zero_bubble_h1 if split else one_f_one_b)(2, MICRO_BATCHES)
    result = []
    for number in range(count):
        by_replica = random.uniform(1e3, 9e3, (2, MICRO_BATCHES))
        tokens = by_replica[layout.replica]
        compute = COSTS[layout.stage][:, :, None, None] * tokens[:, None, None]
        compute = compute * (1 + noise * random.standard_normal(compute.shape))
        if not split:
            compute[:, 2] = np.nan
        ends = []
        for replica in (0, 1):
            first = [int(np.flatnonzero((layout.replica == replica) & (layout.stage == s))[0]) for s in (0, 1)]
            ops = compute[first, :, 0]
            ends.append(simulate(program, np.nan_to_num(ops.transpose(1, 0, 2)), HOP).makespan)
        spans = np.zeros((8, len(SpanKind)))
        spans[:, SpanKind.GRADIENT_SYNC] = SYNC + (max(ends) - np.array(ends))[layout.replica]
        spans[:, SpanKind.OPTIMIZER] = STEP
        result.append(IterationObservations(
            epoch=0, iteration=number + 1, compute=compute, waited=np.full_like(compute, np.nan), tokens=tokens,
            squares=tokens**2 * random.uniform(0.2, 1, tokens.shape), transfer=np.full((len(layout.links), 8), HOP),
            transfer_bytes=np.full((len(layout.links), 8), 1e6), spans=spans,
            seconds=np.full(8, max(ends) + SYNC + STEP + REST), reported=np.ones(8, bool),
        ))  # fmt: skip
    return result


@pytest.mark.parametrize("split", [False, True])
def test_iterations_with_other_documents_are_predicted(split: bool) -> None:
    layout = job()
    prediction = Prediction(layout, iterations(layout, 30, split))
    later = iterations(layout, 20, split, seed=1)
    observed = np.array([each.seconds.max() for each in later])
    assert np.ptp(observed) > 0.2 * observed.mean()
    assert prediction.iterations(later) == pytest.approx(observed, rel=1e-3)
    assert prediction.model.terms == pytest.approx(
        {"gradient_sync": SYNC, "optimizer": STEP, "agreement": 0.0, "rest": REST}, abs=1e-4
    )
    assert prediction.model.iteration_mape < 1e-3
    measured, predicted = prediction.micro_batches(later)
    assert measured.shape == (20, 8, MICRO_BATCHES)
    assert mape(measured, predicted) < 1e-3


def test_noise_shows_in_the_error_that_is_reported() -> None:
    layout = job()
    prediction = Prediction(layout, iterations(layout, 50, False, noise=0.02))
    # A micro-batch is F + 2 F: the mean absolute value of Gaussian noise averaged over both.
    assert prediction.model.micro_batch_mape == pytest.approx(0.02 * np.sqrt(5 / 9) * 0.798, rel=0.1)


def test_what_was_not_recorded_is_not_predicted() -> None:
    layout = job()
    prediction = Prediction(layout, iterations(layout, 30, False))
    (unknown,) = iterations(layout, 1, False, seed=1)
    unknown.tokens[3] = np.nan  # not the worker that stands for its stage
    assert np.isfinite(prediction.iterations([unknown])).all()
    unknown.tokens[:] = np.nan
    assert np.isnan(prediction.iterations([unknown])).all()


def test_a_job_that_records_no_workload_is_predicted_by_its_level() -> None:
    layout = job()
    healthy: list[Any] = iterations(layout, 30, False)
    for each in healthy:
        each.compute[:] = COSTS[layout.stage][:, :, None, None] * 5e3
        each.compute[:, 2] = np.nan
        each.tokens[:] = each.squares[:] = np.nan
        each.seconds[:] = 0.2
    assert Prediction(layout, healthy).iterations(healthy) == pytest.approx(0.2)


def test_iterations_that_recorded_less_are_padded() -> None:
    layout = job()
    first, second = iterations(layout, 2, False)
    short = IterationObservations(**{**second.__dict__, "transfer": second.transfer[:, :3]})
    assert stacked([first, short], "transfer").shape == (2, len(layout.links), 8)
    assert np.isnan(stacked([first, short], "transfer")[1, :, 3:]).all()
