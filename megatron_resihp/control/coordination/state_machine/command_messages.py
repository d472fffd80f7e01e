# SPDX-License-Identifier: Apache-2.0
"""What follows from each message of a command, which waits for the answer.

May import `plan`, `protocol` and pure modules of `control`.
"""

import signal

from megatron_resihp.control.coordination.actions import Action, Notify, Phase
from megatron_resihp.control.coordination.state_machine.changes import ChangesByChoice, reply
from megatron_resihp.control.coordination.state_machine.departures import named
from megatron_resihp.control.coordination.state_machine.ends import Ends
from megatron_resihp.control.coordination.state_machine.state import State
from megatron_resihp.control.replanning.change import ChangeRefused
from megatron_resihp.protocol.answers import Accepted, Answer, Refused
from megatron_resihp.protocol.messages import DrainRequest, EndRequest, PlanRequest, WordOfCommand
from megatron_resihp.protocol.notices import DrainOrder


class CommandMessages:
    """Answers the messages of all commands to one job."""

    def __init__(self, state: State, ends: Ends, changes: ChangesByChoice) -> None:
        self._state = state
        self._ends = ends
        self._changes = changes

    def handle(self, message: WordOfCommand) -> list[Action]:
        """React to one message; the replanner asks for plans, too."""
        match message:
            case PlanRequest():
                return self._changes.ask_for(message)
            case DrainRequest():
                return self._drain(message)
            case EndRequest():
                answer, actions = self._end(message)
                # First: the coordinator carries out nothing after an end.
                return [*reply(message.answer, answer), *actions]

    # ---- to leave

    def _drain(self, request: DrainRequest) -> list[Action]:
        state, departures = self._state, self._state.departures
        try:
            on_nodes = self._check_drain(request)
        except ChangeRefused as error:
            return reply(request.answer, Refused(str(error)))
        deadline_s = state.limits.drain_s if request.deadline_s is None else request.deadline_s
        departures.workers.update(request.workers)
        departures.due(on_nodes.union(request.workers), deadline_s)
        orders = [Notify(DrainOrder(tuple(sorted(on_nodes))))] if on_nodes else []
        actions = self._changes.depart()
        if state.ending.stop_signal:
            line = f"{state.ending.stop_reason}; the job ends after an iteration"
        else:
            who = named(request.nodes, request.workers)
            line = f"told to leave after an iteration: {who}; what has not left in {deadline_s:g} s counts as dead"
        return [*orders, *actions, *reply(request.answer, Accepted(line))]

    def _check_drain(self, request: DrainRequest) -> set[int]:
        """The workers on the nodes.

        Raises:
            ChangeRefused: these can't leave.
        """
        state = self._state
        here = state.living | state.joining.waiting
        if state.phase is Phase.STARTING:
            raise ChangeRefused("the job has not begun to train; end it with resihp stop")
        if state.phase is Phase.SAVING or state.job.trained or state.done or state.ending.stop_signal:
            raise ChangeRefused("the job is about to end")
        if state.job.size.head.intersection(request.nodes):
            raise ChangeRefused("node 0 has the coordinator and can't leave; end the job with resihp stop")
        for worker in request.workers:
            if worker not in here:
                raise ChangeRefused(f"worker {worker} is not in the job; resihp report says which are")
        for node in request.nodes:
            if not any(state.joining.node_of(worker) == node for worker in here):
                raise ChangeRefused(f"node {node} has no workers in the job; resihp report says which are")
        return {worker for worker in here if state.joining.node_of(worker) in request.nodes}

    # ---- to end

    def _end(self, request: EndRequest) -> tuple[Answer, list[Action]]:
        state = self._state
        job = state.job.description
        saves = job is not None and job.saves and state.phase is not Phase.STARTING
        if request.must_save and not saves:
            why = "has not begun to train" if state.phase is Phase.STARTING else "was started without --save"
            return Refused(f"the job {why}, and would save nothing; resihp stop without --save ends it"), []
        if state.phase is Phase.SAVING or state.ending.stop_signal:
            return Accepted("the job is ending already"), []
        saved = "and is saved" if saves else "and nothing is saved"
        actions = self._ends.stop(signal.SIGTERM, "stopped by resihp stop")
        return Accepted(f"the job ends after an iteration, {saved}"), actions
