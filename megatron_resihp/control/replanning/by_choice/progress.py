# SPDX-License-Identifier: Apache-2.0
"""How far training is, what a better plan would have saved so far, and when to ask for one again.

Imports the standard library only.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final

LATEST: Final = 10
"""Iterations that tell how long one takes."""
LONGEST: Final = 3.0
"""What is longer than so many of these was not all training."""
FIRST_PAUSE_S: Final = 60.0
"""Whatever has ended a planner, such as a lack of memory while a checkpoint is written, may be over by then."""
LONGEST_PAUSE_S: Final = 3600.0
"""A planner that never answers takes a core for ten minutes each time."""


@dataclass
class Training:
    """How far training is.

    Attributes:
        iteration: the last one.
        train_iters: the last one that there will be.
        stand_still_s: how long the last recovery or change held up training.
        changed_at: when a change was last made or refused.
    """

    iteration: int = 0
    _latest_s: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    train_iters: int | None = None
    stand_still_s: float | None = None
    changed_at: float | None = None

    @property
    def iteration_s(self) -> float | None:
        """How long an iteration takes."""
        return median(self._latest_s) if self._latest_s else None

    def took(self, seconds: float) -> float:
        """An iteration has taken so long; returns how much of that may be training. The rest is an evaluation, a save
        or a stall, which no other plan would have made shorter."""
        self._latest_s.append(seconds)
        return min(seconds, LONGEST * median(self._latest_s))


@dataclass
class Lost:
    """Time that a better plan would have saved.

    While there is none, it shrinks by what the plan in force saves, or as fast as it grew: spells that are short beside
    the time between them don't add up.

    Attributes:
        seconds: so far.
        since: first iteration that was slow and has not been counted yet.
        counted: the last iteration that has.
        gain: share of an iteration that was counted last.
        shrinks: whether no plan is better.
        saved_s: what the plan in force saves then in each iteration, beside the one before; None: unknown.
    """

    seconds: float = 0.0
    since: int | None = None
    counted: int = 0
    gain: float = 0.0
    shrinks: bool = False
    saved_s: float | None = None

    def slow_since(self, iteration: int) -> None:
        """A speed has changed, and it is not known yet what that costs."""
        self.since = iteration if self.since is None else min(self.since, iteration)
        self.shrinks = False

    def count_until_now(self, training: Training, gain: float) -> None:
        """Now that the gain is known, count the iterations since the first slow one."""
        if self.since is not None and training.iteration_s is not None:
            uncounted = training.iteration - max(self.since - 1, self.counted)
            self.seconds += max(uncounted, 0) * training.iteration_s * gain
            self.counted = training.iteration
        self.since, self.gain, self.shrinks = None, gain, False

    def count_one(self, iteration: int, seconds: float, gain: float) -> None:
        """An iteration is over that another plan would have made shorter."""
        self.seconds += seconds * gain
        self.counted = iteration

    def none_is_better(self) -> None:
        """No plan is better than the one in force, as things are."""
        self.since, self.shrinks = None, True

    def pass_one(self, seconds: float) -> None:
        """An iteration is over that no plan is known to make shorter."""
        if self.shrinks:
            saved_s = seconds * self.gain if self.saved_s is None else self.saved_s
            self.seconds = max(self.seconds - saved_s, 0.0)

    def forget(self) -> None:
        """Another plan is in force, by which nothing is lost yet."""
        self.saved_s = None
        self.seconds, self.since, self.shrinks = 0.0, None, False


@dataclass
class Pause:
    """Before a question is put again that has found no answer; twice as long each time in succession."""

    seconds: float = FIRST_PAUSE_S
    until: float | None = None

    def begin(self, now: float) -> None:
        """There was no answer."""
        self.until, self.seconds = now + self.seconds, min(2 * self.seconds, LONGEST_PAUSE_S)

    def is_over(self, now: float) -> bool:
        """Whether to ask again."""
        return self.until is not None and now >= self.until
