# SPDX-License-Identifier: Apache-2.0
"""Scores a detector on a job with known truth. Imports `detector.interface` and `detector.verdict`.

A culprit is found if a verdict names it between its onset and 30 iterations later. There are two kinds of false alarm.
One is a verdict that a device has become slow while it is not: a verdict without workers, on a healthy device, or on a
culprit before its onset. The other is a verdict that a culprit has recovered while it is slow. A job is judged
correctly if all culprits were found and there was no false alarm.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_resihp.detector.interface import Detector
from megatron_resihp.detector.verdict import Change, Kind, Verdict
from megatron_resihp.lab.detection.faults import Fault
from megatron_resihp.lab.detection.jobs import SyntheticJob

WINDOW = 30
"""Iterations after its onset within which a culprit must be named; its speed is asked for at their end."""


@dataclass(frozen=True)
class FaultScore:
    """A detector's score for one culprit.

    Attributes:
        kind: compute or link.
        slowdown: s = 1 − p.
        latency: slow iterations until the first verdict that names the culprit, the deciding one included; None if it
            was not named within the window.
        speed_error: |p̂ − p| at the end of the window; p̂ is 1 for a device that is not known to be slow.
    """

    kind: Kind
    slowdown: float
    latency: int | None
    speed_error: float


@dataclass(frozen=True)
class JobScore:
    """A detector's score for one job.

    Attributes:
        sequence: tokens of the job's micro-batches.
        faults: one score for each culprit; empty for a healthy job.
        false_alarms: number of false alarms.
    """

    sequence: int
    faults: tuple[FaultScore, ...]
    false_alarms: int

    @property
    def is_correct(self) -> bool:
        return self.false_alarms == 0 and all(fault.latency is not None for fault in self.faults)


def watch(job: SyntheticJob, detector: Detector) -> JobScore:
    """Let a detector watch a job and score it."""
    verdicts: list[Verdict] = []
    speeds = dict.fromkeys(job.faults, 1.0)
    for observations in job.observations():
        verdicts += detector.observe(observations)
        for fault in job.faults:
            if fault.onset + WINDOW == observations.iteration:
                speeds[fault] = _speed(detector, fault)
    faults = tuple(
        FaultScore(fault.kind, fault.slowdown, _latency(fault, verdicts), abs(speeds[fault] - fault.speed))
        for fault in job.faults
    )
    return JobScore(job.spec.sequence, faults, count_false_alarms(job.faults, verdicts))


def _speed(detector: Detector, fault: Fault) -> float:
    first, *rest = fault.workers
    return detector.link_speed((first, rest[0])) if fault.kind is Kind.LINK else detector.speed(first)


def _latency(fault: Fault, verdicts: Iterable[Verdict]) -> int | None:
    for verdict in verdicts:
        named = verdict.change is not Change.RECOVERY and _names(verdict, fault)
        if named and fault.onset <= verdict.iteration <= fault.onset + WINDOW:
            return verdict.iteration - fault.onset + 1
    return None


def count_false_alarms(faults: Iterable[Fault], verdicts: Iterable[Verdict]) -> int:
    """Verdicts that contradict the truth. The recovery of a wrongly blamed device is not counted."""
    faults = tuple(faults)
    count = 0
    for verdict in verdicts:
        is_slow = any(_names(verdict, fault) and fault.onset <= verdict.iteration for fault in faults)
        count += is_slow if verdict.change is Change.RECOVERY else not is_slow
    return count


def _names(verdict: Verdict, fault: Fault) -> bool:
    return verdict.kind is fault.kind and sorted(verdict.workers) == sorted(fault.workers)
