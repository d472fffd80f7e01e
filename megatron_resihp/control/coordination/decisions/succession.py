# SPDX-License-Identifier: Apache-2.0
"""What a coordinator that takes over knows: all that the one before has decided, from its log.

Pure; may import `events`, `protocol` and this package's modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

from megatron_resihp.control.coordination.actions import End, Log, Notify
from megatron_resihp.control.coordination.decisions.reading import Decisions
from megatron_resihp.control.coordination.decisions.replay import Replay
from megatron_resihp.control.coordination.state_machine.state import State
from megatron_resihp.events.epochs import EpochStarted
from megatron_resihp.events.event import Event, stamped
from megatron_resihp.events.job import Job, Model, RunStarted
from megatron_resihp.events.workers import NodeLeft, WorkerDead, WorkersLeft, WorkerWaiting
from megatron_resihp.protocol.logs import LogsWanted
from megatron_resihp.protocol.messages import NodeReport
from megatron_resihp.protocol.published import EmergencyCheckpointOrder, EpochPlan, Go

Published = Notify | EpochPlan | EmergencyCheckpointOrder | Go | LogsWanted
"""What is carried out again: it leads to the same keys in a store, and the same logs, as it did before."""
LOGGED_S: Final = 5.0
"""Long after a decision its events have been logged."""
_FACTS: Final = (Job, Model, WorkerWaiting, WorkerDead, WorkersLeft, NodeLeft)
"""Events that planner and detector need; of the starts of epochs, the last one."""


@dataclass(frozen=True)
class Succession:
    """A log, folded.

    Attributes:
        replay: has done it.
        decisions: the log.
        published: in its order.
        facts: what planner and detector have been told.
        last: what was to be logged last. It may not have been: a coordinator decides before it logs.
        end: of the job, if it has ended.
    """

    replay: Replay
    decisions: Decisions
    published: tuple[Published, ...]
    facts: tuple[Event, ...]
    last: tuple[Event, ...] = ()
    end: End | None = None

    @property
    def state(self) -> State:
        return self.replay.membership.state

    @property
    def run(self) -> str:
        """The run's token."""
        return self.decisions.began.run

    @property
    def began_at(self) -> float:
        """Unix time of the first step."""
        return self.decisions.steps[0].now if self.decisions.steps else 0.0

    @property
    def letters(self) -> frozenset[str]:
        """The ids of those that have been decided about."""
        own = (step.letter for step in self.decisions.steps if step.letter is not None)
        reports = (step.fed for step in self.decisions.steps if isinstance(step.fed, NodeReport))
        return frozenset(chain(own, (each.letter for report in reports for each in report.survivors)))

    @property
    def awaited(self) -> frozenset[int]:
        """Nodes whose agents are to come back: the job needs their workers, may take them in, or is to tell them that
        it has ended."""
        state = self.state
        ended = state.done - state.departures.left
        return frozenset(state.joining.node_of(worker) for worker in state.living | ended | state.joining.waiting)


def succession(decisions: Decisions) -> Succession:
    """Fold a log.

    Raises:
        DifferenceError: this version decides otherwise.
    """
    replay = Replay(decisions.began)
    published: list[Published] = []
    facts: list[Event] = [_started(decisions)]
    last: tuple[Event, ...] = ()
    end: End | None = None
    for step, actions in replay.fold(decisions.steps):
        published += [action for action in actions if isinstance(action, Published)]
        end = next((action for action in actions if isinstance(action, End)), end)
        epoch = replay.membership.state.epoch
        last = tuple(stamped(action.event, step.now, epoch) for action in actions if isinstance(action, Log))
        if any(isinstance(event, EpochStarted) for event in last):
            facts = [event for event in facts if not isinstance(event, EpochStarted)]
        facts += [event for event in last if isinstance(event, (*_FACTS, EpochStarted))]
    return Succession(replay, decisions, tuple(published), tuple(facts), last, end)


def unlogged(last: Sequence[Event], logged: Sequence[Event]) -> list[Event]:
    """Those of `last` that were not logged any more, as the coordinator was lost.

    Args:
        logged: at the end of the log, some seconds of it at least.
    """
    if any(event.time > each.time + LOGGED_S for event in logged for each in last[:1]):
        return []  # it went on for long after that
    known = [replace(event, time=0.0) for event in logged]
    return [event for event in last if replace(event, time=0.0) not in known]


def _started(decisions: Decisions) -> RunStarted:
    size = decisions.began.size
    now = decisions.steps[0].now if decisions.steps else 0.0
    return RunStarted(
        time=now, world_size=size.workers, nproc_per_node=size.workers_per_node, nnodes=size.nodes,
        most_nodes=size.most_nodes,
    )  # fmt: skip
