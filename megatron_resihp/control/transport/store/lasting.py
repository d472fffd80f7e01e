# SPDX-License-Identifier: Apache-2.0
"""A connection to the store that is opened anew where it was lost.

A network may drop a connection without a word; the kernel finds out (`sockets.keep_alive`), and what was asked for is
asked again. The server may be gone instead: then no process listens there, and the loss is final, unless another
coordinator may take the place of the one that was lost (`leaders`).
May import: the standard library and `control.transport`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final

from megatron_resihp.control import keys
from megatron_resihp.control.transport.access.gate import RefusedSecretError
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.leaders import LEADERLESS_S, Leaders
from megatron_resihp.control.transport.sockets import StoreError
from megatron_resihp.control.transport.store.client import Connection, StoreClient, open_connection

REOPEN_S: Final = 30.0
"""How long a network may be without a way to the store."""
ATTEMPT_S: Final = 3.0
REFUSED_S: Final = 0.2
"""A server that refuses a connection now, and again after this long, no longer serves a store."""
READ_S: Final = 10.0
ATTEMPTS: Final = 3
"""How often a call is made that loses its connection each time."""


class _Reopened:
    """The way to one run's store, opened anew after each loss. `store`: the connection in use."""

    def __init__(self, store: StoreClient, run: str) -> None:
        self.store = store
        self._run = run

    def again[T](self, call: Callable[[StoreClient], T]) -> T:
        """Make the call, and again on a new connection where one is lost."""
        for _ in range(ATTEMPTS - 1):
            try:
                return call(self.store)
            except StoreError as loss:
                if self.store.connection.closed:
                    raise
                self.store = self._reopened(loss)
        return call(self.store)

    def _reopened(self, loss: StoreError) -> StoreClient:
        store = StoreClient(self._connected_again(loss))
        if store.get(keys.RUN, READ_S) != self._run:
            raise StoreError(f"{loss}; another job has the port by now") from loss
        print(f"resihp: {loss}; it is open again", file=sys.stderr, flush=True)
        return store

    def _connected_again(self, loss: StoreError) -> Connection:
        deadline, refused = time.monotonic() + REOPEN_S, False
        while True:
            try:
                # Short, since what is left of a killed launcher may hold the port for a moment and answer nothing.
                return self.store.connection.way.enter(ATTEMPT_S)
            except RefusedSecretError:
                raise StoreError(f"{loss}; another job has the port by now") from loss
            except ConnectionRefusedError:
                if refused:
                    raise loss from None
                refused = True
            except (OSError, StoreError):
                refused = False
                if time.monotonic() > deadline:
                    raise loss from None
            time.sleep(REFUSED_S)


class _Followed(_Reopened):
    """As `_Reopened`, where another coordinator may take the place of a lost one.

    Attributes:
        term: of the coordinator whose store it is.
        on_successor: called with a connection to the store of another coordinator, before anything else is asked there.
    """

    def __init__(self, store: StoreClient, run: str, leaders: Leaders) -> None:
        super().__init__(store, run)
        self.term, self._leaders = _term_of(store), leaders
        self.on_successor: Callable[[StoreClient], None] = lambda store: None

    def leave(self, term: int) -> None:
        """Another coordinator leads: go to that one's store."""
        if self.term < term:
            left, self.store = self.store, self._reopened(StoreError(f"the store at {self.store.address} is left"))
            left.close()

    def _reopened(self, loss: StoreError) -> StoreClient:
        deadline, used = time.monotonic() + LEADERLESS_S, self.store
        while not used.connection.closed and time.monotonic() < deadline:
            try:
                store = StoreClient(open_connection(used.connection.way, ATTEMPT_S))
                if self._is_met(store):
                    print(f"resihp: {loss}; it is open again, at {store.address}", file=sys.stderr, flush=True)
                    return store
                store.close()
            except (StoreError, TimeoutError):
                pass
            if self._leaders.none_follows():
                raise StoreError(f"{loss}, and the job has ended meanwhile") from loss
            time.sleep(REFUSED_S)
        raise StoreError(f"{loss}, and no other coordinator has come within {LEADERLESS_S:g} s") from loss

    def _is_met(self, store: StoreClient) -> bool:
        """Whether it is the store of this run's coordinator, or of a later one."""
        if store.get(keys.RUN, READ_S) != self._run or (term := _term_of(store)) < self.term:
            return False
        if term > self.term:
            self.on_successor(store)
            self.term = term
        return True


def _term_of(store: StoreClient) -> int:
    return int(store.get(keys.TERM, READ_S))


class LastingStore:
    """A `Store` that outlives its connection and, where its way leads on, its server.

    After a loss, calls that have no second effect are made again. Messages are pushed again too, and have an id of
    their own for that. `add` raises StoreError.

    Args:
        store: connected.
        run: which run's store it is; None: asks it.

    Attributes:
        run: which run's store it is.
        way: that leads there.
    """

    def __init__(self, store: StoreClient, run: str | None = None) -> None:
        self.run = store.get(keys.RUN, READ_S) if run is None else run
        self.way, leaders = store.connection.way, store.connection.way.leaders
        self._used = _Reopened(store, self.run) if leaders is None else _Followed(store, self.run, leaders)

    @property
    def address(self) -> Address:
        return self._used.store.address

    @property
    def connected(self) -> StoreClient:
        """The store in use alone: it follows to no other coordinator's."""
        return self._used.store

    @property
    def term(self) -> int | None:
        """Of the coordinator whose store it is; None: no other may follow."""
        return self._used.term if isinstance(self._used, _Followed) else None

    def follow(self, on_successor: Callable[[StoreClient], None]) -> None:
        """Have this called with a connection to the store of a later coordinator, before anything else is asked there;
        never, where none may follow."""
        if isinstance(self._used, _Followed):
            self._used.on_successor = on_successor

    def leave(self, term: int) -> None:
        """Go on at the store of the coordinator of this term, or a later one, if this is one's before."""
        if isinstance(self._used, _Followed):
            self._used.leave(term)

    def set(self, key: str, value: str) -> None:
        self._used.again(lambda store: store.set(key, value))

    def get(self, key: str, timeout_s: float) -> str:
        return self._used.again(lambda store: store.get(key, timeout_s))

    def wait(self, key: str, timeout_s: float) -> bool:
        return self._used.again(lambda store: store.wait(key, timeout_s))

    def check(self, key: str) -> bool:
        return self._used.again(lambda store: store.check(key))

    def compare_set(self, key: str, expected: str, desired: str) -> str | None:
        return self._used.again(lambda store: store.compare_set(key, expected, desired))

    def set_once(self, key: str, value: str) -> str:
        return self._used.again(lambda store: store.set_once(key, value))

    def add(self, key: str, amount: int) -> int:
        return self._used.store.add(key, amount)

    def push(self, queue: str, value: str) -> None:
        self._used.again(lambda store: store.push(queue, value))

    def take(self, queue: str, timeout_s: float) -> list[str]:
        return self._used.again(lambda store: store.take(queue, timeout_s))

    def delete(self, key: str) -> bool:
        return self._used.again(lambda store: store.delete(key))

    def delete_all(self, beginning: str) -> None:
        self._used.again(lambda store: store.delete_all(beginning))

    def clone(self) -> LastingStore:
        return LastingStore(self._used.store.clone(), self.run)

    def close(self) -> None:
        self._used.store.close()
