# SPDX-License-Identifier: Apache-2.0
"""Starts the workers of one node: all of them before any thread is started, and later those that come back.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from megatron_resihp.control import linux
from megatron_resihp.control.node.absences import Page, Watch
from megatron_resihp.control.node.environment import ABSENCES_FD, LIVENESS_FD, RECORDS_FD, STORE_FD, JobEnvironment
from megatron_resihp.control.node.orphan_reaper import OrphanReaper
from megatron_resihp.control.node.output import Outputs
from megatron_resihp.control.node.spawn import Spawn, WorkerSpec
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.liveness import Watcher
from megatron_resihp.control.transport.shipping import Relay
from megatron_resihp.control.transport.store.relay import StoreRelay

ENDS: Final = {
    LIVENESS_FD: socket.SOCK_STREAM, RECORDS_FD: socket.SOCK_STREAM, STORE_FD: socket.SOCK_SEQPACKET,
}  # fmt: skip
"""The sockets that each worker has to its agent."""


@dataclass
class Worker:
    """A worker's process as its agent knows it.

    Attributes:
        absences: notes when it was stopped.
        code: exit code, negative for a signal; None while it lives.
        failed: it ended with an error of its own, or died before the job had ended; None as long as that is open.
        given_up: it was reported as silent or lost, and only the end of the job is waited for.
        lost_at: when its liveness connection ended, as long as it may just be dying.
    """

    number: int
    pid: int
    pidfd: int
    absences: Watch
    code: int | None = None
    failed: bool | None = None
    given_up: bool = False
    lost_at: float | None = None


class Starter:
    """Starts workers in the agent's main thread."""

    def __init__(
        self,
        command: Sequence[str],
        environment: JobEnvironment,
        outputs: Outputs,
        spawn: Spawn,
        watcher: Watcher,
        relay: Relay,
        store: StoreRelay,
        reaper: OrphanReaper,
    ) -> None:
        self._command = command
        self._environment = environment
        self._outputs = outputs
        self._spawn = spawn
        self._watcher = watcher
        self._relay = relay
        self._store = store
        self._reaper = reaper

    def store_is_at(self, address: Address) -> None:
        """Workers that are started from now on find the store there. From any thread."""
        self._environment = replace(self._environment, store=address)

    @property
    def slots(self) -> int:
        """How many workers the job has when all are there."""
        return self._environment.size.slots

    def last_lines(self, number: int) -> list[str]:
        """The end of what a worker wrote."""
        return self._outputs.last_lines(number)

    def start_all(self, numbers: Sequence[int]) -> list[Worker]:
        """Start the workers that this node begins with, before any thread is started; see `spawn`."""
        workers: list[Worker] = []
        try:
            for number in numbers:
                workers.append(self.start(number))
        except BaseException:
            for worker in workers:
                linux.kill_group(worker.pid)
                os.waitpid(worker.pid, 0)
            raise
        return workers

    def start(self, number: int) -> Worker:
        """Start one worker. Raises OSError if that can't be."""
        ends = {name: socket.socketpair(type=kind) for name, kind in ENDS.items()}
        output = self._outputs.open(number)
        page = Page()
        given = {name: theirs for name, (_, theirs) in ends.items()}
        files = {**{name: end.fileno() for name, end in given.items()}, ABSENCES_FD: page.fd}
        try:
            variables = self._environment.of(number, files)
            pid = self._spawn(WorkerSpec(number, self._command, variables, output, tuple(given.values()), page.fd))
        finally:
            os.close(page.fd)
            for end in given.values():
                end.close()
        self._reaper.watch(pid)
        os.close(output)
        self._watcher.add(number, ends[LIVENESS_FD][0])
        self._relay.add(ends[RECORDS_FD][0])
        self._store.add(number, ends[STORE_FD][0])
        return Worker(number, pid, os.pidfd_open(pid), Watch(pid, page))
