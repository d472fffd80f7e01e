# SPDX-License-Identifier: Apache-2.0
"""Validation in both published detectors: after an alarm, stop the job and measure every worker and link. Imports
numpy.

Measurement is modelled as perfect: it names the workers and links that are slow at that time, and their true speed. The
cost is counted.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron_resihp.detector.verdict import Change, Kind, Verdict


class Finding(NamedTuple):
    """A slow worker or link found by measurement, and its speed p."""

    kind: Kind
    workers: tuple[int, ...]
    speed: float


Validate = Callable[[int], Sequence[Finding]]
"""Gives the slow workers and links in an iteration."""


class Validation:
    """Turns alarms into verdicts.

    Attributes:
        count: how often the job was stopped.
    """

    def __init__(self, validate: Validate) -> None:
        self._validate = validate
        self._speeds: dict[tuple[int, ...], float] = {}
        self.count = 0

    def speed(self, workers: tuple[int, ...]) -> float:
        """The speed of a worker or a link when it was last found slow, or 1.0."""
        return self._speeds.get(workers, 1.0)

    def after_alarm(self, since: int, iteration: int, epoch: int) -> list[Verdict]:
        """Verdicts on newly found workers and links; if nothing is slow, one verdict without workers."""
        self.count += 1
        findings = self._validate(iteration)
        new = [finding for finding in findings if self.speed(finding.workers) != finding.speed]
        self._speeds.update((finding.workers, finding.speed) for finding in new)
        nobody = [] if findings else [Finding(Kind.COMPUTE, (), 1.0)]
        return [
            Verdict(kind, Change.ONSET, workers, speed, speed, speed, since, iteration, epoch)
            for kind, workers, speed in [*new, *nobody]
        ]
