# SPDX-License-Identifier: Apache-2.0
"""What follows from each message of an agent.

May import `plan`, `protocol` and pure modules of `control`.
"""

import signal

from megatron_resihp.control import exit_codes
from megatron_resihp.control.causes import ending
from megatron_resihp.control.coordination.actions import Action, Log, Notify, Phase, Reopen
from megatron_resihp.control.coordination.state_machine.changes import ChangesByChoice
from megatron_resihp.control.coordination.state_machine.ends import Ends
from megatron_resihp.control.coordination.state_machine.epochs import Epochs
from megatron_resihp.control.coordination.state_machine.state import State
from megatron_resihp.control.coordination.state_machine.worker_messages import WorkerMessages
from megatron_resihp.events import workers as events
from megatron_resihp.protocol.messages import (
    ConnectionLost,
    HeartbeatsMissing,
    LeaveRequest,
    NodeLost,
    NodesDown,
    NoticeUnheard,
    ProcessExited,
    SaveRequest,
    StopRequest,
    WordOfAgent,
    WorkerRestarted,
)
from megatron_resihp.protocol.notices import SaveOrder, WorkersGivenUp


class AgentMessages:
    """Answers the messages of all agents of one job."""

    def __init__(
        self, state: State, ends: Ends, changes: ChangesByChoice, epochs: Epochs, workers: WorkerMessages
    ) -> None:
        self._state = state
        self._ends = ends
        self._changes = changes
        self._epochs = epochs
        self._workers = workers

    def handle(self, message: WordOfAgent, now: float) -> list[Action]:
        """React to one message; arguments as of `Membership.handle`."""
        match message:
            case ProcessExited(worker) | HeartbeatsMissing(worker) | ConnectionLost(worker) if (
                self._state.reports.accounts.hear_of([worker])
            ):
                return self._epochs.decide(now)  # it was given up before
            case ProcessExited():
                return self._on_exited(message, now)
            case HeartbeatsMissing(worker, silence_s, time):
                return self._epochs.die({worker: f"no heartbeat for {silence_s:.1f} s"}, time, now)
            case NoticeUnheard():
                return self._on_unheard(message, now)
            case ConnectionLost(worker, time):
                return self._epochs.die({worker: "connection lost"}, time, now)
            case WorkerRestarted(worker, before):
                self._state.joining.heard_of(worker)
                return [Log(events.WorkerRestarted(restarted=worker, instead_of=before))]
            case NodeLost():
                return self._on_node_lost(message, now)
            case NodesDown(nodes):
                return self._on_down(nodes, now)
            case StopRequest(number):
                return self._ends.stop(number, f"stopped by signal {number}")
            case LeaveRequest():
                return self._on_leave(message, now)
            case SaveRequest():
                self._state.ending.saves += 1
                return [Notify(SaveOrder(self._state.ending.saves))]

    def _on_exited(self, message: ProcessExited, now: float) -> list[Action]:
        worker, code = message.worker, message.code
        if code == 0:
            return self._workers.ended(worker, now, by_word=False)
        if worker in self._state.dead:
            return []
        if code == exit_codes.FENCED:
            return self._epochs.die({worker: "fenced itself"}, message.time, now)
        ended = ending(code, message.cause)
        if code > 0:
            return self._workers.failed(worker, ended, code, now)
        return self._epochs.die({worker: ended}, message.time, now)

    def _on_unheard(self, message: NoticeUnheard, now: float) -> list[Action]:
        """No thread of the worker runs: its process is stopped, or hangs in a call that keeps Python's lock."""
        state, worker = self._state, message.worker
        if message.epoch != state.epoch or not state.awaits_report(worker):
            return []
        cause = f"did not hear within {message.silence_s:.1f} s that the epoch is broken"
        return [Notify(WorkersGivenUp((worker,), cause)), *self._epochs.die({worker: cause}, message.time, now)]

    def _on_node_lost(self, message: NodeLost, now: float) -> list[Action]:
        state, node = self._state, message.node
        state.joining.nodes.discard(node)
        known = {*range(state.job.size.workers), *state.living, *state.joining.waiting}
        workers = sorted(worker for worker in known if state.joining.node_of(worker) == node)
        accounts, ended = state.reports.accounts, state.dead.keys() | state.done
        accounts.lose(worker for worker in workers if worker not in ended or worker in accounts.late)
        actions = self._epochs.die({w: f"node lost: {message.cause}" for w in workers}, message.time, now)
        actions += self._epochs.decide(now)  # perhaps no death is news, but whose word is waited for
        return actions if state.phase is Phase.ENDED else [*actions, Reopen(node, state.joining.ids_for(node))]

    def _on_down(self, nodes: tuple[int, ...], now: float) -> list[Action]:
        """What was asked is answered; workers of these nodes can't be alive."""
        state = self._state
        state.reports.accounts.unanswered = False
        state.reports.accounts.hear_of([w for w in state.dead if state.joining.node_of(w) in nodes])
        return self._epochs.decide(now)

    def _on_leave(self, message: LeaveRequest, now: float) -> list[Action]:
        """A node is to be taken away in order; others were told so, too, if the whole job is to end."""
        state, node = self._state, message.node
        if state.ending.stop_signal:
            return []
        if state.phase is Phase.STARTING:
            return self._ends.stop(signal.SIGTERM, f"node {node} left")
        if not message.ordered:
            if most := self._most_are_told(node, now):
                return self._ends.stop(signal.SIGTERM, most)
            here = (worker for worker in state.living if state.joining.node_of(worker) == node)
            state.departures.due(here, state.limits.drain_s)
        state.departures.agents[node] = message.agent
        return self._changes.depart()

    def _most_are_told(self, node: int, now: float) -> str:
        """A signal tells a node to leave; in words, if it tells more than half of them."""
        state = self._state
        there = {state.joining.node_of(worker) for worker in state.living | state.joining.waiting}
        here = state.job.size.head | there
        told = state.departures.told_together(node, now)
        most = 2 * len(told) > len(here | told)
        return f"{len(told)} of {len(here | told)} nodes were told to end at once" if most else ""
