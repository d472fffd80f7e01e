# SPDX-License-Identifier: Apache-2.0
"""Figures over many jobs, and their bounds."""

import pytest

from megatron_resihp.detector.verdict import Kind
from megatron_resihp.lab.detection.scoring import FaultScore, JobScore
from megatron_resihp.lab.detection.summary import mean, median, rate, share, summarize


def job(*faults: tuple[float, int | None], false_alarms: int = 0) -> JobScore:
    scores = tuple(FaultScore(Kind.COMPUTE, slowdown, latency, 0.01) for slowdown, latency in faults)
    return JobScore(8192, scores, false_alarms)


def test_bounds_are_those_of_the_tables() -> None:
    # Clopper and Pearson: no success of 10; Garwood: no event, five events.
    assert share(0, 10)["high"] == pytest.approx(0.3085, abs=1e-4)
    assert share(300, 300)["low"] == pytest.approx(0.9878, abs=1e-4)
    assert rate(0, 100)["high"] == pytest.approx(0.03689, abs=1e-5)
    assert (rate(5, 1)["low"], rate(5, 1)["high"]) == (pytest.approx(1.6235, abs=1e-4), pytest.approx(11.668, abs=1e-3))
    assert median(range(1, 101))["value"] == 50.5
    assert (median(range(1, 101))["low"], median(range(1, 101))["high"]) == (40, 61)
    assert mean([1.0, 2.0, 3.0])["low"] == pytest.approx(2 - 1.96 / 3**0.5, abs=1e-3)
    assert mean([1.0])["low"] is None


def test_accuracy_leaves_out_jobs_with_slowdowns_below_a_tenth() -> None:
    accuracy = summarize([job(), job((0.1, 2)), job((0.05, None)), job((0.3, 2), (0.05, None))])["accuracy"]
    assert (accuracy["value"], accuracy["of"]) == (1.0, 2)


def test_a_false_alarm_costs_accuracy_but_the_culprit_is_found() -> None:
    figures = summarize([job((0.3, 2), false_alarms=2), job()])
    assert figures["accuracy"]["value"] == 0.5
    assert figures["accuracy_faulty"]["value"] == 0.0
    assert figures["found"]["value"] == 1.0
    assert figures["false_alarms_per_job"]["value"] == 1.0
    assert figures["false_alarms_per_healthy_job"]["value"] == 0.0


def test_the_smallest_slowdown_is_where_finding_begins_to_be_reliable() -> None:
    scores = [job((0.05, None))] + 19 * [job((0.05, 9))] + 2 * [job((0.1, None))] + 18 * [job((0.1, 9))]
    assert summarize(scores + 20 * [job((0.2, 3))])["smallest_slowdown"]["value"] == 0.2
    assert summarize(scores[:20] + 20 * [job((0.2, 3))])["smallest_slowdown"]["value"] == 0.05
    assert summarize([job((0.7, None))])["smallest_slowdown"]["value"] is None


def test_who_was_not_found_counts_as_found_infinitely_late() -> None:
    latency = summarize([job((0.2, 2)), job((0.2, 4)), job((0.3, None))])["latency_iterations"]
    assert latency["value"] == 4 and latency["high"] is None
    assert summarize([job((0.15, 2))])["latency_iterations"]["value"] is None


def test_figures_of_no_jobs_are_unknown() -> None:
    figures = summarize([])
    assert figures["accuracy"]["value"] is None and figures["false_alarms_per_job"]["value"] is None
