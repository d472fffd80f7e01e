# SPDX-License-Identifier: Apache-2.0
"""The state machine of a job, all of whose steps are handed to a log before anything of them is carried out.

May import `plan`, `planner`, `protocol`, `events` and this package's modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Final, Self

from megatron_resihp.control.coordination.actions import Action, Limits, Phase
from megatron_resihp.control.coordination.decisions.entries import (
    ENTRIES,
    Began,
    CoordinatorFailed,
    Fed,
    Found,
    NotFound,
    Passed,
    PlannerSaid,
    Snapshot,
    Step,
    TakenOver,
    digest_of,
    line_of,
    line_of_step,
    names_of,
)
from megatron_resihp.control.coordination.decisions.handover import Handover
from megatron_resihp.control.coordination.decisions.plain_state import plain_state
from megatron_resihp.control.coordination.decisions.replay import Replay, feed, told
from megatron_resihp.control.coordination.state_machine.membership import Input, Membership
from megatron_resihp.control.coordination.state_machine.state import State
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.replanning.recovery.inventory import Survivors
from megatron_resihp.control.replanning.recovery.next_plan import NextPlan, uniform_or_less
from megatron_resihp.events.event import Event
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.planner import NoPlanError
from megatron_resihp.protocol.logs import LogPage, Place
from megatron_resihp.version import __version__

MOST_UNWRITTEN: Final = 1 << 24
"""Characters of lines that wait for the next action. What is written at once must be readable at once."""


class UnrecordedError(Exception):
    """A log can't take what was decided. So nothing of it may be carried out, and nothing more be decided."""


Write = Callable[[Sequence[str]], None]
"""Takes lines of a log (`entries.line_of`), in their order; may raise UnrecordedError."""


class Recorded:
    """As `Membership`.

    What has led to actions is written before these are returned. What has led to none is written with what comes next,
    or by `write_down`: thousands of workers may report at once, and only the last of these reports decides something.

    Args:
        run: the run's token.
    """

    def __init__(
        self,
        size: JobSize,
        limits: Limits | None = None,
        next_plan: NextPlan = uniform_or_less,
        write: Write = lambda lines: None,
        run: str = "",
    ) -> None:
        membership = Membership(size, limits, self._plan)
        self._began, self._handover = Began(__version__, size, membership.state.limits, run), Handover()
        self._go_on(membership, 0, 0.0, next_plan, write)
        write([line_of(self._began)])

    @classmethod
    def after(cls, replay: Replay, next_plan: NextPlan, write: Write) -> Self:
        """The state machine that has folded a log, and goes on where that ends."""
        going_on = cls.__new__(cls)
        going_on._began, going_on._handover = replay.began, replay.handover
        going_on._go_on(replay.membership, replay.steps, replay.now, next_plan, write)
        replay.planner = going_on._plan
        return going_on

    def _go_on(
        self, membership: Membership, number: int, noted_at: float, next_plan: NextPlan, write: Write
    ) -> None:  # fmt: skip
        self._membership = membership
        self._number, self._noted_at = number, noted_at
        self._next_plan = next_plan
        self._write = write
        self._lines: list[str] = []
        self._unwritten = 0
        self._answers: list[PlannerSaid] = []
        self._passed_s = 0.0
        job = self.state.job
        self._reached, self._page = job.reached, job.pages.last

    @property
    def state(self) -> State:
        """What it knows; only to be read."""
        return self._membership.state

    def handle(self, message: Input, now: float, letter: str | None = None, said: str = "") -> list[Action]:
        """React to one message. A page of the log decides nothing: where it belongs is noted with the next step.

        Args:
            letter: the id of what brought it.
            said: its text; see `wire.Letter`.
        """
        if isinstance(message, LogPage):
            return self._membership.handle(message, now)
        return self._after_time(message, now, letter, said)

    def tick(self, passed_s: float, now: float) -> list[Action]:
        """Time has passed.

        What nothing waits for is not noted. What decides nothing yet is noted at once with what comes next: a link that
        has failed is remembered for an hour, in which there may be nothing else to write, and etcd may be away.
        """
        quiet_s = self.state.quiet_s
        self._passed_s = self._passed_s + passed_s if quiet_s < inf else 0.0
        return self._take_time(now) if self._passed_s >= quiet_s else []

    def progressed(self, iteration: int) -> None:
        """A worker has told that this iteration is done; noted with the next step."""
        self._membership.progressed(iteration)

    def save_and_end(self, reason: str, now: float, unpublished: bool = False) -> list[Action]:
        """Have survivors save what they hold, and end the job."""
        return self._after_time(CoordinatorFailed(reason, unpublished), now)

    def take_over(self, by: str, now: float) -> list[Action]:
        """Go on in the place of a coordinator that was lost; when this returns, that is written.

        While only a failed link was remembered, the one before has not noted how much time passed (see `tick`). So the
        time since its last step counts, by the clocks of both.
        """
        quiet_s = 0.0 if self.state.phase is Phase.ENDED else self.state.quiet_s
        self._passed_s = min(max(0.0, now - self._noted_at), quiet_s) if quiet_s < inf else 0.0
        actions = self._after_time(TakenOver(by), now)
        self.write_down()
        return actions

    def write_down(self) -> None:
        """Write what was decided about and is not written yet."""
        if self._lines:
            lines, self._lines, self._unwritten = self._lines, [], 0
            self._write(lines)

    @property
    def is_settled(self) -> bool:
        """Whether training goes on, and nothing is under way: a snapshot is smallest then."""
        return self.state.phase is Phase.RUNNING and self.state.changes.under_way is None

    def snapshot(self) -> str:
        """A line that may stand for all that were written so far.

        Raises:
            MalformedError: it could not be read back.
        """
        self.write_down()
        told = self._handover
        line = line_of(Snapshot(
            self._began, self._number, self._noted_at, plain_state(self.state), told.began_at, tuple(told.published),
            tuple(told.facts), told.last, tuple(map(tuple, told.letters)), tuple(told.from_agents),
        ))  # fmt: skip
        # What it stands for is deleted.
        ENTRIES.read(line)
        return line

    def _after_time(self, fed: Fed, now: float, letter: str | None = None, said: str = "") -> list[Action]:
        over = self._take_time(now) if self._passed_s else []
        return over + self._step(fed, now, letter, said)

    def _take_time(self, now: float) -> list[Action]:
        passed_s, self._passed_s = self._passed_s, 0.0
        return self._step(Passed(passed_s), now)

    def _step(self, fed: Fed, now: float, letter: str | None = None, said: str = "") -> list[Action]:
        job, self._answers = self.state.job, []
        reached = job.reached if job.reached != self._reached else None
        page = job.pages.last if job.pages.last != self._page else None
        try:
            actions = feed(self._membership, fed, now)
        except Exception as error:
            self._note(fed, now, letter, said, reached, page, [], told(error))
            self.write_down()
            raise
        self._note(fed, now, letter, said, reached, page, actions)
        if actions:
            self.write_down()
        return actions

    def _note(
        self, fed: Fed, now: float, letter: str | None, said: str, reached: int | None, page: Place | None,
        actions: list[Action], error: str | None = None,
    ) -> None:  # fmt: skip
        self._number, self._noted_at = self._number + 1, now
        self._reached, self._page = self.state.job.reached, self.state.job.pages.last
        answers, names, digest = tuple(self._answers), names_of(actions), digest_of(actions)
        step = Step(self._number, now, fed, letter, reached, page, answers, names, digest, error)
        self._handover.note(step, actions, self.state.epoch)
        line = line_of_step(step, said)
        self._lines.append(line)
        self._unwritten += len(line)
        if self._unwritten > MOST_UNWRITTEN:
            self.write_down()

    def _plan(self, survivors: Survivors) -> tuple[ParallelPlan, list[Event]]:
        try:
            plan, events = self._next_plan(survivors)
        except NoPlanError as error:
            self._answers.append(NotFound(str(error), error.missing))
            raise
        self._answers.append(Found(plan, tuple(events)))
        return plan, events
