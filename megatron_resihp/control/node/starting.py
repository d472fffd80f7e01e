# SPDX-License-Identifier: Apache-2.0
"""Starts the workers of one node: all of them before any thread is started, and later those that come back.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_resihp.control import linux
from megatron_resihp.control.node.absences import Page, Watch
from megatron_resihp.control.node.environment import ABSENCES_FD, JobEnvironment
from megatron_resihp.control.node.orphan_reaper import OrphanReaper
from megatron_resihp.control.node.output import Outputs
from megatron_resihp.control.node.spawn import Spawn, WorkerSpec
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.liveness import Watcher
from megatron_resihp.control.transport.shipping import Relay


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
        reaper: OrphanReaper,
    ) -> None:
        self._command = command
        self._environment = environment
        self._outputs = outputs
        self._spawn = spawn
        self._watcher = watcher
        self._relay = relay
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
        kept, given = socket.socketpair()
        kept_records, given_records = socket.socketpair()
        output = self._outputs.open(number)
        with given, given_records:
            variables = self._environment.of(number, given.fileno(), given_records.fileno())
            page = Page()
            variables[ABSENCES_FD] = str(page.fd)
            try:
                pid = self._spawn(WorkerSpec(number, self._command, variables, output, given, given_records, page.fd))
            finally:
                os.close(page.fd)
        self._reaper.watch(pid)
        os.close(output)
        self._watcher.add(number, kept)
        self._relay.add(kept_records)
        return Worker(number, pid, os.pidfd_open(pid), Watch(pid, page))
