"""The agent: starts a node's workers, notices within milliseconds when one dies, and ends them when the job is over.

It reports and does not decide: what a death means is the coordinator's business, and survivors are left alone until the
coordinator ends the job. May import: the standard library and this room's modules.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from megatron_resihp.control import linux, messages
from megatron_resihp.control.environment import JobEnvironment
from megatron_resihp.control.guardian import Guardian
from megatron_resihp.control.lifeline import Finding, Kind, Watcher
from megatron_resihp.control.link import Link
from megatron_resihp.control.mailbox import Ending, Mailbox
from megatron_resihp.control.nodes import NodeWatcher
from megatron_resihp.control.output import Outputs
from megatron_resihp.control.shipping import Relay
from megatron_resihp.control.slicing import Slicer
from megatron_resihp.control.spawn import Spawn, WorkerSpec

LOOK_S: Final = 0.2
"""How often silence is looked for when nothing happens."""
LOST_GRACE_S: Final = 0.25
"""A dying process closes its lifeline a moment before it is dead; only after this long it counts as lost."""
TERMINATE_S: Final = 3.0
"""From SIGTERM to SIGKILL."""
ABANDON_S: Final = 5.0
"""From SIGKILL to giving up on a process that even that does not end."""
SHOWN_FAILURES: Final = 3


@dataclass
class Worker:
    """A worker's process as its agent knows it.

    Attributes:
        code: exit code, negative for a signal; None while it lives.
        failed: it ended with an error of its own, or died before the job had ended; None as long as that is open.
        given_up: it was reported as silent or lost, and only the end of the job is waited for.
        lost_at: when its lifeline ended, as long as it may just be dying.
    """

    number: int
    pid: int
    pidfd: int
    code: int | None = None
    failed: bool | None = None
    given_up: bool = False
    lost_at: float | None = None


def start_workers(
    command: Sequence[str],
    environment: JobEnvironment,
    outputs: Outputs,
    spawn: Spawn,
    watcher: Watcher,
    relay: Relay,
    guardian: Guardian,
    foreign: Sequence[socket.socket],
) -> list[Worker]:
    """Start all workers of this node, before any thread is started; see `spawn`."""
    workers: list[Worker] = []
    ours: list[socket.socket] = [guardian.socket]
    try:
        for local_rank in range(environment.workers_per_node):
            kept, given = socket.socketpair()
            kept_records, given_records = socket.socketpair()
            ours += [kept, kept_records]
            number = environment.node * environment.workers_per_node + local_rank
            output = outputs.open(number)
            with given, given_records:
                variables = environment.of(local_rank, given.fileno(), given_records.fileno())
                spec = WorkerSpec(number, command, variables, output, given, given_records, [*foreign, *ours])
                pid = spawn(spec)
            guardian.watch(pid)
            os.close(output)
            workers.append(Worker(number, pid, os.pidfd_open(pid)))
            watcher.add(number, kept)
            relay.add(kept_records)
    except BaseException:
        for worker in workers:
            linux.kill_group(worker.pid)
            os.waitpid(worker.pid, 0)
        raise
    return workers


class Agent:
    """One node's loop, in the main thread.

    Args:
        workers: as started.
        watcher: of the workers' lifelines.
        mailbox: where endings and signals come in.
        link: to the coordinator.
        slicer: slows workers down when a drill wants it.
        guardian: ends what workers have started should the agent die.
        nodes: the lifelines of the other nodes, on node 0 of several.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        watcher: Watcher,
        mailbox: Mailbox,
        link: Link,
        slicer: Slicer,
        guardian: Guardian,
        nodes: NodeWatcher | None = None,
    ) -> None:
        self._workers = {worker.number: worker for worker in workers}
        self._watcher = watcher
        self._mailbox = mailbox
        self._link = link
        self._slicer = slicer
        self._guardian = guardian
        self._nodes = nodes
        self._ending: Ending | None = None
        self._stop_asked = False
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
        # Lifelines first: what a worker said last is still in them.
        for finding in self._watcher.look(now):
            self._take_note(finding, now)
        for worker in dead:
            self._bury(worker)
        for worker in self._living():
            if worker.lost_at is not None and now - worker.lost_at > LOST_GRACE_S:
                worker.lost_at = None
                self._give_up(worker)
                self._link.post("lost", worker=worker.number)
        for loss in self._nodes.look(now) if self._nodes is not None else []:
            self._link.post("node_lost", node=loss.node, cause=loss.cause)
        for letter in self._mailbox.take():
            if isinstance(letter, Ending):
                self._end(letter, now)
            else:
                self._on_signal(letter, now)
        while self._schedule and self._schedule[0][0] <= now:
            self._schedule.pop(0)[1]()

    def _bury(self, worker: Worker) -> None:
        self._slicer.forget(worker.number)
        memory = linux.shared_memory_of_group(worker.pid)
        # Before anything else: data loaders that it has left behind keep its sockets open, and its peers waiting.
        linux.kill_group(worker.pid)
        self._guardian.forget(worker.pid)
        _, status = os.waitpid(worker.pid, 0)
        worker.code = os.waitstatus_to_exitcode(status)
        self._link.post("exited", worker=worker.number, code=worker.code)
        if worker.failed is None:
            worker.failed = self._ending is None and worker.code not in (0, messages.FENCED_EXIT)
        self._exits.append(worker)
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        self._watcher.cut(worker.number)
        for path in memory:
            path.unlink(missing_ok=True)

    def _take_note(self, finding: Finding, now: float) -> None:
        worker = self._workers[finding.name]
        if finding.kind in (Kind.FAILED, Kind.ENDED):
            worker.failed = finding.kind is Kind.FAILED
        elif finding.kind is Kind.LOST:
            worker.lost_at = now
        else:
            self._link.post("silent", worker=worker.number, silence_s=finding.silence_s)
            self._give_up(worker)

    def _give_up(self, worker: Worker) -> None:
        """It is dead to the others: it must end as soon as it runs again, and they must not wait for it."""
        self._slicer.forget(worker.number)
        worker.given_up = True
        self._watcher.cut(worker.number)
        linux.cut_connections(worker.pid, worker.pidfd)

    def _on_signal(self, number: int, now: float) -> None:
        if number not in (signal.SIGTERM, signal.SIGINT):
            for worker in self._living():
                signal.pidfd_send_signal(worker.pidfd, number)
        elif not self._stop_asked:
            self._stop_asked = True
            self._link.post("stop", signal=number)
        else:
            self._ending = Ending(128 + number, f"killed by a second {signal.Signals(number).name}")
            self._kill()
            self._schedule = [(now + ABANDON_S, self._abandon)]

    def _end(self, ending: Ending, now: float) -> None:
        if self._ending is not None:
            return
        self._ending = ending
        for worker in self._living():
            if worker.given_up:
                linux.kill_group(worker.pid)
        terminate_at = now + ending.grace_s
        kill_at = terminate_at + TERMINATE_S
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
