# SPDX-License-Identifier: Apache-2.0
"""When a detector was right about a job."""

from dataclasses import replace

import pytest

from megatron_resihp.detector.input.observations import IterationObservations
from megatron_resihp.detector.verdict import Change, Kind, Verdict
from megatron_resihp.lab.detection.draws import Purpose, draw_job
from megatron_resihp.lab.detection.faults import Fault
from megatron_resihp.lab.detection.jobs import SyntheticJob
from megatron_resihp.lab.detection.noise import NOISES
from megatron_resihp.lab.detection.scoring import JobScore, watch
from megatron_resihp.lab.detection.shapes import SHAPES

ONSET = 120
WORKER = Fault(Kind.COMPUTE, (5,), 0.7, ONSET)
LINK = Fault(Kind.LINK, (2, 10), 0.5, ONSET)


class Scripted:
    """A detector that says what it was told to say."""

    def __init__(self, *verdicts: Verdict, speed: float = 1.0) -> None:
        self._verdicts = verdicts
        self._speed = speed

    def observe(self, observations: IterationObservations) -> list[Verdict]:
        return [verdict for verdict in self._verdicts if verdict.iteration == observations.iteration]

    def speed(self, worker: int) -> float:
        return self._speed

    def link_speed(self, ends: tuple[int, int]) -> float:
        return self._speed


@pytest.fixture(scope="module")
def healthy() -> SyntheticJob:
    return draw_job(Purpose.TUNING, 0, NOISES[0], SHAPES[0], 0)


def says(*workers: int, at: int = ONSET + 2, change: Change = Change.ONSET, kind: Kind = Kind.COMPUTE) -> Verdict:
    return Verdict(kind, change, workers, 0.7, 0.6, 0.8, at, at, 0)


def score(job: SyntheticJob, faults: tuple[Fault, ...], *verdicts: Verdict) -> JobScore:
    return watch(replace(job, faults=faults), Scripted(*verdicts))


def test_silence_is_right_about_a_healthy_job_only(healthy: SyntheticJob) -> None:
    assert score(healthy, ()).is_correct
    assert not score(healthy, (WORKER,)).is_correct


def test_the_culprit_named_in_time_is_right(healthy: SyntheticJob) -> None:
    for latency in (1, 31):
        found = score(healthy, (WORKER,), says(5, at=ONSET + latency - 1))
        assert found.is_correct and found.faults[0].latency == latency


def test_a_late_verdict_is_not_right_and_no_false_alarm(healthy: SyntheticJob) -> None:
    late = score(healthy, (WORKER,), says(5, at=ONSET + 31))
    assert not late.is_correct and late.false_alarms == 0


def test_an_early_verdict_is_a_false_alarm(healthy: SyntheticJob) -> None:
    early = score(healthy, (WORKER,), says(5, at=ONSET - 1))
    assert not early.is_correct and early.false_alarms == 1


@pytest.mark.parametrize("wrong", [says(6), says(), says(2, 10, kind=Kind.LINK)], ids=["worker", "nobody", "link"])
def test_somebody_else_named_is_a_false_alarm(healthy: SyntheticJob, wrong: Verdict) -> None:
    assert not score(healthy, (WORKER,), wrong).is_correct
    also = score(healthy, (WORKER,), says(5), wrong)
    assert not also.is_correct
    assert also.false_alarms == 1 and also.faults[0].latency == 3


def test_all_culprits_must_be_named(healthy: SyntheticJob) -> None:
    link = says(10, 2, kind=Kind.LINK)
    assert score(healthy, (WORKER, LINK), says(5), link).is_correct
    assert not score(healthy, (WORKER, LINK), says(5)).is_correct


def test_news_of_a_slow_device_is_no_alarm_and_its_recovery_is_one(healthy: SyntheticJob) -> None:
    news = says(5, at=200, change=Change.SEVERITY)
    assert score(healthy, (WORKER,), says(5), news).is_correct
    recovery = says(5, at=200, change=Change.RECOVERY)
    assert score(healthy, (WORKER,), says(5), recovery).false_alarms == 1


def test_taking_back_a_false_alarm_is_not_another(healthy: SyntheticJob) -> None:
    assert score(healthy, (), says(6), says(6, at=200, change=Change.RECOVERY)).false_alarms == 1


def test_the_speed_is_asked_for_when_the_window_ends(healthy: SyntheticJob) -> None:
    class Learning(Scripted):
        seen = 0

        def observe(self, observations: IterationObservations) -> list[Verdict]:
            self.seen = observations.iteration
            return []

        def speed(self, worker: int) -> float:
            assert (worker, self.seen) == (5, ONSET + 30)
            return 0.75

    assert watch(replace(healthy, faults=(WORKER,)), Learning()).faults[0].speed_error == pytest.approx(0.05)
