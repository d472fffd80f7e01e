# SPDX-License-Identifier: Apache-2.0
"""What a coordinator that takes over needs beside the state: what to publish again, and what others have been told.

Kept step by step, by whoever decides and by whoever reads what was decided. It has a bound but for what is remembered
of each worker that was lost. Pure; may import `events`, `protocol` and this package's modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from megatron_resihp.control.coordination.actions import Action, End, Log, Notify
from megatron_resihp.control.coordination.decisions.entries import PUBLISHED, Published, Snapshot, Step
from megatron_resihp.events.epochs import EpochStarted
from megatron_resihp.events.event import Event, stamped
from megatron_resihp.events.job import BatchGrown, Job, Model
from megatron_resihp.events.workers import NodeLeft, WorkerDead, WorkersLeft, WorkerWaiting
from megatron_resihp.protocol.logs import LogsWanted
from megatron_resihp.protocol.messages import NodeReport, WordOfAgent
from megatron_resihp.protocol.notices import ABOUT_AN_EPOCH, LAST_HOLDS
from megatron_resihp.protocol.published import EpochPlan, Go

_FACTS: Final = (Job, BatchGrown, Model, WorkerWaiting, WorkerDead, WorkersLeft, NodeLeft)
"""Events that planner and detector need; of the starts of epochs, the last one."""
LETTERS_KEPT: Final = 10_000
"""Of workers the ids of so many letters are known at least, and of all since the epoch before the last began."""
EPOCHS: Final = 3


@dataclass
class Handover:
    """What there is to hand over after some step.

    Attributes:
        began_at: Unix time of the first step; None: there was none.
        published: in its order, but for what nobody needs any more (see `Bulletin`).
        facts: what planner and detector have been told since the run began.
        last: what was to be logged last. It may not have been: a coordinator decides before it logs.
        end: of the job, if it has ended.
        letters: for each of the last epochs, the ids of those that have been decided about.
        from_agents: the ids of all that agents have sent, which they keep as long as the job lasts.
    """

    began_at: float | None = None
    published: list[Published] = field(default_factory=list)
    facts: list[Event] = field(default_factory=list)
    last: tuple[Event, ...] = ()
    end: End | None = None
    letters: list[list[str]] = field(default_factory=lambda: [[]])
    from_agents: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, snapshot: Snapshot) -> Self:
        """As it was when a snapshot was made."""
        return cls(
            snapshot.began_at, list(snapshot.published), list(snapshot.facts), snapshot.last,
            letters=[list(each) for each in snapshot.letters], from_agents=list(snapshot.from_agents),
        )  # fmt: skip

    def note(self, step: Step, actions: Sequence[Action], epoch: int) -> None:
        """A step has been taken. `epoch`: the one that it has led to."""
        if self.began_at is None:
            self.began_at = step.now
        if step.letter is not None:
            (self.from_agents if isinstance(step.fed, WordOfAgent) else self.letters[-1]).append(step.letter)
        if isinstance(step.fed, NodeReport):
            self.letters[-1] += [each.letter for each in step.fed.survivors]
        self.last = tuple(stamped(action.event, step.now, epoch) for action in actions if isinstance(action, Log))
        for action in actions:
            if isinstance(action, Go):
                self._begin()
            if isinstance(action, PUBLISHED):
                self.published.append(action)
            elif isinstance(action, End):
                self.end = action
        if any(isinstance(event, EpochStarted) for event in self.last):
            self.facts = [event for event in self.facts if not isinstance(event, EpochStarted)]
        self.facts += [event for event in self.last if isinstance(event, (*_FACTS, EpochStarted))]

    def _begin(self) -> None:
        """An epoch begins: nobody needs what was published before the last one began, but for some."""
        begun = [place for place, each in enumerate(self.published) if isinstance(each, Go)]
        if begun:
            before, since = self.published[: begun[-1]], self.published[begun[-1] :]
            self.published = [*(each for each in before if self._holds(each)), *since]
        self.letters.append([])
        while len(self.letters) > EPOCHS and sum(map(len, self.letters[1:])) >= LETTERS_KEPT:
            del self.letters[0]

    def _holds(self, each: Published) -> bool:
        """Whether something from before the last epoch means anything yet."""
        match each:
            case EpochPlan():
                return each.epoch == 0  # in which workers that join start
            case Notify(notice) if isinstance(notice, LAST_HOLDS):
                notices = (other.notice for other in self.published if isinstance(other, Notify))
                return [other for other in notices if type(other) is type(notice)][-1] is notice
            case Notify(notice):
                return not isinstance(notice, ABOUT_AN_EPOCH)
        return isinstance(each, LogsWanted)
