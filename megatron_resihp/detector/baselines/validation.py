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
        self._known: set[Finding] = set()
        self.count = 0

    def after_alarm(self, since: int, iteration: int, epoch: int) -> list[Verdict]:
        """Verdicts on those who were not known yet; one that names nobody if nobody is slow."""
        self.count += 1
        findings = self._validate(iteration)
        new = [finding for finding in findings if finding not in self._known]
        self._known.update(new)
        nobody = [] if findings else [Finding(Kind.COMPUTE, (), 1.0)]
        return [
            Verdict(kind, Change.ONSET, workers, speed, speed, speed, since, iteration, epoch)
            for kind, workers, speed in [*new, *nobody]
        ]
