# SPDX-License-Identifier: Apache-2.0
"""How long slowness is waited out before a plan is changed for it. Pure; imports the standard library only.

Without a past, a change is made once the time that it would have saved is what it costs. Where slowness comes and
passes again and again, each change costs twice, there and back, and it may never save as much. So each worker, and each
link, whose slowness a plan was changed for in vain has to lose twice as much before the next change. That halves again
with time, so slowly that a job hardly loses by trying once more. Likewise where a worker has only looked well, for the
change back; and where planners were wrong, for every change.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

Cause = tuple[int, ...]
"""A worker, or both ends of a link, the smaller id first."""
STEP: Final = 0.1
"""A plan for speeds that differ by no more is better than none, and by about as much as was found."""
SHARE: Final = 0.003
"""Of the time, what changes in vain for one worker or link may cost: less than anybody can measure."""
MOST_LOST_S: Final = 3600.0
"""What has lost so much is acted on, however often that was in vain before. A restart and the steps since the last
checkpoint cost a job about as much; to wait shall not cost more."""
MOST_RELAPSES: Final = 4
"""That count. The detector itself looks less and less often whether such a worker is well, so that this is enough."""
_PLANNERS: Final[Cause] = ()
"""In place of a worker or a link, where planners were wrong."""


@dataclass(frozen=True)
class Shift:
    """How speeds differ from those that the plan in force was made for.

    Attributes:
        slower, faster: than then.
    """

    slower: frozenset[Cause] = frozenset()
    faster: frozenset[Cause] = frozenset()

    @classmethod
    def between(cls, then: Mapping[Cause, float], now: Mapping[Cause, float]) -> "Shift":
        """From these speeds to those; what is in neither is healthy."""
        change = {cause: now.get(cause, 1.0) - then.get(cause, 1.0) for cause in then.keys() | now.keys()}
        slower = frozenset(cause for cause, more in change.items() if more < 0)
        return cls(slower, frozenset(cause for cause, more in change.items() if more > 0))


def alike(one: Mapping[Cause, float], other: Mapping[Cause, float]) -> bool:
    """Whether the same ones are slow, and about as slow."""
    return one.keys() == other.keys() and all(abs(one[cause] - other[cause]) <= STEP + 1e-9 for cause in one)


@dataclass
class _Made:
    """A change that was made for slowness, and what it has brought.

    Attributes:
        cost_s: how long training stood still for it.
        saves_s: each iteration, while the slowness lasts.
        since: first iteration that is not counted yet.
        lasts: whether the slowness does.
        slow, well: iterations so far with it, and without it.
    """

    cost_s: float
    saves_s: float
    since: int
    lasts: bool = True
    slow: int = 0
    well: int = 0

    def turn(self, since: int, lasts: bool) -> None:
        """From an iteration on, the slowness lasts, or has passed."""
        passed = max(since - self.since, 0)
        if self.lasts:
            self.slow += passed
        else:
            self.well += passed
        self.since, self.lasts = max(since, self.since), lasts

    def net_cost_s(self, back_s: float, loses_s: float) -> float:
        """What it has cost more than it has saved, the way back included.

        Args:
            back_s: how long training stood still on the way back.
            loses_s: each iteration under this plan, while nobody is slow.
        """
        return self.cost_s + back_s + self.well * loses_s - self.slow * self.saves_s


@dataclass(frozen=True)
class _Wait:
    """How often it was in vain, at a time; each `half_life_s` that counts as once less."""

    doublings: float
    at: float
    half_life_s: float

    def left(self, now: float) -> float:
        return max(self.doublings - (now - self.at) / self.half_life_s, 0.0)


class Patience:
    """What was learned from the changes of one job."""

    def __init__(self) -> None:
        self._made: dict[Cause, _Made] = {}
        self._waits: dict[Cause, _Wait] = {}
        self._relapses: dict[Cause, int] = {}
        self._members: frozenset[int] = frozenset()

    def to_lose_s(self, shift: Shift, cost_s: float, now: float) -> float:
        """How much has to be lost before a change is made for a shift, which costs so much.

        Of several causes the one that is waited for least counts: nobody shall wait for others that come and go.
        """
        of_slower = [self._doublings(cause, now) for cause in shift.slower]
        of_faster = [min(self._relapses.get(cause, 0), MOST_RELAPSES) for cause in shift.faster]
        doublings = max(min([*of_slower, *of_faster], default=0.0), self._doublings(_PLANNERS, now))
        return min(cost_s * math.exp2(doublings), max(cost_s, MOST_LOST_S))

    def changed(self, shift: Shift, saves_s: float, cost_s: float, iteration: int, now: float) -> None:
        """A change was made.

        Args:
            shift: that it was made for.
            saves_s: what it saves in each iteration, by estimate.
            cost_s: how long training stood still.
            iteration: the last one before it.
            now: the time.
        """
        for cause in shift.faster & self._made.keys():
            made = self._made.pop(cause)
            made.turn(iteration + 1, made.lasts)
            net_cost_s = made.net_cost_s(cost_s, saves_s)
            if net_cost_s > 0:
                self._wait_longer(cause, max(net_cost_s, cost_s), now)
        for cause in shift.slower:
            self._made[cause] = _Made(cost_s, saves_s, iteration + 1)

    def heard(self, cause: Cause, since: int, slow: bool) -> None:
        """From an iteration on a worker or link is slow, or healthy."""
        if cause in self._made:
            self._made[cause].turn(since, slow)

    def relapsed(self, cause: Cause, times: int) -> None:
        """A worker became slow that has only looked well; so often in succession, or not at all."""
        self._relapses[cause] = times

    def misled(self, cost_s: float, now: float) -> None:
        """A change that planners were for, and that cost so much, has not paid, or could not be made."""
        self._wait_longer(_PLANNERS, cost_s, now)

    def forget_changes(self) -> None:
        """The plan in force is not the policy's: what it brings tells nothing of those before."""
        self._made.clear()

    def keep(self, members: Collection[int]) -> None:
        """Forget whoever is no member of an epoch; and what planners were wrong about, if there are other members."""
        before, self._members = self._members, frozenset(members)
        if self._members != before:
            self._waits.pop(_PLANNERS, None)
        self._waits = {cause: wait for cause, wait in self._waits.items() if self._members.issuperset(cause)}
        self._relapses = {cause: times for cause, times in self._relapses.items() if self._members.issuperset(cause)}

    def _doublings(self, cause: Cause, now: float) -> float:
        return self._waits[cause].left(now) if cause in self._waits else 0.0

    def _wait_longer(self, cause: Cause, wasted_s: float, now: float) -> None:
        self._waits[cause] = _Wait(self._doublings(cause, now) + 1.0, now, max(wasted_s, 1.0) / SHARE)
