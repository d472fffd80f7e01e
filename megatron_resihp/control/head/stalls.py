# SPDX-License-Identifier: Apache-2.0
"""Whether training stands still: no iteration was finished for three times as long as one usually takes.

Pure: events, notices and the time in, events out. May import `protocol` and this package's other pure modules.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Final

from megatron_resihp.control.transport.absence import Absence
from megatron_resihp.events.epochs import EpochBroken, Reconfiguration, Recovery
from megatron_resihp.events.event import Event
from megatron_resihp.events.job import BatchGrown, Job, RunFinished, Stall
from megatron_resihp.events.replanning import PlanChange
from megatron_resihp.events.training import Checkpoint, Iteration
from megatron_resihp.protocol.notices import Notice, SaveOrder, StopTraining

FOLLOWED: Final = (
    Job,
    BatchGrown,
    EpochBroken,
    PlanChange,
    Recovery,
    Reconfiguration,
    RunFinished,
    Iteration,
    Checkpoint,
)
"""Events that tell whether training goes on."""
STALLED_AFTER: Final = 3.0
"""Usual iteration times."""
LEAST_S: Final = 1.0
"""Shorter stalls are not worth a word."""
LEAST_BUSY_S: Final = 10.0
"""Likewise during a recovery or a change of plan, which have lines of their own."""
LEAST_DUE_S: Final = 30.0
"""Likewise where an evaluation or a checkpoint is due, and none has shown yet how long it takes."""
LATEST: Final = 10
"""Iterations that the usual time is the median of."""
SAVED_WITHIN: Final = 5
"""Iterations after which a checkpoint that was asked for is written, or never will be."""
FEWEST: Final = 3
"""Iterations before there is a usual time."""
LONGEST_SILENCE_S: Final = 600.0
"""Between two lines while nothing happens; at first they come when the time has tripled."""
AWAY_S: Final = 2.0
"""If no look was taken for this long, this process was stopped itself."""

RECOVERY: Final = "recovery"
CHANGE: Final = "change of plan"
EVALUATION: Final = "evaluation"
CHECKPOINT: Final = "checkpoint"


@dataclass
class StallWatch:
    """Feed it the events in FOLLOWED with `note`, and what all workers are told with `told`; call `look` often. `note`
    and `look` return events to write.

    Times are monotonic seconds.
    """

    _job: Job | None = None
    _iteration: int | None = None
    _last_at: float | None = None
    _absence: Absence = field(default_factory=lambda: Absence(AWAY_S))
    _usual: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    _busy_with: str | None = None
    _goes_on: bool = False
    """What it is busy with is over with the next iteration; before that, iterations may still be finished as ever."""
    _longest_due: dict[str, float] = field(default_factory=dict)
    _save_within: float = 0
    """Iterations after which a checkpoint that was asked for is there; a job that was told to stop writes it last."""
    _next_s: float | None = None
    """How long the stall that goes on has to last to be told again; None: there is none."""
    _ended: bool = False

    def note(self, event: Event, now: float) -> list[Stall]:
        """Something happened in the run."""
        match event:
            case Job():
                self._job = self._job or event
            case EpochBroken():
                self._busy_with = RECOVERY
            case PlanChange():
                self._busy_with = self._busy_with or CHANGE
            case BatchGrown():
                self._busy_with = self._busy_with or CHANGE
                self._usual.clear()
            case Recovery() | Reconfiguration():
                self._goes_on = True
            case RunFinished():
                self._ended = True
            case Checkpoint():
                self._save_within = min(self._save_within, 1)
            case Iteration():
                found = self._step(event.iteration, event.duration_s, now)
                self._save_within = inf if event.ends else self._save_within
                return found
        return []

    def told(self, notice: Notice) -> None:
        """All workers are told something."""
        match notice:
            case SaveOrder():
                self._save_within = max(self._save_within, SAVED_WITHIN)
            case StopTraining():
                self._save_within = inf

    def look(self, now: float) -> list[Stall]:
        """Time has passed."""
        if self._last_at is not None:
            # Nobody is late for what this process could not hear.
            self._last_at = min(self._last_at + self._absence.before(now), now)
        if self._ended or self._last_at is None or (self._job and self._iteration == self._job.train_iters):
            return []
        usual_s, lasted = self.usual_s, now - self._last_at
        if usual_s is None or lasted < (self._limit(usual_s) if self._next_s is None else self._next_s):
            return []
        self._next_s = min(3 * lasted, lasted + LONGEST_SILENCE_S)
        return [self._stall(lasted, usual_s, over=False)]

    @property
    def usual_s(self) -> float | None:
        """Median seconds of the latest iterations; None: too few are known."""
        return median(self._usual) if len(self._usual) >= FEWEST else None

    def _step(self, iteration: int, took_s: float | None, now: float) -> list[Stall]:
        told, usual_s, found = self._next_s is not None, self.usual_s, []
        if self._last_at is not None:
            lasted, due = now - self._last_at, self._due()
            if told and usual_s is not None:
                found = [self._stall(lasted, usual_s, over=True)]
            for what in due:
                self._longest_due[what] = max(lasted, self._longest_due.get(what, 0.0))
            if not due and not told and not self._save_within and not (self._busy_with and self._goes_on):
                # Events may come in bursts: their reporter knows better how long an iteration took.
                self._usual.append(lasted if took_s is None else took_s)
        self._iteration, self._last_at, self._next_s = iteration, now, None
        self._save_within = max(self._save_within - 1, 0)
        if self._goes_on:
            self._busy_with, self._goes_on = None, False
        return found

    def _stall(self, lasted: float, usual_s: float, over: bool) -> Stall:
        due = [*self._due(), *([CHECKPOINT] if self._save_within else [])]
        meanwhile = self._busy_with or " and ".join(dict.fromkeys(due)) or None
        return Stall(iteration=self._iteration or 0, seconds=lasted, usual_s=usual_s, meanwhile=meanwhile, over=over)

    def _limit(self, usual_s: float) -> float:
        limit = max(STALLED_AFTER * usual_s, LEAST_S)
        if self._busy_with is not None:
            return max(limit, LEAST_BUSY_S)
        for what in self._due():
            longest_s = self._longest_due.get(what)
            limit = max(limit, LEAST_DUE_S if longest_s is None else STALLED_AFTER * longest_s)
        if self._save_within:
            limit = max(limit, LEAST_DUE_S, STALLED_AFTER * self._longest_due.get(CHECKPOINT, 0.0))
        return limit

    def _due(self) -> list[str]:
        """What the job does after this iteration beside training."""
        if self._job is None:
            return []
        every = [
            (EVALUATION, self._job.eval_interval), (CHECKPOINT, self._job.save_interval),
            (CHECKPOINT, self._job.non_persistent_save_interval),
        ]  # fmt: skip
        due = [what for what, count in every if count and self._iteration and self._iteration % count == 0]
        return list(dict.fromkeys(due))
