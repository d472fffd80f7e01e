# SPDX-License-Identifier: Apache-2.0
"""Whether a change of plan by choice has paid: iterations before and after it. Pure; imports `events`."""

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Final

from megatron_resihp.events.detection import Verdict
from megatron_resihp.events.epochs import EpochStarted, Reconfiguration, Recovery
from megatron_resihp.events.event import Event
from megatron_resihp.events.job import BatchGrown
from megatron_resihp.events.replanning import PlanChange
from megatron_resihp.events.training import Iteration

COMPARED: Final = 16
"""Iterations after a change, and at most so many before it."""
FEWEST: Final = 4
SKIPPED: Final = 2
"""An epoch's first iterations, which connect and allocate."""


@dataclass(frozen=True)
class Outcome:
    """What a change has done.

    Attributes:
        number: of the change.
        before_s, after_s: median seconds of an iteration.
    """

    number: int
    before_s: float
    after_s: float


class Trial:
    """Follows the run's events. A verdict or a failure in between says that both sides can't be compared."""

    def __init__(self) -> None:
        self._newest: deque[tuple[int, float]] = deque(maxlen=COMPARED)
        """Numbers and seconds of this epoch's iterations, since a speed last changed."""
        self._to_skip = 0
        self._before: float | None = None
        self._number: int | None = None
        """The change that is being judged."""

    def note(self, event: Event) -> Outcome | None:
        """Something happened; what it says of the last change."""
        match event:
            case PlanChange():
                enough = len(self._newest) >= FEWEST
                self._before = self._median() if enough else None
            case EpochStarted():
                self._newest.clear()
                self._to_skip, self._number = SKIPPED, None
            case Reconfiguration() if self._before is not None:
                self._number = event.number
            case Recovery():
                self._before = None
            case BatchGrown():
                self._before = self._number = None
            case Verdict():
                kept = [each for each in self._newest if each[0] >= event.since]
                self._newest = deque(kept, maxlen=COMPARED)
                self._before = self._number = None
            case Iteration() if event.duration_s:
                return self._iterated(event.iteration, event.duration_s)
        return None

    def _iterated(self, iteration: int, seconds: float) -> Outcome | None:
        if self._to_skip > 0:
            self._to_skip -= 1
            return None
        self._newest.append((iteration, seconds))
        if self._number is None or self._before is None or len(self._newest) < COMPARED:
            return None
        outcome = Outcome(self._number, self._before, self._median())
        self._before = self._number = None
        return outcome

    def _median(self) -> float:
        return median(seconds for _, seconds in self._newest)
