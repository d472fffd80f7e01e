# SPDX-License-Identifier: Apache-2.0
"""A worker's connection to the coordinator. May import `protocol`, the store and this package's errors.

Where another coordinator may take the place of one that is lost, it is told again what that one may not have decided
about.
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, NamedTuple

from megatron_resihp.control import keys
from megatron_resihp.control.transport.sockets import StoreError
from megatron_resihp.control.transport.store.client import StoreClient
from megatron_resihp.control.transport.store.lasting import LastingStore
from megatron_resihp.control.transport.store.store import Store
from megatron_resihp.control.worker.errors import JobEnded
from megatron_resihp.control.worker.heard import READ_S
from megatron_resihp.protocol.logs import LogPage
from megatron_resihp.protocol.messages import MESSAGES, EventsReported, Message, StillSaving

PAST_S: Final = 600.0
"""Events that were told longer ago than this are in the log: a coordinator that writes nothing is lost sooner."""
EVENTS_KEPT: Final = 1000
"""Letters with events: what a coordinator has received it may not have written when it is lost."""
PAGES_KEPT: Final = 1000
"""Pages may wait in a coordinator, for a disk that is full perhaps, when it is lost. The next one is sent the last ones
again, and writes those that are not there."""


class _Told(NamedTuple):
    """When a message was told, by the monotonic clock, and its letter's id."""

    at: float
    letter: str
    message: EventsReported


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
        self._name, self._told = f"{worker}.{secrets.token_hex(4)}", 0
        self._follows = isinstance(store, LastingStore) and store.term is not None
        self._kept: list[str] = []
        """Messages that may have been lost with a coordinator, each of which a later one folds once."""
        self._pages: deque[str] = deque(maxlen=PAGES_KEPT)
        self._events: deque[_Told] = deque(maxlen=EVENTS_KEPT)
        self._standing: dict[str, str] = {}
        if isinstance(store, LastingStore):
            store.follow(self._tell_again)

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
            letter = f"{self._name}.{self._told}"
            text = self._text(message, letter)
            if self._follows:
                self._keep(message, letter, text)
            store.push(keys.INBOX, text)

    def _text(self, message: Message, letter: str) -> str:
        return MESSAGES.write(message, f"worker {self._worker}", letter)

    def _keep(self, message: Message, letter: str, text: str) -> None:
        match message:
            case LogPage():
                self._pages.append(text)
            case EventsReported():
                self._events.append(_Told(time.monotonic(), letter, message))
            case StillSaving():
                pass  # It comes again.
            case _:
                self._kept.append(text)

    def heard_of_all(self) -> None:
        """What the coordinator has just said shows that it has decided about all that was told before."""
        self._kept.clear()

    def stand(self, values: Mapping[str, str]) -> None:
        """What others look up in the store, and is put into that of each later coordinator."""
        self._standing.update(values)

    def leave(self, term: int) -> None:
        """Another coordinator leads, of this term: tell that one what may have been lost.

        Raises:
            JobEnded: it is gone, too.
        """
        with self._connection() as store:
            if isinstance(store, LastingStore):
                store.leave(term)

    def _tell_again(self, store: StoreClient) -> None:
        for key, value in self._standing.items():
            store.set_once(key, value)
        since = time.monotonic() - PAST_S
        told = (each for each in self._events if each.at >= since)
        events = (self._text(replace(each.message, again=True), each.letter) for each in told)
        for text in (*self._pages, *events, *self._kept):
            store.push(keys.INBOX, text)

    def put(self, key: str, value: str) -> None:
        """Let others look this up in the store, and in that of each later coordinator."""
        self.stand({key: value})
        with self._connection() as store:
            store.set(key, value)

    def published(self, key: str, wait_s: float = 0.0) -> str | None:
        """What is published under a key; None: nothing, after a wait of so many seconds."""
        with self._connection() as store:
            there = store.wait(key, wait_s) if wait_s else store.check(key)
            return store.get(key, READ_S) if there else None
