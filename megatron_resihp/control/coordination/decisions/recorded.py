# SPDX-License-Identifier: Apache-2.0
"""The state machine of a job, all of whose steps are handed to a log before anything of them is carried out.

May import `plan`, `planner`, `protocol`, `events` and this package's modules.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_resihp.control.coordination.actions import Action, Limits
from megatron_resihp.control.coordination.decisions.entries import (
    Began,
    CoordinatorFailed,
    Entry,
    Fed,
    Found,
    NotFound,
    Passed,
    PlannerSaid,
    Step,
    digest_of,
    names_of,
)
from megatron_resihp.control.coordination.state_machine.membership import Input, Membership
from megatron_resihp.control.coordination.state_machine.state import State
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.replanning.inventory import Survivors
from megatron_resihp.control.replanning.next_plan import NextPlan, uniform_or_less
from megatron_resihp.events.event import Event
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.planner import NoPlanError
from megatron_resihp.protocol.logs import LogPage, Place
from megatron_resihp.version import __version__


class UnrecordedError(Exception):
    """A log can't take what was decided. So nothing of it may be carried out, and nothing more be decided."""


class Recorded:
    """As `Membership`.

    Args:
        write: takes what happened, in its order; may raise UnrecordedError.
    """

    def __init__(
        self,
        size: JobSize,
        limits: Limits | None = None,
        next_plan: NextPlan = uniform_or_less,
        write: Callable[[Entry], None] = lambda entry: None,
    ) -> None:
        self._membership = Membership(size, limits, self._plan)
        self._next_plan = next_plan
        self._write = write
        self._number = 0
        self._answers: list[PlannerSaid] = []
        job = self.state.job
        self._reached, self._page = job.reached, job.pages.last
        write(Began(__version__, size, self.state.limits))

    @property
    def state(self) -> State:
        """What it knows; only to be read."""
        return self._membership.state

    def handle(self, message: Input, now: float) -> list[Action]:
        """React to one message. A page of the log decides nothing: where it belongs is noted with the next step."""
        if isinstance(message, LogPage):
            return self._membership.handle(message, now)
        return self._step(message, now)

    def tick(self, passed_s: float, now: float) -> list[Action]:
        """Time has passed; what nothing waits for is not noted."""
        return self._step(Passed(passed_s), now) if self.state.awaits_time else self._membership.tick(passed_s, now)

    def progressed(self, iteration: int) -> None:
        """A worker has told that this iteration is done; noted with the next step."""
        self._membership.progressed(iteration)

    def save_and_end(self, reason: str, now: float, unpublished: bool = False) -> list[Action]:
        """Have survivors save what they hold, and end the job."""
        return self._step(CoordinatorFailed(reason, unpublished), now)

    def _step(self, fed: Fed, now: float) -> list[Action]:
        job, self._answers = self.state.job, []
        reached = job.reached if job.reached != self._reached else None
        page = job.pages.last if job.pages.last != self._page else None
        try:
            actions = feed(self._membership, fed, now)
        except Exception as error:
            self._note(fed, now, reached, page, [], told(error))
            raise
        self._note(fed, now, reached, page, actions)
        return actions

    def _note(
        self, fed: Fed, now: float, reached: int | None, page: Place | None, actions: list[Action],
        error: str | None = None,
    ) -> None:  # fmt: skip
        self._number += 1
        self._reached, self._page = self.state.job.reached, self.state.job.pages.last
        answers, names, digest = tuple(self._answers), names_of(actions), digest_of(actions)
        self._write(Step(self._number, now, fed, reached, page, answers, names, digest, error))

    def _plan(self, survivors: Survivors) -> tuple[ParallelPlan, list[Event]]:
        try:
            plan, events = self._next_plan(survivors)
        except NoPlanError as error:
            self._answers.append(NotFound(str(error), error.missing))
            raise
        self._answers.append(Found(plan, tuple(events)))
        return plan, events


def feed(membership: Membership, fed: Fed, now: float) -> list[Action]:
    """What the state machine decides."""
    match fed:
        case Passed(seconds):
            return membership.tick(seconds, now)
        case CoordinatorFailed(reason, unpublished):
            return membership.save_and_end(reason, now, unpublished)
        case _:
            return membership.handle(fed, now)


def told(error: Exception) -> str:
    """An error as the log has it."""
    return f"{type(error).__name__}: {error}"
