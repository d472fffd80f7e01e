# SPDX-License-Identifier: Apache-2.0
"""The coordinator: feeds messages to the pure state machine in `membership` and carries out what it decides.

Runs in a thread of node 0's agent, never in a worker. May import `plan`, `protocol`, `events` and this package's
other modules; the event log's writer is handed in.
"""

import os
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final

from megatron_resihp.control import keys
from megatron_resihp.control.coordination.actions import (
    Action,
    AskDown,
    End,
    Limits,
    Log,
    Notify,
    Phase,
    Reopen,
    Reply,
)
from megatron_resihp.control.coordination.bulletin import Bulletin
from megatron_resihp.control.coordination.decisions.recorded import Recorded, UnrecordedError, Write
from megatron_resihp.control.coordination.decisions.succession import Succession
from megatron_resihp.control.coordination.door import Heard, Reported
from megatron_resihp.control.coordination.inbox import Inbox
from megatron_resihp.control.coordination.requests import Requests
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.replanning.recovery.next_plan import NextPlan, uniform_or_less
from megatron_resihp.control.transport.absence import Absence
from megatron_resihp.control.transport.sockets import StoreError
from megatron_resihp.control.transport.store.store import Store
from megatron_resihp.events.event import Event, stamped
from megatron_resihp.events.injections import Drill
from megatron_resihp.events.job import RunStarted
from megatron_resihp.events.training import Iteration
from megatron_resihp.events.workers import WorkerDead
from megatron_resihp.protocol.logs import LogPage, LogsWanted
from megatron_resihp.protocol.messages import NodesDown
from megatron_resihp.protocol.notices import Notice
from megatron_resihp.protocol.published import END, EmergencyCheckpointOrder, EpochPlan, Go, JobEnd
from megatron_resihp.protocol.wire import COORDINATOR

POLL_S = 0.5
"""How often bounded waits are checked when no message comes."""
AWAY_S = 5.0
"""A turn of the loop that took longer was held up: node 0 was stopped, or a plan was searched for. In that time no
message could be heard, and no wait has come closer to its end."""
MOST_AT_ONCE = 1000
"""How many messages are taken before bounded waits are checked again."""
GRACE_S: Final = 10.0
"""How long workers get to exit by themselves at the end."""
TERMINATE_S = 30.0
"""How long workers that only a signal reaches have to end, as under torchrun: they may save."""

FATAL: Final = ("kill", "stop")
"""Actions of fault injections that their victim does not survive."""


class Coordinator:
    """The coordinator of one job.

    Args:
        store: a connection of its own.
        write_event: takes the run's events, each with its time.
        size: of the job.
        command: what was started, for the log.
        limits: bounds of waiting.
        requests: what other threads on node 0 want.
        next_plan: plans when workers have died.
        reopen: lets a node that was lost, or was never there, come with workers of these ids.
        clock: seconds that bounded waits count; not to be set while the job runs.
        on_heard: called again and again, whenever all that has been said is heard.
        on_told: called with what all workers are told; must not block.
        write_log: takes what of Megatron's log is to be written; must not block.
        ask_down: asks which of these nodes are down, for an answer by `requests`; None: nobody knows.
        write_decision: takes what is decided and why, before it is carried out; as of `Recorded`.
        shorten: may let a snapshot, which it is handed what makes it, stand for all that was written.
        run: the run's token.
        before: what a coordinator has decided that was lost, which this one takes the place of; None: the job begins.
        is_logged: whether that one has written an event that a worker tells again.
    """

    def __init__(
        self,
        store: Store,
        write_event: Callable[[Event], None],
        size: JobSize,
        command: list[str],
        limits: Limits | None = None,
        requests: Requests | None = None,
        next_plan: NextPlan = uniform_or_less,
        reopen: Callable[[int, Sequence[int]], None] = lambda node, workers: None,
        clock: Callable[[], float] = time.monotonic,
        on_heard: Callable[[], None] = lambda: None,
        write_log: Callable[[LogsWanted | LogPage], None] = lambda part: None,
        ask_down: Callable[[Sequence[int]], None] | None = None,
        write_decision: Write = lambda lines: None,
        shorten: Callable[[Callable[[], str]], None] = lambda snapshot: None,
        run: str = "",
        before: Succession | None = None,
        on_told: Callable[[Notice], None] = lambda notice: None,
        is_logged: Callable[[Event], bool] = lambda event: False,
    ) -> None:
        self._store = store
        self._write_event = write_event
        self._before = before
        if before is None:
            self._membership = Recorded(size, limits, next_plan, write_decision, run)
        else:
            self._membership = Recorded.after(before.replay, next_plan, write_decision)
        self._shorten, self._is_logged = shorten, is_logged
        self._bulletin = Bulletin(store)
        letters = frozenset[str]() if before is None else before.letters
        self._inbox = Inbox(store, self._membership.state, self._log, letters)
        self._name = f"process {os.getpid()} on {socket.gethostname()}"
        self._command = command
        self._reopen = reopen
        self._requests = requests or Requests()
        self._struck: dict[int, float] = {}
        self._first: list[Action] = []
        self._to_do: deque[Action] = deque()
        self._doing: Action | None = None
        self._clock = clock
        self._on_heard = on_heard
        self._on_told = on_told
        self._write_log = write_log
        self._ask_down = ask_down or self._say_none_down
        self._ticked_at = clock()
        self._absence = Absence(AWAY_S)

    def take_over(self) -> None:
        """Take the place of the coordinator before, and publish again what that one has.

        If that one has decided on the job's end, `run` tells of it: it may have been lost before others were told.

        Raises:
            UnrecordedError: that can't be kept, as another may have; nothing is published then.
            StoreError: the store is gone.
        """
        assert self._before is not None
        try:
            self._first = self._membership.take_over(self._name, time.time())
        except (StoreError, UnrecordedError):
            raise
        except Exception as error:
            self._first = self._fail(error)
        if self._before.end is not None:
            self._first.append(self._before.end)
        for action in self._before.published:
            self._carry_out(action)

    def run(self) -> int:
        """Serve until the job is over; returns the exit code of the job.

        After an error of its own it has survivors write what they hold, and ends the job. Where another has led the
        job before, `take_over` comes first.

        Raises:
            StoreError: the store is gone.
            UnrecordedError: a decision could not be kept; nothing of it has been carried out.
            Exception: a second error, or one at the end.
        """
        try:
            if self._before is None:
                self._begin()
            return self._serve(self._first)
        except (StoreError, UnrecordedError):
            raise
        except Exception as error:
            if self._membership.state.phase is Phase.ENDED:
                raise  # nothing would come any more
            saving = self._fail(error)
        return self._serve(saving)

    def _fail(self, error: Exception) -> list[Action]:
        """What is done after an error of this coordinator's own."""
        traceback.print_exc()
        reason = f"the coordinator failed: {type(error).__name__}: {error}"
        return self._membership.save_and_end(reason, time.time(), unpublished=isinstance(self._doing, EpochPlan))

    def _begin(self) -> None:
        size = self._membership.state.job.size
        self._log(RunStarted(
            world_size=size.workers, nproc_per_node=size.workers_per_node, nnodes=size.nodes,
            most_nodes=size.most_nodes, command=tuple(self._command),
        ))  # fmt: skip

    def _serve(self, actions: list[Action]) -> int:
        while True:
            for decided in chain([actions], self._turn()):
                self._to_do.extend(decided)
                while self._to_do:
                    self._doing = self._to_do.popleft()
                    code = self._carry_out(self._doing)
                    if code is not None:
                        return code
                self._doing = None
            actions = []

    def _turn(self) -> Iterator[list[Action]]:
        """Take all messages that are there, and only then find out what is late."""
        taken = self._inbox.take(POLL_S)
        now = self._clock()
        if taken is not None:
            yield self._react_to(taken)
        for _ in range(MOST_AT_ONCE):
            if (taken := self._inbox.take()) is None:
                self._membership.write_down()
                self._on_heard()
                break
            yield self._react_to(taken)
        passed_s, self._ticked_at = now - self._ticked_at, now
        yield self._membership.tick(passed_s - self._absence.before(now), time.time())
        for request in self._requests.take():
            yield self._membership.handle(request, time.time())
        self._membership.write_down()
        if self._membership.is_settled:
            self._shorten(self._membership.snapshot)

    def _react_to(self, taken: list[Heard]) -> list[Action]:
        return [action for message in taken for action in self._react(message)]

    def _react(self, message: Heard) -> list[Action]:
        if isinstance(message, Reported):
            self._write_events(message)
            return []
        return self._membership.handle(message, time.time(), self._inbox.letter, self._inbox.said)

    def _say_none_down(self, nodes: Sequence[int]) -> None:
        self._requests.tell_down(NodesDown((), time.time()))

    def _carry_out(self, action: Action) -> int | None:
        match action:
            case Log(event):
                self._log(event)
            case Reply(key, answer):
                self._bulletin.answer(key, answer)
            case Notify(notice):
                self._bulletin.notify(notice)
                self._on_told(notice)
            case EpochPlan() | EmergencyCheckpointOrder():
                self._bulletin.decide(action)
            case Reopen(node, workers):
                self._reopen(node, workers)
            case AskDown(nodes):
                self._ask_down(nodes)
            case LogsWanted() | LogPage():
                self._write_log(action)
            case Go():
                self._bulletin.go(action)
            case End(code, reason, at_once):
                self._drain_events()
                last = self._membership.state.plan
                # Workers that were started anew and are in no plan yet have nothing to bring to an end.
                end = JobEnd(code, reason, GRACE_S, None if last is None else last.members)
                if at_once:
                    end = replace(end, grace_s=0.0, terminate_s=TERMINATE_S)
                # A stranger may have written there; agents read on until this comes.
                self._store.set(keys.END, END.write(end, COORDINATOR))
                return code
        return None

    def _drain_events(self) -> None:
        for _ in range(MOST_AT_ONCE):
            if (taken := self._inbox.take()) is None:
                break
            for message in taken:
                if isinstance(message, Reported):
                    self._write_events(message)
                elif isinstance(message, LogPage) and self._membership.state.job.pages.enter(message):
                    self._write_log(message)

    def _write_events(self, message: Reported) -> None:
        for event in message.events:
            match event:
                case Drill(action=action, target=int(worker)) if action in FATAL:
                    self._struck[worker] = event.time
                case Iteration(iteration=iteration):
                    self._membership.progressed(iteration)
            if not (message.again and self._is_logged(event)):
                self._write_event(event)

    def _log(self, event: Event) -> None:
        if isinstance(event, WorkerDead) and event.dead in self._struck:
            # The victim of a fault injection says when it strikes; its agent sees it only after the kernel has taken it
            # down.
            struck_at = self._struck[event.dead]
            died_at = struck_at if event.died_at is None else min(event.died_at, struck_at)
            event = replace(event, died_at=died_at, cause=f"fault injection, {event.cause}")
        self._write_event(stamped(event, time.time(), self._membership.state.epoch))
