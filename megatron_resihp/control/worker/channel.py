# SPDX-License-Identifier: Apache-2.0
"""A worker's connection to the coordinator. May import `protocol`, the store and this package's errors."""

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_resihp.control import keys
from megatron_resihp.control.transport.store import Store, StoreError
from megatron_resihp.control.worker.errors import JobEnded
from megatron_resihp.control.worker.heard import READ_S
from megatron_resihp.protocol.messages import MESSAGES, Message


class Channel:
    """The store, for one thread at a time. A worker that loses it has lost the coordinator: all methods raise JobEnded.

    Args:
        store: a connection of its own.
        worker: this worker's id.
        lose: told why the connection is lost; returns how the job has ended for this worker.
    """

    def __init__(self, store: Store, worker: int, lose: Callable[[str], JobEnded]) -> None:
        self._store = store
        self._worker = worker
        self._lose = lose
        self._lock = threading.Lock()
        self._name, self._told = secrets.token_hex(4), 0

    @contextmanager
    def _connection(self) -> Iterator[Store]:
        try:
            with self._lock:
                yield self._store
        except (StoreError, TimeoutError) as error:
            raise self._lose(str(error)) from error

    def tell(self, message: Message) -> None:
        """Send a message to the coordinator."""
        with self._connection() as store:
            self._told += 1
            text = MESSAGES.write(message, f"worker {self._worker}", f"{self._name}.{self._told}")
            store.push(keys.INBOX, text)

    def count(self, name: str) -> int:
        """Add one to a counter that all workers share and return its new value."""
        with self._connection() as store:
            return store.add(name, 1)

    def published(self, key: str, wait_s: float = 0.0) -> str | None:
        """What is published under a key; None: nothing, after a wait of so many seconds."""
        with self._connection() as store:
            there = store.wait(key, wait_s) if wait_s else store.check(key)
            return store.get(key, READ_S) if there else None
