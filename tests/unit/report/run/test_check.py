# SPDX-License-Identifier: Apache-2.0
"""What `resihp report --check` finds wrong with a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megatron_resihp.report.run.check import faults
from megatron_resihp.report.run.run_summary import REORDERED, Failure, RunSummary
from megatron_resihp.report.run.summary import summarize, with_reference

COMPARED = "loss against the reference run: relative difference"
BOUND = "sums in another order give 1.0e-04 at most"


@pytest.fixture
def good(recovered_run: Any) -> RunSummary:
    """A run that was compared with its own twin."""
    summary = summarize(recovered_run.events)
    return with_reference(summary, summary)


def test_a_good_run_has_no_faults(good: RunSummary) -> None:
    assert faults(good) == []


def test_a_reference_is_not_needed(recovered_run: Any) -> None:
    assert faults(summarize(recovered_run.events)) == []


def test_floating_point_reassociation_is_no_fault(good: RunSummary) -> None:
    nearly = {iteration: loss * (1 + REORDERED / 2) for iteration, loss in good.loss.items()}
    assert faults(with_reference(good, replace(good, loss=nearly))) == []


def test_the_bound_is_what_the_order_of_sums_does_in_this_job(good: RunSummary) -> None:
    def off_by(difference: float) -> RunSummary:
        return replace(good, loss={iteration: loss * (1 + difference) for iteration, loss in good.loss.items()})

    assert faults(with_reference(off_by(3e-4), good, off_by(1e-5), off_by(-2e-4))) == []
    assert faults(with_reference(off_by(5e-4), good, off_by(1e-5), off_by(-2e-4))) == [
        f"{COMPARED} at most 5.0e-04; sums in another order give 4.0e-04 at most"
    ]
    assert len(faults(with_reference(off_by(5e-5), good, off_by(1e-6)))) == 1, "a calm job is held to 1e-5"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"completed": False, "exit_code": None}, "the run has not ended"),
        ({"completed": False, "exit_code": 1}, "the run ended with exit code 1"),
        ({"iterations": 39}, "the run ended at iteration 39 of 40"),
        ({"failures": (Failure(2, "ValueError: no"),)}, "worker 2 raised an error"),
        ({"samples_consumed": None}, "samples not recorded (run with --resihp-record-samples)"),
        ({"samples_lost": 3}, "samples: 3 LOST"),
        ({"log_damaged": True}, "samples: can't tell: log damaged"),
        ({"samples_applied_twice": 3}, "samples: 3 REPEATED"),
        ({"samples_out_of_place": 3}, "samples: 3 OUT OF PLACE"),
        ({"loss_max_relative_difference": 2e-4}, f"{COMPARED} at most 2.0e-04; {BOUND}"),
        ({"loss_max_relative_difference": math.inf}, f"{COMPARED} at most inf; {BOUND}"),
        ({"loss_max_relative_difference": None}, "no iteration in common with the reference run"),
    ],
)
def test_each_broken_promise_is_named(good: RunSummary, changes: dict[str, Any], fault: str) -> None:
    assert faults(replace(good, **changes)) == [fault]


def test_an_iteration_without_a_loss_is_named(good: RunSummary) -> None:
    without = {iteration: loss for iteration, loss in good.loss.items() if iteration != 7}
    fault = "iteration 7 has a loss in one of the two runs only"
    assert faults(replace(good, loss=without)) == [fault]
    assert faults(with_reference(good, replace(good, loss=without))) == [fault]


def test_a_run_from_a_checkpoint_is_compared_from_there_on(good: RunSummary, synthetic_run: Callable[..., Any]) -> None:
    later = synthetic_run(first_iteration=39)
    later.step(1, loss={"lm loss": good.loss[40]})
    later.finish()
    assert faults(with_reference(summarize(later.events), good)) == []


def test_an_empty_log_is_a_fault() -> None:
    assert faults(summarize([])) == [
        "the run has not ended",
        "samples not recorded (run with --resihp-record-samples)",
    ]
