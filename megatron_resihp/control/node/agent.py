# SPDX-License-Identifier: Apache-2.0
"""The agent: starts a node's workers, notices within milliseconds when one dies, and ends them when the job is over.

It reports and does not decide: what a death means is the coordinator's business, and survivors are left alone until the
coordinator ends the job. May import: the standard library, `plan` and this package's modules.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from megatron_resihp.control import exit_codes, linux
from megatron_resihp.control.causes import MemoryKills, known_cause
from megatron_resihp.control.node.link import Link
from megatron_resihp.control.node.mailbox import Ending, GivenUp, Mailbox
from megatron_resihp.control.node.orphan_reaper import OrphanReaper
from megatron_resihp.control.node.slowdown_injector import Slicer
from megatron_resihp.control.node.starting import Starter, Worker
from megatron_resihp.control.transport.liveness import Finding, Kind, Watcher
from megatron_resihp.control.transport.node_liveness import NodeWatcher
from megatron_resihp.plan.places import place_of
from megatron_resihp.protocol.messages import (
    ConnectionLost,
    HeartbeatsMissing,
    LeaveRequest,
    NodeLost,
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
"""From SIGTERM on another node than node 0 to asking whether the job can do without: where all nodes are told to end,
as at the end of the job's time, node 0 says so meanwhile, and nobody plans for less."""
SHOWN_FAILURES: Final = 3


class Agent:
    """One node's loop, in the main thread.

    Args:
        workers: as started.
        watcher: of the workers' liveness connections.
        mailbox: where endings and signals come in.
        link: to the coordinator.
        slicer: slows workers down when a fault injection wants it.
        reaper: ends what workers have started should the agent die.
        starter: starts workers anew.
        max_restarts: how often at most, for each place.
        nodes: the liveness connections of the other nodes, on node 0 of several.
        joins: whether the node joins a job that runs. It goes again if all its workers fail: the job doesn't need it.
        node: its rank.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        watcher: Watcher,
        mailbox: Mailbox,
        link: Link,
        slicer: Slicer,
        reaper: OrphanReaper,
        starter: Starter,
        max_restarts: int = 0,
        nodes: NodeWatcher | None = None,
        joins: bool = False,
        node: int = 0,
    ) -> None:
        self._node = node
        self._workers = {worker.number: worker for worker in workers}
        self._watcher = watcher
        self._mailbox = mailbox
        self._link = link
        self._slicer = slicer
        self._reaper = reaper
        self._starter = starter
        self._restarts_left = Counter({place_of(w.number, starter.places): max_restarts for w in workers})
        self._nodes = nodes
        self._joins = joins
        self._memory_kills = MemoryKills()
        self._ending: Ending | None = None
        self._stop_asked = False
        self._told_to_end = False
        self._abandoned = False
        self._schedule: list[tuple[float, Callable[[], None]]] = []
        self._exits: list[Worker] = []
        self._selector = selectors.DefaultSelector()

    def run(self) -> Ending:
        """Watch until the job is over and no worker is left; returns how it ended."""
        self._selector.register(self._mailbox, selectors.EVENT_READ, None)
        self._selector.register(self._watcher, selectors.EVENT_READ, None)
        if self._nodes is not None:
            self._selector.register(self._nodes, selectors.EVENT_READ, None)
        for worker in self._workers.values():
            self._selector.register(worker.pidfd, selectors.EVENT_READ, worker)
        with self._selector:
            while self._ending is None or not self._is_over():
                ready = self._selector.select(LOOK_S)
                self._look([key.data for key, _ in ready if key.data is not None], time.monotonic())
        assert self._ending is not None
        return self._ending

    def failures(self) -> list[Worker]:
        """Workers whose output may explain a bad end, in the order in which they went."""
        return [worker for worker in self._exits if worker.failed][-SHOWN_FAILURES:]

    def _living(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.code is None]

    def _is_over(self) -> bool:
        assert self._ending is not None
        # Other nodes need the store until they have heard of the end.
        others = self._nodes.connected if self._nodes is not None and self._ending.agreed else ()
        return self._abandoned or not (self._living() or others)

    def _look(self, dead: list[Worker], now: float) -> None:
        self._memory_kills.look(now)
        # Liveness connections first: what a worker said last is still in them.
        for finding in self._watcher.look(now):
            self._take_note(finding, now)
        for worker in dead:
            self._bury(worker)
        for worker in self._living():
            worker.absences.look(now)
        for worker in self._living():
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
            else:
                self._on_signal(letter, now)
        while self._schedule and self._schedule[0][0] <= now:
            self._schedule.pop(0)[1]()

    def _bury(self, worker: Worker) -> None:
        self._slicer.forget(worker.number)
        memory = linux.shared_memory_of_group(worker.pid)
        # Before anything else: data loaders that it has left behind keep its sockets open, and its peers waiting.
        linux.kill_group(worker.pid)
        self._reaper.forget(worker.pid)
        _, status = os.waitpid(worker.pid, 0)
        worker.code = os.waitstatus_to_exitcode(status)
        self._link.post(ProcessExited(worker.number, worker.code, time.time(), self._cause(worker)))
        if worker.failed is None:
            worker.failed = self._ending is None and worker.code not in (0, exit_codes.FENCED)
        self._exits.append(worker)
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        self._watcher.cut(worker.number)
        for path in memory:
            path.unlink(missing_ok=True)
        self._plan_restart(worker, time.monotonic())
        if self._joins and all(worker.failed for worker in self._workers.values()):
            self._schedule.append((time.monotonic() + LEAVE_AFTER_S, self._leave))

    def _cause(self, worker: Worker) -> str | None:
        """What killed a worker that has ended with a code that doesn't say."""
        assert worker.code is not None
        if worker.code in (0, exit_codes.FENCED):
            return None
        killed = worker.code == -signal.SIGKILL and self._memory_kills.take(time.monotonic())
        return known_cause(worker.code, self._starter.last_lines(worker.number), killed)

    def _plan_restart(self, worker: Worker, now: float) -> None:
        """Who died comes back; who has failed would fail again."""
        assert worker.code is not None
        place = place_of(worker.number, self._starter.places)
        died = worker.code < 0 or worker.code == exit_codes.FENCED
        if died and self._restarts_left[place] and self._ending is None and not self._stop_asked:
            self._restarts_left[place] -= 1
            self._schedule.append((now + RESTART_AFTER_S, partial(self._restart, worker.number)))

    def _restart(self, number: int) -> None:
        if self._stop_asked:
            return
        try:
            worker = self._starter.start(number + self._starter.places)
        except OSError as error:
            print(f"resihp: worker {number} can't be started anew ({error}); the job goes on without", file=sys.stderr)
            return
        self._workers[worker.number] = worker
        self._slicer.add(worker.number, worker.pid, worker.pidfd)
        self._selector.register(worker.pidfd, selectors.EVENT_READ, worker)
        self._link.post(WorkerRestarted(worker.number, number, time.time()))

    def _leave(self) -> None:
        if not self._living():
            code = max(worker.code or 0 for worker in self._workers.values())
            ending = Ending(max(code, exit_codes.FAILED), "all workers of this node failed; the job goes on without")
            self._end(ending, time.monotonic())

    def _take_note(self, finding: Finding, now: float) -> None:
        worker = self._workers[finding.name]
        if finding.kind in (Kind.FAILED, Kind.ENDED):
            worker.failed = finding.kind is Kind.FAILED
        elif finding.kind is Kind.LOST:
            worker.lost_at = now
        else:
            self._link.post(HeartbeatsMissing(worker.number, finding.silence_s, time.time()))
            self._give_up(worker)

    def _give_up(self, worker: Worker) -> None:
        """It is dead to the others: it must end as soon as it runs again, and they must not wait for it."""
        self._slicer.forget(worker.number)
        worker.given_up = True
        self._watcher.cut(worker.number)
        linux.cut_connections(worker.pid, worker.pidfd)
        if self._restarts_left[place_of(worker.number, self._starter.places)]:
            # Nobody can take its place while it is there, and it may be stopped for good.
            linux.kill_group(worker.pid)

    def _end_given_up(self, given_up: GivenUp) -> None:
        """What the coordinator has given up may run on, cut off from it alone: its place is another one's now."""
        for worker in self._living():
            if worker.number in given_up.workers and not worker.given_up:
                if given_up.for_good:
                    self._restarts_left[place_of(worker.number, self._starter.places)] = 0
                self._give_up(worker)
                linux.kill_group(worker.pid)

    def _on_signal(self, number: int, now: float) -> None:
        if number == signal.SIGUSR2:
            self._link.post(SaveRequest(time.time()))
            return
        # SIGUSR1 comes ahead of a SIGTERM, and may come twice, from a script that passes it on.
        if number != signal.SIGUSR1 and self._told_to_end:
            self._ending = Ending(exit_codes.stopped_by(number), f"killed by a second {signal.Signals(number).name}")
            self._kill()
            self._schedule = [(now + ABANDON_S, self._abandon)]
            return
        self._told_to_end = self._told_to_end or number != signal.SIGUSR1
        if self._stop_asked:
            return
        self._stop_asked = True
        if number == signal.SIGTERM and self._node > 0:
            self._schedule.append((now + ASK_TO_LEAVE_AFTER_S, self._ask_to_leave))
        else:
            self._link.post(StopRequest(number, time.time()))

    def _ask_to_leave(self) -> None:
        self._link.post(LeaveRequest(self._node, self._link.name, time.time()))

    def _end(self, ending: Ending, now: float) -> None:
        if self._ending is not None:
            return
        self._ending = ending
        for worker in self._living():
            outside = ending.members is not None and worker.number not in ending.members
            if worker.given_up or outside:
                linux.kill_group(worker.pid)
        terminate_at = now + ending.grace_s
        kill_at = terminate_at + (TERMINATE_S if ending.terminate_s is None else ending.terminate_s)
        self._schedule = [
            (terminate_at, self._terminate), (kill_at, self._kill), (kill_at + ABANDON_S, self._abandon),
        ]  # fmt: skip

    def _terminate(self) -> None:
        for worker in self._living():
            signal.pidfd_send_signal(worker.pidfd, signal.SIGTERM)

    def _kill(self) -> None:
        for worker in self._living():
            linux.kill_group(worker.pid)

    def _abandon(self) -> None:
        self._abandoned = True
        for worker in self._living():
            print(f"resihp: worker {worker.number} (process {worker.pid}) cannot be killed", file=sys.stderr)
