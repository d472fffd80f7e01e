# SPDX-License-Identifier: Apache-2.0
"""The agent: starts a node's workers, notices within milliseconds when one dies, and ends them when the job is over.

It reports and does not decide: what a death means is the coordinator's business, and survivors are left alone until the
coordinator ends the job. May import: the standard library, `plan` and this package's modules.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from contextlib import closing
from functools import partial
from typing import Final

from megatron_resihp.control import exit_codes, linux
from megatron_resihp.control.causes import MemoryKills, known_cause
from megatron_resihp.control.node.link import Link
from megatron_resihp.control.node.mailbox import BrokenEpoch, Drained, Ending, GivenUp, Mailbox
from megatron_resihp.control.node.processes import Processes
from megatron_resihp.control.node.schedule import Schedule
from megatron_resihp.control.node.starting import Starter, Worker
from megatron_resihp.control.terminal import warn
from megatron_resihp.control.transport.liveness import Finding, Kind, Watcher
from megatron_resihp.control.transport.node_liveness import NodeWatcher
from megatron_resihp.plan.slots import slot_of
from megatron_resihp.protocol.messages import (
    ConnectionLost,
    HeartbeatsMissing,
    LeaveRequest,
    NodeLost,
    NoticeUnheard,
    ProcessExited,
    SaveRequest,
    StopRequest,
    WorkerRestarted,
)

LOOK_S: Final = 0.2
"""How often silence is looked for when nothing happens."""
LOST_GRACE_S: Final = 0.25
"""A dying process closes its liveness connection a moment before it is dead; only after this long it counts as lost."""
TERMINATE_S: Final = 3.0
"""From SIGTERM to SIGKILL."""
ABANDON_S: Final = 5.0
"""From SIGKILL to giving up on a process that even that does not end."""
RESTART_AFTER_S: Final = 1.0
"""From a worker's death to its restart: survivors go on first, and a job that ends for it is not held up."""
LEAVE_AFTER_S: Final = RESTART_AFTER_S
"""From the failure of a joining node's last worker to its leaving: where the job ends for it, that says why."""
ASK_TO_LEAVE_AFTER_S: Final = RESTART_AFTER_S
"""From SIGTERM on a node without the coordinator to asking whether the job can do without: where all nodes are told to
end, as at the end of the job's time, the coordinator's says so meanwhile, and no plan is made for fewer."""


class Agent:
    """One node's loop, in the main thread.

    Args:
        processes: of the node's workers.
        watcher: of the workers' liveness connections.
        mailbox: where endings and signals come in.
        link: to the coordinator.
        starter: starts workers anew.
        max_restarts: how often at most, for each slot.
        nodes: the liveness connections of the other nodes, beside the coordinator.
        joins: whether the node joins a job that runs. It goes again if all its workers fail: the job doesn't need it.
        node: its rank.
        leads: whether the coordinator runs here, which the job ends with.
    """

    def __init__(
        self,
        processes: Processes,
        watcher: Watcher,
        mailbox: Mailbox,
        link: Link,
        starter: Starter,
        max_restarts: int = 0,
        nodes: NodeWatcher | None = None,
        joins: bool = False,
        node: int = 0,
        leads: bool = True,
    ) -> None:
        self._node = node
        self._leads = leads
        self._processes = processes
        self._watcher = watcher
        self._mailbox = mailbox
        self._link = link
        self._starter = starter
        self._restarts_left = Counter({slot_of(w.number, starter.slots): max_restarts for w in processes.all()})
        self._nodes = nodes
        self._joins = joins
        self._memory_kills = MemoryKills()
        self._ending: Ending | None = None
        self._stop_asked = False
        self._drained = False
        self._told_to_end = False
        self._abandoned = False
        self._schedule = Schedule()

    def run(self) -> Ending:
        """Watch until the job is over and no worker is left; returns how it ended."""
        for source in (self._mailbox, self._watcher, self._nodes):
            if source is not None:
                self._processes.wake_for(source)
        with closing(self._processes):
            while True:
                if self._ending is not None:
                    # Other nodes need the store until they have heard of the end.
                    others = self._nodes.served if self._nodes is not None and self._ending.agreed else ()
                    if self._abandoned or not (self._processes.living() or others):
                        return self._ending
                dead = self._processes.await_news(LOOK_S)
                self._look(dead, time.monotonic())

    def _look(self, dead: list[Worker], now: float) -> None:
        self._memory_kills.look(now)
        # Liveness connections first: a worker's last words are still in them.
        for finding in self._watcher.look(now):
            self._take_note(finding, now)
        for worker in dead:
            self._bury(worker)
        for worker in self._processes.living():
            worker.absences.look(now)
        for worker in self._processes.living():
            if worker.lost_at is not None and now - worker.lost_at > LOST_GRACE_S:
                worker.lost_at = None
                self._give_up(worker)
                self._link.post(ConnectionLost(worker.number, time.time()))
        for loss in self._nodes.look(now) if self._nodes is not None else []:
            self._link.post(NodeLost(loss.node, loss.cause, time.time()))
        for letter in self._mailbox.take():
            if isinstance(letter, Ending):
                self._end(letter, now)
            elif isinstance(letter, GivenUp):
                self._end_given_up(letter)
            elif isinstance(letter, Drained):
                self._drain(letter)
            elif isinstance(letter, BrokenEpoch):
                self._watcher.expect(letter.epoch, now)
            else:
                self._on_signal(letter, now)
        self._schedule.run_due(now)

    def _bury(self, worker: Worker) -> None:
        memory = self._processes.take_code(worker)
        assert worker.code is not None
        cause = _cause(worker, self._starter, self._memory_kills)
        self._link.post(ProcessExited(worker.number, worker.code, time.time(), cause))
        if worker.failed is None:
            worker.failed = self._ending is None and worker.code not in (0, exit_codes.FENCED)
        self._processes.clear_away(worker, memory)
        self._plan_restart(worker, time.monotonic())
        if self._joins and all(worker.failed for worker in self._processes.all()):
            self._schedule.add(time.monotonic() + LEAVE_AFTER_S, self._leave)

    def _plan_restart(self, worker: Worker, now: float) -> None:
        """A worker that died comes back; one that has failed would fail again."""
        assert worker.code is not None
        slot = slot_of(worker.number, self._starter.slots)
        died = worker.code < 0 or worker.code == exit_codes.FENCED
        if died and self._restarts_left[slot] and self._ending is None and not self._stop_asked:
            self._restarts_left[slot] -= 1
            self._schedule.add(now + RESTART_AFTER_S, partial(self._restart, worker.number))

    def _restart(self, number: int) -> None:
        if self._stop_asked:
            return
        if not self._link.is_led:
            # Should it turn out that this node was given up, workers of such ids are others'.
            self._schedule.add(time.monotonic() + RESTART_AFTER_S, partial(self._restart, number))
            return
        try:
            worker = self._starter.start(number + self._starter.slots)
        except OSError as error:
            warn(f"resihp: worker {number} can't be restarted ({error}); the job goes on without it")
            return
        self._processes.add(worker)
        self._link.post(WorkerRestarted(worker.number, number, time.time()))

    def _leave(self) -> None:
        if not self._processes.living():
            code = max(worker.code or 0 for worker in self._processes.all())
            why = "all workers of this node failed; the job goes on without them"
            self._end(Ending(max(code, exit_codes.FAILED), why), time.monotonic())

    def _take_note(self, finding: Finding, now: float) -> None:
        worker = self._processes[finding.name]
        if finding.kind in (Kind.FAILED, Kind.ENDED):
            worker.failed = finding.kind is Kind.FAILED
        elif finding.kind is Kind.LOST:
            worker.lost_at = now
        elif finding.kind is Kind.DEAF:
            assert finding.epoch is not None
            self._link.post(NoticeUnheard(worker.number, finding.epoch, finding.silence_s, time.time()))
        else:
            self._link.post(HeartbeatsMissing(worker.number, finding.silence_s, time.time()))
            self._give_up(worker)

    def _give_up(self, worker: Worker) -> None:
        self._processes.give_up(worker)
        if self._restarts_left[slot_of(worker.number, self._starter.slots)]:
            # No worker can take its slot while it is there, and it may be stopped for good.
            linux.kill_group(worker.pid)

    def _end_given_up(self, given_up: GivenUp) -> None:
        """A worker that the coordinator has given up may run on, cut off from it alone; another has its slot now."""
        for worker in self._processes.living():
            if worker.number in given_up.workers and not worker.given_up:
                if given_up.for_good:
                    self._restarts_left[slot_of(worker.number, self._starter.slots)] = 0
                self._give_up(worker)
                linux.kill_group(worker.pid)

    def _on_signal(self, number: int, now: float) -> None:
        if number == signal.SIGUSR2:
            self._link.post(SaveRequest(time.time()))
            return
        # SIGUSR1 comes ahead of a SIGTERM, and may come twice, from a script that passes it on.
        if number != signal.SIGUSR1 and self._told_to_end:
            self._ending = Ending(exit_codes.stopped_by(number), f"killed by a second {signal.Signals(number).name}")
            self._processes.kill()
            self._schedule.replace((now + ABANDON_S, self._abandon))
            return
        self._told_to_end = self._told_to_end or number != signal.SIGUSR1
        if self._stop_asked and not self._drained:
            return
        # What a command has begun may have less time now, or end with all the job.
        self._stop_asked, self._drained = True, False
        follows = "this node asks to leave"
        if number == signal.SIGTERM and not self._leads:
            self._schedule.add(now + ASK_TO_LEAVE_AFTER_S, self._ask_to_leave)
        else:
            follows = "the job ends after an iteration"
            self._link.post(StopRequest(number, time.time()))
        print(f"resihp: node {self._node} got {signal.Signals(number).name}; {follows}", flush=True)

    def _ask_to_leave(self, ordered: bool = False) -> None:
        self._link.post(LeaveRequest(self._node, self._link.name, time.time(), ordered))

    def _drain(self, drained: Drained) -> None:
        """Notices are read from the first on: one may be about an agent that was here before, and had other workers."""
        if self._stop_asked or not any(worker.number in drained.workers for worker in self._processes.all()):
            return
        self._stop_asked = self._drained = True
        self._ask_to_leave(ordered=True)

    def _end(self, ending: Ending, now: float) -> None:
        if self._ending is not None:
            return
        self._ending = ending
        for worker in self._processes.living():
            outside = ending.members is not None and worker.number not in ending.members
            if worker.given_up or outside:
                linux.kill_group(worker.pid)
        terminate_at = now + ending.grace_s
        kill_at = terminate_at + (TERMINATE_S if ending.terminate_s is None else ending.terminate_s)
        self._schedule.replace(
            (terminate_at, self._processes.terminate), (kill_at, self._processes.kill),
            (kill_at + ABANDON_S, self._abandon),
        )  # fmt: skip

    def _abandon(self) -> None:
        self._abandoned = True
        self._processes.name_unkillable()


def _cause(worker: Worker, starter: Starter, memory_kills: MemoryKills) -> str | None:
    """What killed a worker whose exit code doesn't tell."""
    assert worker.code is not None
    if worker.code in (0, exit_codes.FENCED):
        return None
    killed = worker.code == -signal.SIGKILL and memory_kills.take(time.monotonic())
    return known_cause(worker.code, starter.last_lines(worker.number), killed)
