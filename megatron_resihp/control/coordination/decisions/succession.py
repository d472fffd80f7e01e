# SPDX-License-Identifier: Apache-2.0
"""What a coordinator that takes over knows: all that the one before has decided, from its log.

Pure; may import `events`, `protocol` and this package's modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from megatron_resihp.control.coordination.actions import End
from megatron_resihp.control.coordination.decisions.entries import Published
from megatron_resihp.control.coordination.decisions.reading import Decisions
from megatron_resihp.control.coordination.decisions.replay import Replay
from megatron_resihp.control.coordination.state_machine.state import State
from megatron_resihp.events.event import Event
from megatron_resihp.events.job import RunStarted

LOGGED_S: Final = 5.0
"""Long after a decision its events have been logged."""


@dataclass(frozen=True)
class Succession:
    """A log, folded.

    Attributes:
        replay: has done it.
        decisions: the log.
        published, facts, last, end: as of `Handover`; the start of the run is a fact, too.
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
        return self.replay.handover.began_at or 0.0

    @property
    def letters(self) -> frozenset[str]:
        """The ids of those that have been decided about and may come again."""
        told = self.replay.handover
        return frozenset().union(told.from_agents, *told.letters)

    @property
    def awaited(self) -> frozenset[int]:
        """Nodes whose agents are to come back."""
        return frozenset(self.state.joining.nodes)


def succession(decisions: Decisions) -> Succession:
    """Fold a log.

    Raises:
        DifferenceError: this version decides otherwise.
    """
    replay = Replay(decisions.start)
    for _ in replay.fold(decisions.steps):
        pass
    told = replay.handover
    facts = (_started(decisions, told.began_at or 0.0), *told.facts)
    return Succession(replay, decisions, tuple(told.published), facts, told.last, told.end)


def unlogged(last: Sequence[Event], logged: Sequence[Event]) -> list[Event]:
    """Those of `last` that were not logged any more, as the coordinator was lost.

    Args:
        logged: at the end of the log, some seconds of it at least.
    """
    if any(event.time > each.time + LOGGED_S for event in logged for each in last[:1]):
        return []  # it went on for long after that
    known = [replace(event, time=0.0) for event in logged]
    return [event for event in last if replace(event, time=0.0) not in known]


def _started(decisions: Decisions, at: float) -> RunStarted:
    size = decisions.began.size
    return RunStarted(
        time=at, world_size=size.workers, nproc_per_node=size.workers_per_node, nnodes=size.nodes,
        most_nodes=size.most_nodes,
    )  # fmt: skip
