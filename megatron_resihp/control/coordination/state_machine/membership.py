# SPDX-License-Identifier: Apache-2.0
"""The front of the state machine: messages, and waits that run out, become actions.

May import `protocol`, `events` and this package's other modules.
"""

from collections.abc import Iterable
from typing import Final

from megatron_resihp.control import exit_codes
from megatron_resihp.control.coordination.actions import Action, Limits, Log, Notify, Phase, Reopen
from megatron_resihp.control.coordination.state_machine.agent_messages import AgentMessages
from megatron_resihp.control.coordination.state_machine.changes import ChangesByChoice
from megatron_resihp.control.coordination.state_machine.command_messages import CommandMessages
from megatron_resihp.control.coordination.state_machine.ends import Ends
from megatron_resihp.control.coordination.state_machine.epochs import Epochs
from megatron_resihp.control.coordination.state_machine.plans import Plans
from megatron_resihp.control.coordination.state_machine.slowdowns import Slowdowns
from megatron_resihp.control.coordination.state_machine.state import Job, State
from megatron_resihp.control.coordination.state_machine.worker_messages import WorkerMessages
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.replanning.recovery.next_plan import NextPlan, uniform_or_less
from megatron_resihp.events.job import CoordinatorReplaced
from megatron_resihp.protocol.logs import Place
from megatron_resihp.protocol.messages import SlowdownRequest, WordOfAgent, WordOfCommand, WordOfWorker
from megatron_resihp.protocol.notices import ValidationOrder

RETURN_S: Final = 60.0
"""How much longer survivors may take to report to a coordinator that has taken over, or to save: they have to find it
first."""
Input = WordOfWorker | WordOfAgent | WordOfCommand | SlowdownRequest | ValidationOrder
"""What is decided about: messages, and the detector's order to measure, which all workers are to hear of."""


class Membership:
    """Feed it with `handle` and `tick`; carry out the actions that they return.

    Args:
        next_plan: plans when workers have died.
        state: to go on with; None: the job begins.

    Attributes:
        state: what it knows; only to be read.
    """

    def __init__(
        self, size: JobSize, limits: Limits | None = None, next_plan: NextPlan = uniform_or_less,
        state: State | None = None,
    ) -> None:  # fmt: skip
        self.state = state or State(Job(size), limits or Limits())
        plans = Plans(self.state, next_plan)
        self._ends = Ends(self.state, plans)
        self._changes = changes = ChangesByChoice(self.state, plans, self._ends)
        self._epochs = Epochs(self.state, plans, self._ends, changes)
        self._workers = WorkerMessages(self.state, self._ends, changes, self._epochs)
        self._agents = AgentMessages(self.state, self._ends, changes, self._epochs, self._workers)
        self._commands = CommandMessages(self.state, self._ends, changes)
        self._slowdowns = Slowdowns(self.state)

    def handle(self, message: Input, now: float) -> list[Action]:
        """React to one message.

        Args:
            message: as `door` lets through.
            now: Unix time, for events; waits are bounded by what `tick` is told.
        """
        if self.state.phase is Phase.ENDED:
            return []
        match message:
            case ValidationOrder():
                return [Notify(message)]
            case SlowdownRequest():
                return self._slowdowns.ask_for(message)
        if isinstance(message, WordOfWorker):
            return self._workers.handle(message, now)
        if isinstance(message, WordOfCommand):
            return self._commands.handle(message)
        return self._agents.handle(message, now)

    def tick(self, passed_s: float, now: float) -> list[Action]:
        """Give up the workers that a bounded wait has run out for, and take in those that a bad link kept out.

        Args:
            passed_s: since the last call, as far as messages of that time have been handled.
        """
        good_again = self.state.reports.links.passed(passed_s)
        over = self._wait_over(passed_s, now) + self._drains_over(passed_s, now)
        return over + (self._changes.grow() if good_again else [])

    def _wait_over(self, passed_s: float, now: float) -> list[Action]:
        """The wait of this phase."""
        state = self.state
        if state.left_s is None:
            return []
        state.left_s -= passed_s
        if state.left_s > 0:
            return []
        state.left_s = None
        match state.phase:
            case Phase.REPORTING:
                return self._reports_late(now)
            case Phase.BUILDING:
                # Most members wait for one that hangs. That one will not report either, and is given up then.
                names = ", ".join(str(worker) for worker in sorted(state.living - set(state.ready)))
                cause = f"not ready within {state.limits.build_s:g} s: {names}"
                return self._epochs.break_epoch(cause, now, probe=True)
            case Phase.SAVING:
                return self._ends.end_saved()
        return []

    def _reports_late(self, now: float) -> list[Action]:
        state = self.state
        if state.reports.accounts.waiting:
            state.reports.accounts.over = True
            return self._epochs.decide(now)
        if state.changes.under_way is not None:
            number, bound = state.changes.under_way.number, state.limits.leave_s
            return self._epochs.break_epoch(f"not all have left for change {number} within {bound:g} s", now)
        late = state.living - set(state.reports.records)
        return self._epochs.give_up(late, f"did not report within {state.limits.report_s:g} s", now)

    def _drains_over(self, passed_s: float, now: float) -> list[Action]:
        """What was told to leave, and has not in time, counts as dead; not where all are to end."""
        state = self.state
        late = state.departures.late(passed_s, state.living)
        goes_on = state.phase in (Phase.RUNNING, Phase.REPORTING, Phase.BUILDING) and not state.ending.stop_signal
        if not late or not goes_on:
            return []
        return self._epochs.give_up(late, "did not leave in time", now, for_good=True)

    def progressed(self, iteration: int, page: Place | None = None) -> None:
        """This iteration is done. `page`: up to which Megatron's log has come; None: that is not said."""
        self.state.job.progressed(iteration)
        if page is not None:
            self.state.job.pages.last = page

    def take_over(self, by: str, now: float) -> list[Action]:
        """Go on in the place of a coordinator that was lost, whose every decision this state machine knows.

        What others had told it without an answer they tell again. So an epoch that is trained in goes on. One that was
        being built can't be: where its groups were to meet is gone. Before the first one the job ends, as after a
        death. If it has ended, nothing is left to decide. Places of absent nodes are offered again: the one before may
        have decided so, and been lost before it could.

        Args:
            by: who does, in words.
        """
        state = self.state
        if state.phase is Phase.ENDED:
            return []
        state.job.pages.begin_again()
        absent = set(range(state.job.size.most_nodes)) - state.job.size.head - state.joining.nodes
        told: list[Action] = [Log(CoordinatorReplaced(by=by))]
        match state.phase:
            case Phase.STARTING:
                before = "before the first iteration" if state.job.shape else "while workers set up"
                return told + self._ends.end(exit_codes.RETRY, f"the coordinator was lost {before}")
            case Phase.BUILDING:
                told += self._epochs.break_epoch("the coordinator was lost while this epoch was built", now)
            case Phase.REPORTING:
                # What was asked about lost nodes is asked again, and with it begins what may be waited for.
                state.reports.accounts.begin()
                by_choice = state.changes.under_way is not None
                state.left_s = state.limits.leave_s if by_choice else state.limits.report_s
                told += self._epochs.decide(now)
            case Phase.SAVING:
                state.left_s = state.limits.save_s
        if state.phase in (Phase.REPORTING, Phase.SAVING) and state.left_s is not None:
            state.left_s += RETURN_S
        return told + self._reopen(absent)

    def _reopen(self, nodes: Iterable[int]) -> list[Action]:
        """Let these nodes come, with ids that none of their workers has had, if the job goes on for long enough."""
        state = self.state
        ends = state.ending.save_reason or state.ending.stop_signal
        if ends or state.phase not in (Phase.RUNNING, Phase.REPORTING, Phase.BUILDING):
            return []
        return [Reopen(node, state.joining.ids_for(node)) for node in sorted(nodes)]

    def save_and_end(self, reason: str, now: float, unpublished: bool = False) -> list[Action]:
        """Have survivors save what they hold, since nothing better can be done, and end the job.

        Args:
            unpublished: the plan of this epoch could not be published: members wait for it, or for an order instead.
        """
        state = self.state
        if state.phase is Phase.ENDED:
            return []
        if state.phase is Phase.STARTING or not state.living:
            return self._ends.end(exit_codes.RETRY, reason)
        state.ending.save_reason, state.changes.waiting = reason, []
        if state.phase is Phase.SAVING:
            return []
        if unpublished and state.phase is Phase.BUILDING:
            state.phase, state.epoch, state.left_s = Phase.REPORTING, state.epoch - 1, state.limits.report_s
        return self._epochs.break_epoch(reason, now) + self._epochs.decide(now)
