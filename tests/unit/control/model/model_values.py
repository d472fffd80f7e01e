# SPDX-License-Identifier: Apache-2.0
"""Immutable values that the checker of the agreement is made of, and what makes them of the project's own objects.

May import `plan`, `protocol` and pure modules of `control`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, IntEnum
from typing import Any, NamedTuple

from megatron_resihp.plan import ParallelPlan, Shard
from megatron_resihp.protocol.messages import Message
from megatron_resihp.protocol.notices import Notice
from megatron_resihp.protocol.published import Decision
from megatron_resihp.protocol.records import IterationPhase, Outcome


class Violation(AssertionError):
    """The job does what the contract forbids."""


def frozen(value: Any) -> Hashable:
    """A value by which equal ones are known; it holds no dict and no set that can change."""
    if value is None or isinstance(value, int | float | str | Enum | ParallelPlan):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(frozen, value))
    if isinstance(value, set | frozenset):
        return frozenset(value)
    if isinstance(value, Mapping):
        return tuple(sorted((key, frozen(each)) for key, each in value.items()))
    assert is_dataclass(value), f"{type(value).__name__} has no frozen form"
    return (type(value), *(frozen(getattr(value, field.name)) for field in fields(value)))


class Frozen[T: Message | Decision]:
    """A message or a decision, equal to those of equal content."""

    __slots__ = ("_hash", "_key", "value")

    def __init__(self, value: T) -> None:
        self.value = value
        self._key = frozen(value)
        self._hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr(self.value)


class Mode(IntEnum):
    """What a worker does.

    TRAINING: it is in train(), or steps with the others as a standby.
    FINISHING: it is in the call after train(), which all working members make together.
    SUSPECTING: it has told of an error, and waits until the epoch is broken.
    REPORTED: it has told what it has, and waits for what comes next.
    BUILDING: it has entered an epoch and taken the committed step; the epoch's groups and state are on their way.
    READY: it waits for Go.
    JOINING: it was started anew, and waits until a plan has it in it.
    SAVED: it has written what it was told to, and waits for the end.
    DONE: its script has come to its end.
    OUT: it was told to end.
    DEAD: it was killed.
    CUT: its node is lost without a word. It may be alive, and can't reach the coordinator.
    """

    TRAINING = 0
    FINISHING = 1
    SUSPECTING = 2
    REPORTED = 3
    BUILDING = 4
    READY = 5
    JOINING = 6
    SAVED = 7
    DONE = 8
    OUT = 9
    DEAD = 10
    CUT = 11


GONE = frozenset({Mode.DONE, Mode.OUT, Mode.DEAD, Mode.CUT})
"""Workers that do nothing any more."""
FINAL = 1000
"""Stands for an iteration in `Worker.sent`: that of the call after train()."""
NO_EPOCH = -1


class Worker(NamedTuple):
    """One worker.

    Attributes:
        id: its own.
        epoch: that it is in.
        cursor: the iteration that its loop begins next.
        iteration, stage, outcomes, counters: of its record; counters are known by their iteration alone.
        works: it runs the training loop.
        position: of the calls that all make together, the one that it is in.
        steps: the steps that its state has taken: the epoch in which each was agreed on. None: it has no state.
        shards: what that is the state of.
        sent: what it has brought into an agreement last: epoch, iteration, and the change that it had heard of.
        change: number of the change of plan that it has heard of in this epoch; 0: none.
        leaving: all have agreed to leave for it.
        broken: later epochs that it has heard to be broken.
        replay: the outcome of a step that it has taken and is to tell Megatron of again.
        moved: what `steps` is to become at Go.
    """

    id: int
    mode: Mode
    epoch: int = 0
    cursor: int = 1
    iteration: int = 0
    stage: IterationPhase = IterationPhase.COMPUTE
    outcomes: tuple[tuple[int, Outcome], ...] = ()
    counters: tuple[int, ...] = ()
    works: bool = False
    position: int = 0
    steps: tuple[int, ...] | None = None
    shards: tuple[Shard, ...] = ()
    sent: tuple[int, int, int] | None = None
    change: int = 0
    leaving: bool = False
    broken: frozenset[int] = frozenset()
    replay: Outcome | None = None
    moved: tuple[int, ...] | None = None

    @property
    def computes(self) -> bool:
        """Whether it is in an iteration whose step is not taken."""
        return self.mode is Mode.TRAINING and self.cursor == self.iteration + 1 and self.stage < IterationPhase.AGREED


class Seat(NamedTuple):
    """A worker and its connection, which keeps the order of what each side says.

    Attributes:
        words: what it and its agent have said, which the coordinator has not heard.
        resent: the first of them has been heard already: its sender has lost the connection and sends it again.
        notices: what it has not heard of the coordinator.
    """

    worker: Worker
    words: tuple[Frozen[Any], ...] = ()
    resent: bool = False
    notices: tuple[Notice, ...] = ()


class Published(NamedTuple):
    """What the store has for all.

    Attributes:
        decisions: by epoch.
        begun: epochs that Go was said for.
        deposed: number of the state of a coordinator that goes on beside the one that has taken over.
    """

    decisions: tuple[Frozen[Any], ...] = ()
    begun: frozenset[int] = frozenset()
    deposed: int | None = None

    def decision(self, epoch: int) -> Decision | None:
        """What was decided for an epoch, if it was."""
        found: Decision | None = self.decisions[epoch].value if epoch < len(self.decisions) else None
        return found


@dataclass(frozen=True)
class Scope:
    """How large a job is, and how often each fault may happen to it.

    Attributes:
        workers, pipeline, iterations: of the job.
        deaths: processes that are killed.
        silences: living workers that their agent takes for dead.
        errors: connections that fail while both ends live.
        interruptions: a worker is thrown out between an agreement and its step.
        late: waits of the coordinator that run out though others could still act.
        joins: workers that are started anew.
        resent: messages that are sent twice.
        saves: checkpoints that are asked for.
        partitions: nodes that are lost without a word. Where there may be any, each worker has a node of its own.
        manager: the cluster's knows that lost nodes are down.
        takeovers: coordinators that are lost, each followed by another.
        deposed: messages that a coordinator hears which was only stopped for a while, and has been followed.
    """

    workers: int
    pipeline: int = 1
    iterations: int = 2
    deaths: int = 0
    silences: int = 0
    errors: int = 0
    interruptions: int = 0
    late: int = 0
    joins: int = 0
    resent: int = 0
    saves: int = 0
    partitions: int = 0
    manager: bool = False
    takeovers: int = 0
    deposed: int = 0


class Faults(NamedTuple):
    """How often each may still happen; see `Scope`."""

    deaths: int
    silences: int
    errors: int
    interruptions: int
    late: int
    joins: int
    resent: int
    saves: int
    partitions: int
    takeovers: int
    deposed: int
