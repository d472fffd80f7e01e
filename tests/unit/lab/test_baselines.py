# SPDX-License-Identifier: Apache-2.0
"""The published detectors, on iteration times whose truth is known."""

from collections.abc import Callable

import numpy as np
import pytest

from megatron_resihp.detector.input.table import Table
from megatron_resihp.detector.interface import iteration_seconds
from megatron_resihp.detector.verdict import Kind, Verdict
from megatron_resihp.lab.baselines.greyhound import Greyhound
from megatron_resihp.lab.baselines.resihp import Resihp
from megatron_resihp.lab.baselines.validation import Finding, Validate, Validation
from megatron_resihp.lab.detection.draws import Purpose, draw_job
from megatron_resihp.lab.detection.faults import Fault
from megatron_resihp.lab.detection.jobs import JobSpec, Schedule, SyntheticJob, make_job
from megatron_resihp.lab.detection.noise import NOISES
from megatron_resihp.lab.detection.shapes import SHAPES

SLOW = Finding(Kind.COMPUTE, (0,), 0.7)


def times(series: np.ndarray) -> Table:
    """A job of which only the iteration times are known."""
    return Table.of(series[:, None])


def greyhound_on(series: np.ndarray, validate: Validate = lambda iteration: []) -> list[Verdict]:
    table = times(series)
    detector = Greyhound(table.layout(), 0.01, series.size, validate=validate)
    return [verdict for observations in table.observations() for verdict in detector.observe(observations)]


def steady(length: int, noise: float, rng: np.random.Generator) -> np.ndarray:
    return 2.0 * (1 + noise * rng.standard_normal(length))


def slowed(onset: int, end: int) -> Callable[[int], list[Finding]]:
    return lambda iteration: [SLOW] if onset <= iteration < end else []


def test_greyhound_finds_18_of_18_slowdowns_of_a_steady_job_and_reports_nothing_else() -> None:
    rng = np.random.default_rng(18)
    factors = np.linspace(1.15, 2.0, 18)
    found, false = 0, 0
    for factor in factors:
        series = steady(300, rng.uniform(0.01, 0.02), rng)
        onset = int(rng.integers(60, 180))
        series[onset - 1 : onset + 59] *= factor
        verdicts = greyhound_on(series, slowed(onset, onset + 60))
        right = [v for v in verdicts if v.workers == (0,) and onset <= v.iteration <= onset + 3]
        found += len(right) == 1 and right[0].since == onset
        false += len(verdicts) - len(right)
    assert (found, false) == (18, 0)


def test_greyhound_is_silent_on_a_steady_healthy_job() -> None:
    rng = np.random.default_rng(2)
    assert greyhound_on(steady(1000, 0.02, rng)) == []


def test_greyhound_discards_changes_of_less_than_a_tenth() -> None:
    rng = np.random.default_rng(3)
    series = steady(200, 0.005, rng)
    series[100:] *= 1.08
    assert greyhound_on(series, slowed(101, 200)) == []


def test_greyhound_takes_a_heavier_workload_for_a_fault() -> None:
    rng = np.random.default_rng(4)
    series = steady(200, 0.01, rng)
    series[100:] *= 1.3
    (verdict,) = greyhound_on(series)
    assert verdict.workers == ()


def test_an_iteration_without_a_time_is_passed_over() -> None:
    rng = np.random.default_rng(5)
    series = steady(200, 0.01, rng)
    series[20:40] = np.nan
    assert greyhound_on(series) == []


def test_the_iteration_time_is_the_slowest_workers_that_reported() -> None:
    job = draw_job(Purpose.TUNING, 0, NOISES[0], SHAPES[0], 0)
    assert iteration_seconds(job.iteration(3)) == pytest.approx(job.seconds[2])
    (unknown,) = times(np.array([np.nan])).observations()
    assert np.isnan(iteration_seconds(unknown))


def watched(job: SyntheticJob, detector: type[Greyhound] | type[Resihp]) -> list[Verdict]:
    def validate(iteration: int) -> list[Finding]:
        return [Finding(fault.kind, fault.workers, fault.speed) for fault in job.faults if fault.onset <= iteration]

    watching = detector(job.layout, 0.01, job.spec.iterations, validate=validate)
    return [verdict for observations in job.observations() for verdict in watching.observe(observations)]


def documents_in_regimes(*faults: Fault) -> SyntheticJob:
    spec = JobSpec(SHAPES[0], 16384, micro_batches=8, schedule=Schedule.ONE_F_ONE_B, noise=NOISES[0])
    return make_job(spec, faults, np.random.default_rng(1))


def test_resihp_knows_long_documents_from_slow_devices_where_greyhound_does_not() -> None:
    healthy = documents_in_regimes()
    assert {verdict.workers for verdict in watched(healthy, Greyhound)} == {()}
    assert watched(healthy, Resihp) == []


def test_resihp_finds_a_device_at_half_speed_and_not_one_that_costs_the_job_less_than_a_quarter() -> None:
    half = Fault(Kind.COMPUTE, (6,), 0.5, onset=120)
    (verdict,) = watched(documents_in_regimes(half), Resihp)
    assert verdict.workers == (6,) and verdict.speed == 0.5
    assert 120 <= verdict.iteration <= 125
    assert watched(documents_in_regimes(Fault(Kind.COMPUTE, (6,), 0.85, onset=120)), Resihp) == []


def test_validation_that_finds_only_known_culprits_is_no_new_alarm() -> None:
    validation = Validation(lambda iteration: [SLOW])
    assert [verdict.workers for verdict in validation.after_alarm(5, 7, 0)] == [(0,)]
    assert validation.after_alarm(9, 11, 0) == []
    assert validation.count == 2
