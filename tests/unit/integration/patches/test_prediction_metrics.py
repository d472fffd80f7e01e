# SPDX-License-Identifier: Apache-2.0
"""What is logged of predictions of further tokens, by Megatron's own tracker: means over the global batch, once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_resihp.integration import releases
from megatron_resihp.integration.patches import prediction_metrics
from megatron_resihp.integration.patches.prediction_metrics import (
    forget,
    recorded,
    restore_running_sums,
    running_sums,
    tell_sums,
    width,
)

DEPTHS, MICRO_BATCHES = 2, 4
LOSS, RATE, RUNNING_RATE = "mtp_2 loss", "mtp_2_acceptance_rate", "mtp_2_cumulative_acceptance_rate"

pytestmark = pytest.mark.skipif(
    len(releases.current().prediction_metrics) < 3, reason="this release of Megatron counts no correct predictions"
)


@pytest.fixture(autouse=True)
def tracker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Megatron's, on a CPU, in a job that counts as one replica."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(prediction_metrics, "get_num_microbatches", lambda: MICRO_BATCHES)
    MTPLossLoggingHelper.tracker.clear()
    yield
    MTPLossLoggingHelper.tracker.clear()


def run_micro_batches(*found: tuple[float, float]) -> list[float]:
    """What a last stage has recorded after these losses and numbers of correct predictions, of ten each."""
    forget()
    for depth in range(DEPTHS):
        for loss, correct in found:
            MTPLossLoggingHelper.save_metrics_to_tracker(
                torch.tensor(depth * loss), torch.tensor(correct), torch.tensor(10.0), depth, DEPTHS,
                avg_group="a group that is gone",
            )  # fmt: skip
    return recorded(DEPTHS)


class Writer:
    def __init__(self) -> None:
        self.points: dict[str, float] = {}

    def add_scalar(self, tag: str, value: torch.Tensor, step: int) -> None:
        self.points[tag] = float(value)


def logged() -> dict[str, float]:
    """What Megatron logs after an iteration."""
    writer = Writer()
    MTPLossLoggingHelper.track_mtp_metrics(1 / MICRO_BATCHES, 1, writer)
    return writer.points


def total(*of_replicas: Sequence[float]) -> list[float]:
    return [sum(values) for values in zip(*of_replicas, strict=True)]


def test_each_micro_batch_weighs_the_same_whichever_replica_runs_it() -> None:
    uneven = total(run_micro_batches((1.0, 3.0), (2.0, 5.0), (3.0, 0.0)), run_micro_batches((6.0, 8.0)))
    assert len(uneven) == width(DEPTHS)
    tell_sums(uneven, MICRO_BATCHES)
    points = logged()
    assert points[LOSS] == pytest.approx(3.0) and points["mtp_1 loss"] == 0.0
    assert points[RATE] == points[RUNNING_RATE] == pytest.approx(40.0)


def test_an_attempt_that_did_not_end_is_not_logged() -> None:
    run_micro_batches((100.0, 9.0))
    tell_sums(run_micro_batches(*[(1.0, 5.0)] * 4), MICRO_BATCHES)
    assert logged()[LOSS] == pytest.approx(1.0)


def test_an_iteration_that_is_logged_again_counts_once_in_what_runs_on() -> None:
    """On a worker that has come since, too, to which the sums come as lists."""
    tell_sums(run_micro_batches(*[(1.0, 10.0)] * 4), MICRO_BATCHES)
    logged()
    before = running_sums()
    outcome = run_micro_batches(*[(1.0, 0.0)] * 4)
    for kept in (before, {name: value.tolist() for name, value in before.items()}, before):
        restore_running_sums(kept)
        tell_sums(outcome, MICRO_BATCHES)
        assert logged()[RUNNING_RATE] == pytest.approx(50.0)


def test_who_has_no_such_sums_begins_them_anew() -> None:
    tell_sums(run_micro_batches(*[(1.0, 10.0)] * 4), MICRO_BATCHES)
    logged()
    restore_running_sums({})
    assert not running_sums()


def test_a_worker_that_has_recorded_nothing_brings_nothing() -> None:
    forget()
    assert recorded(DEPTHS) == [0.0] * width(DEPTHS)
    assert width(None) == 0
