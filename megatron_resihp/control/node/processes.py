# SPDX-License-Identifier: Apache-2.0
"""The processes of a node's workers: looked after, cut off, ended and cleared away.

May import the standard library, `control.linux`, the liveness connections and this package's modules.
"""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final, Protocol

from megatron_resihp.control import linux
from megatron_resihp.control.node.orphan_reaper import OrphanReaper
from megatron_resihp.control.node.slowdown_injector import SlowdownInjector
from megatron_resihp.control.node.starting import Worker
from megatron_resihp.control.terminal import warn
from megatron_resihp.control.transport.liveness import Watcher
from megatron_resihp.control.transport.store.relay import StoreRelay

SHOWN_FAILURES: Final = 3


class Source(Protocol):
    """What can be waited for, such as a socket."""

    def fileno(self) -> int: ...


class Processes:
    """The worker processes of one node.

    Args:
        workers: as started.
        watcher: of their liveness connections.
        store: their connections to it.
        injector: slows them down when a fault injection wants it.
        reaper: ends what they have started should the agent die.
    """

    def __init__(
        self, workers: Sequence[Worker], watcher: Watcher, store: StoreRelay, injector: SlowdownInjector,
        reaper: OrphanReaper,
    ) -> None:  # fmt: skip
        self._workers = {worker.number: worker for worker in workers}
        self._watcher = watcher
        self._store = store
        self._injector = injector
        self._reaper = reaper
        self._gone: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        for worker in workers:
            self._selector.register(worker.pidfd, selectors.EVENT_READ, worker)

    def wake_for(self, source: Source) -> None:
        """Let `await_news` return when there is something to read here."""
        self._selector.register(source, selectors.EVENT_READ, None)

    def await_news(self, timeout_s: float) -> list[Worker]:
        """Wait until something happens; returns the workers that have ended."""
        return [key.data for key, _ in self._selector.select(timeout_s) if key.data is not None]

    def close(self) -> None:
        """Close everything, once no worker is left."""
        self._selector.close()

    def __getitem__(self, number: int) -> Worker:
        return self._workers[number]

    def all(self) -> Collection[Worker]:
        """All workers that this node has had."""
        return self._workers.values()

    def living(self) -> list[Worker]:
        """The workers whose end has not been seen."""
        return [worker for worker in self._workers.values() if worker.code is None]

    def failures(self) -> list[Worker]:
        """Workers whose output may explain a bad end, in the order in which they went."""
        return [worker for worker in self._gone if worker.failed][-SHOWN_FAILURES:]

    def add(self, worker: Worker) -> None:
        """A worker that was started anew."""
        self._workers[worker.number] = worker
        self._injector.add(worker.number, worker.pid, worker.pidfd)
        self._selector.register(worker.pidfd, selectors.EVENT_READ, worker)

    def take_code(self, worker: Worker) -> list[Path]:
        """Take the exit code of a worker that has ended; returns the shared memory that it has left behind."""
        self._injector.forget(worker.number)
        memory = linux.shared_memory_of_group(worker.pid)
        # Before anything else: data loaders that it has left behind keep its sockets open, and its peers waiting.
        linux.kill_group(worker.pid)
        self._reaper.forget(worker.pid)
        _, status = os.waitpid(worker.pid, 0)
        worker.code = os.waitstatus_to_exitcode(status)
        return memory

    def clear_away(self, worker: Worker, memory: Sequence[Path]) -> None:
        """Free what is left of a worker. `memory`: as of `take_code`."""
        self._gone.append(worker)
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        worker.absences.close()
        self._watcher.cut(worker.number)
        self._store.cut(worker.number)
        linux.free_shared_memory(memory)

    def give_up(self, worker: Worker) -> None:
        """Cut off a worker that is dead to the others: it must end as soon as it runs again, and no peer may wait."""
        self._injector.forget(worker.number)
        worker.given_up = True
        self._watcher.cut(worker.number)
        self._store.cut(worker.number)
        linux.cut_connections(worker.pid, worker.pidfd)

    def terminate(self) -> None:
        """Ask all workers to end."""
        for worker in self.living():
            signal.pidfd_send_signal(worker.pidfd, signal.SIGTERM)

    def kill(self) -> None:
        """End all workers, and what they have started."""
        for worker in self.living():
            linux.kill_group(worker.pid)

    def name_unkillable(self) -> None:
        """Say which workers have not ended even so."""
        for worker in self.living():
            warn(f"resihp: worker {worker.number} (process {worker.pid}) cannot be killed")
