# SPDX-License-Identifier: Apache-2.0
"""Folds a log of decisions through a fresh state machine, and says where that decides otherwise than the run did.

May import `plan`, `planner`, `events` and this package's modules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from megatron_resihp.control.coordination.actions import Action
from megatron_resihp.control.coordination.decisions.entries import (
    CoordinatorFailed,
    Fed,
    Found,
    NotFound,
    Passed,
    PlannerSaid,
    Snapshot,
    Start,
    Step,
    TakenOver,
    began_of,
    digest_of,
    names_of,
)
from megatron_resihp.control.coordination.decisions.handover import Handover
from megatron_resihp.control.coordination.decisions.plain_state import state_from
from megatron_resihp.control.coordination.state_machine.membership import Membership
from megatron_resihp.control.replanning.recovery.inventory import Survivors
from megatron_resihp.control.replanning.recovery.next_plan import NextPlan
from megatron_resihp.events.event import Event
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.planner import NoPlanError


class DifferenceError(Exception):
    """A replay does what the run did not; the message names the step."""


class _PlannerFailed(Exception):
    """The planner had an error of its own; the text is as of `told`."""


class Replay:
    """A fresh state machine, which hears from the planner what the run heard.

    Args:
        start: of the log.

    Attributes:
        began: how the run began.
        membership: in the state that the steps so far have led to.
        handover: what there is beside that.
        steps: how many these are.
        now: Unix time of the last one.
        planner: is asked, once a run goes on where its log ends; until then the log answers.
    """

    def __init__(self, start: Start) -> None:
        snapshot = start if isinstance(start, Snapshot) else None
        self.began = began = began_of(start)
        self.membership = Membership(
            began.size, began.limits, lambda survivors: self.planner(survivors),
            None if snapshot is None else state_from(snapshot.state),
        )  # fmt: skip
        self.handover = Handover() if snapshot is None else Handover.of(snapshot)
        self.steps, self.now = (0, 0.0) if snapshot is None else (snapshot.number, snapshot.now)
        self.planner: NextPlan = self._plan
        self._answers: deque[PlannerSaid] = deque()
        self._error: str | None = None

    def fold(self, steps: Iterable[Step]) -> Iterator[tuple[Step, list[Action]]]:
        """Each step, and what it decides.

        Raises:
            DifferenceError: at the first one that decides otherwise than in the run.
        """
        for step in steps:
            actions = self._take(step)
            self.steps, self.now = step.number, step.now
            self.handover.note(step, actions, self.membership.state.epoch)
            yield step, actions

    def _take(self, step: Step) -> list[Action]:
        self._answers, self._error = deque(step.answers), step.error
        self.membership.progressed(step.reached or 0, step.page)
        actions: list[Action] = []
        error = None
        try:
            actions = feed(self.membership, step.fed, step.now)
        except _PlannerFailed as raised:
            error = str(raised)
        except Exception as raised:
            error = told(raised)
        if self._answers:
            raise DifferenceError(f"{_at(step)}: the run asked the planner, the replay did not")
        if (digest_of(actions), error) != (step.digest, step.error):
            here, there = names_of(actions), step.actions
            same = f"{_said(here, error)} with other contents" if (here, error) == (there, step.error) else ""
            raise DifferenceError(
                f"{_at(step)}: the run did {_said(there, step.error)}, the replay {same or _said(here, error)}"
            )
        return actions

    def _plan(self, survivors: Survivors) -> tuple[ParallelPlan, list[Event]]:
        match self._answers.popleft() if self._answers else None:
            case Found(plan, events):
                return plan, list(events)
            case NotFound(reason, missing):
                raise NoPlanError(reason, missing)
        if self._error is not None:
            raise _PlannerFailed(self._error)
        raise LookupError("the run did not ask the planner here")


def feed(membership: Membership, fed: Fed, now: float) -> list[Action]:
    """What the state machine decides."""
    match fed:
        case Passed(seconds):
            return membership.tick(seconds, now)
        case CoordinatorFailed(reason, unpublished):
            return membership.save_and_end(reason, now, unpublished)
        case TakenOver(by):
            return membership.take_over(by, now)
        case _:
            return membership.handle(fed, now)


def told(error: Exception) -> str:
    """An error as the log has it."""
    return f"{type(error).__name__}: {error}"


def _at(step: Step) -> str:
    return f"step {step.number} ({type(step.fed).__name__})"


def _said(names: tuple[str, ...], error: str | None) -> str:
    return f"fail with {error}" if error else ", ".join(names) or "nothing"
