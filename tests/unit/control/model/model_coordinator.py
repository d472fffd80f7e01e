# SPDX-License-Identifier: Apache-2.0
"""The project's own inbox and state machine, which can be put back into any state that they have been in.

Each reaction is computed once. May import `protocol`, `plan` and `control.coordination`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple

from model_values import Frozen, Scope, Violation, frozen

from megatron_resihp.control.coordination.actions import Action, AskDown, End, Limits, Notify, Phase
from megatron_resihp.control.coordination.inbox import Inbox
from megatron_resihp.control.coordination.state_machine.membership import Membership
from megatron_resihp.control.coordination.state_machine.state import State
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.plan import Chunk
from megatron_resihp.protocol.job import JobDescription
from megatron_resihp.protocol.messages import MESSAGES, JobStarted, Message, Ready
from megatron_resihp.protocol.notices import (
    EpochIsBroken,
    JobEnds,
    Notice,
    PlanChange,
    WorkerDismissed,
    WorkersGivenUp,
    WorkersTakenIn,
)
from megatron_resihp.protocol.published import EmergencyCheckpointOrder, EpochPlan, Go

MATTERS = EpochIsBroken | JobEnds | PlanChange | WorkerDismissed | WorkersGivenUp | WorkersTakenIn
"""Notices that change what a worker of the model does."""


class TakesOver:
    """Stands for a message: another coordinator takes over. What is under way is told to that one."""


TAKES_OVER = TakesOver()
LETTER = "sent twice"
"""The id of a message that its sender sends again. Others have none, so that states merge."""


class Reaction(NamedTuple):
    """What the coordinator does at once.

    Attributes:
        after: number of the state that it is in then.
        notices: for all workers.
        decisions: that are published.
        begun: epochs that Go is said for.
        end: of the job.
        asked: nodes of which it wants to know whether they are down.
    """

    after: int
    notices: tuple[Notice, ...] = ()
    decisions: tuple[Frozen[Any], ...] = ()
    begun: tuple[int, ...] = ()
    end: End | None = None
    asked: tuple[int, ...] = ()


class Known(NamedTuple):
    """What is asked of a state of the coordinator.

    Attributes:
        phase, epoch, dead, done, living: as of `State`.
        waits: a bounded wait is under way.
        saves: how often it has ordered a checkpoint.
    """

    phase: Phase
    epoch: int
    dead: frozenset[int]
    done: frozenset[int]
    living: frozenset[int]
    waits: bool
    saves: int


class _OneLetter:
    """Stands for a store in which one message is."""

    def __init__(self) -> None:
        self.text: str | None = None

    def take(self, key: str, wait_s: float) -> list[str]:
        text, self.text = self.text, None
        return [] if text is None else [text]


@dataclass(frozen=True)
class _Snapshot:
    parts: tuple[dict[str, Any], ...]
    recent: dict[str, None]


class CheckedCoordinator:
    """The coordinator of one job, from Go for epoch 0 on.

    Attributes:
        own: the job's own split into layers.
        known: what there is to know of each state, by its number; the job begins in state 0.
    """

    def __init__(self, scope: Scope) -> None:
        self.own = tuple(Chunk(stage, stage, stage + 1) for stage in range(scope.pipeline))
        self.known: list[Known] = []
        size = JobSize(scope.workers, 1) if scope.partitions else JobSize(1, scope.workers)
        self._membership = Membership(size, Limits())
        self._store = _OneLetter()
        self._inbox = Inbox(self._store, self._membership.state, lambda dropped: None)  # type: ignore[arg-type]
        self._numbers: dict[Hashable, int] = {}
        self._snapshots: list[_Snapshot] = []
        self._reactions: dict[tuple[int, Frozen[Any] | TakesOver | None, bool], Reaction] = {}
        self._now = 0
        self._start(scope)

    def _start(self, scope: Scope) -> None:
        replicas = scope.workers // scope.pipeline
        job = JobDescription(
            1, scope.pipeline, replicas, self.own, 8, False, True, train_iters=scope.iterations
        )  # fmt: skip
        self._membership.handle(JobStarted(0, job), 0.0)
        for worker in range(scope.workers):
            self._membership.handle(Ready(worker, 0, {}, (), 0, 0), 0.0)
        self._parts = list(_parts(self._membership.state))
        self._now = self._number()

    @property
    def state(self) -> State:
        """The state that it is in; only to be read."""
        return self._membership.state

    def react(self, number: int, letter: Frozen[Any] | TakesOver | None, resent: bool = False) -> Reaction:
        """What follows from a message, or from a wait that runs out.

        Args:
            number: of the state that it is in.
            letter: the message; None: there is none, and the wait is over.
            resent: its sender sends it twice.
        """
        key = (number, letter, resent)
        found = self._reactions.get(key)
        if found is None:
            self._restore(number)
            found = self._reactions[key] = self._reaction(self._handle(letter, resent))
        return found

    def _handle(self, letter: Frozen[Any] | TakesOver | None, resent: bool) -> list[Action]:
        membership = self._membership
        if isinstance(letter, TakesOver):
            return membership.take_over("another", 0.0)
        if letter is None:
            assert membership.state.left_s is not None
            return membership.tick(membership.state.left_s, 0.0)
        message: Message = letter.value
        if not resent:
            return membership.handle(message, 0.0)  # type: ignore[arg-type]
        self._store.text = MESSAGES.write(message, "the model", LETTER)
        heard = self._inbox.take()
        assert heard is not None
        return [action for each in heard for action in membership.handle(each, 0.0)]  # type: ignore[arg-type]

    def _reaction(self, actions: list[Action]) -> Reaction:
        notices = [action.notice for action in actions if isinstance(action, Notify)]
        decisions = tuple(Frozen(each) for each in actions if isinstance(each, EpochPlan | EmergencyCheckpointOrder))
        begun = tuple(action.epoch for action in actions if isinstance(action, Go))
        ends = [action for action in actions if isinstance(action, End)]
        asked = tuple(node for action in actions if isinstance(action, AskDown) for node in action.nodes)
        return Reaction(
            self._number(), tuple(each for each in notices if isinstance(each, MATTERS)), decisions, begun,
            ends[0] if ends else None, asked,
        )  # fmt: skip

    # ---- its states

    def _number(self) -> int:
        """The number of the state that it is in, and what is needed to come back to it."""
        parts = tuple({name: _copied(each) for name, each in _values(part)} for part in self._parts)
        recent: dict[str, None] = self._inbox._recent
        key = (tuple(tuple((name, frozen(each)) for name, each in part.items()) for part in parts), *recent)
        number = self._numbers.setdefault(key, len(self._numbers))
        if number == len(self._snapshots):
            self._snapshots.append(_Snapshot(parts, dict(recent)))
            state = self._membership.state
            self._check(state)
            self.known.append(Known(
                state.phase, state.epoch, frozenset(state.dead), frozenset(state.done), frozenset(state.living),
                state.left_s is not None, state.ending.saves,
            ))  # fmt: skip
        self._now = number
        return number

    def _restore(self, number: int) -> None:
        if number == self._now:
            return
        snapshot = self._snapshots[number]
        for part, values in zip(self._parts, snapshot.parts, strict=True):
            vars(part).update({name: _copied(each) for name, each in values.items()})
        self._inbox._recent = dict(snapshot.recent)
        self._now = number

    def _check(self, state: State) -> None:
        if state.plan is not None and state.living != set(state.plan.members) - state.dead.keys() - state.done:
            raise Violation(f"epoch {state.epoch} takes workers {sorted(state.living)} for its living members")
        if state.phase in (Phase.RUNNING, Phase.BUILDING) and state.plan is not None:
            gone = sorted(state.dead.keys() & set(state.plan.members))
            if gone:
                raise Violation(f"epoch {state.epoch} goes on with workers {gone}, which are given up")


def _parts(value: Any) -> Iterator[Any]:
    """The objects that the state is made of and that can change, each once."""
    found: dict[int, Any] = {id(value): value}
    waiting = [value]
    while waiting:
        part = waiting.pop()
        for _, each in _fields(part):
            if _can_change(each) and id(each) not in found:
                found[id(each)] = each
                waiting.append(each)
    return iter(found.values())


def _fields(part: Any) -> Iterator[tuple[str, Any]]:
    return iter(vars(part).items())


def _can_change(value: Any) -> bool:
    return is_dataclass(value) and not value.__dataclass_params__.frozen  # type: ignore[attr-defined]


def _values(part: Any) -> Iterator[tuple[str, Any]]:
    """What a part holds of itself; methods of other parts never change."""
    return ((name, each) for name, each in _fields(part) if not _can_change(each) and not callable(each))


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | set | list) else value
