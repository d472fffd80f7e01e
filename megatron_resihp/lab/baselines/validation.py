# SPDX-License-Identifier: Apache-2.0
"""What both published detectors do after an alarm: stop the job and measure every worker and link. Imports numpy.

Measuring is modelled as perfect: it names whoever is slow at that time and their true speed. What it costs is counted.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron_resihp.detector.verdict import Change, Kind, Verdict


class Finding(NamedTuple):
    """A slow worker or link that measuring finds, and its speed p."""

    kind: Kind
    workers: tuple[int, ...]
    speed: float


Validate = Callable[[int], Sequence[Finding]]
"""Who is slow in an iteration."""


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
        """What was measured of a worker or a link's ends when they were last found slow, or 1.0."""
        return self._speeds.get(workers, 1.0)

    def after_alarm(self, since: int, iteration: int, epoch: int) -> list[Verdict]:
        """Verdicts on those who were not known yet; one that names nobody if nobody is slow."""
        self.count += 1
        findings = self._validate(iteration)
        new = [finding for finding in findings if self.speed(finding.workers) != finding.speed]
        self._speeds.update((finding.workers, finding.speed) for finding in new)
        nobody = [] if findings else [Finding(Kind.COMPUTE, (), 1.0)]
        return [
            Verdict(kind, Change.ONSET, workers, speed, speed, speed, since, iteration, epoch)
            for kind, workers, speed in [*new, *nobody]
        ]
