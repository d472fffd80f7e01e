# SPDX-License-Identifier: Apache-2.0
"""A c10d store whose waits end when the epoch is broken. May import torch.

Groups meet by waiting for keys of their peers. A peer that died while a group is built never writes its key, and c10d's
own wait would last until the group's timeout.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from megatron_resihp.executor.groups.control_store import ControlStore

FIRST_PAUSE_S = 0.0005
LONGEST_PAUSE_S = 0.02


class RendezvousBroken(RuntimeError):
    """The epoch was marked as broken while its groups were being built."""


class InterruptibleStore(dist.Store):
    """Passes everything on to `inner`, under a prefix of the epoch.

    Args:
        inner: a raw c10d store.
        interrupted: called while waiting; True ends the wait with RendezvousBroken. `set` then writes nothing.
        prefix: of the epoch's keys.
    """

    def __init__(self, inner: dist.Store, interrupted: Callable[[], bool], prefix: str = "") -> None:
        super().__init__()
        self._inner = dist.PrefixStore(prefix, inner)
        self._look = partial(_look, inner, prefix)
        self._write = partial(_write, inner, prefix)
        self._interrupted = interrupted
        self._timeout = timedelta(minutes=10)
        self._published: dict[str, bytes] = {}
        self._heard: set[bytes] = set()
        self._sought: dict[str, None] = {}
        self._gathered: dict[str, bytes | str] | None = None

    @property
    def published(self) -> list[bytes]:
        """The values that this process has published about itself, one per group."""
        return list(self._published.values())

    @property
    def heard(self) -> set[bytes]:
        """The values that other processes have published about themselves, of those that this process asked for."""
        return set(self._heard)

    def take_sought(self) -> list[tuple[bytes, int]]:
        """Peers that groups of this process have begun to connect to; gloo connects when it first needs a peer.

        Returns:
            this process's published value in the group, and the peer's rank there; each is returned once.
        """
        found = []
        for key in list(self._sought):
            del self._sought[key]
            group, _, rank = key.rpartition("/")
            if group in self._published and rank.isdecimal():
                found.append((self._published[group], int(rank)))
        return found

    def set(self, key: str, value: bytes | str) -> None:
        # A process that publishes NCCL's address then waits for its peers in a call that nothing can end.
        self._mind_epoch()
        if isinstance(value, bytes):
            self._published[key.rpartition("/")[0]] = value
        if self._gathered is None:
            self._write({key: value})
        else:
            self._gathered[key] = value

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Write what is set meanwhile by one message, at the end, or before anything is asked for. Each message takes
        time of all the processes that it passes, and a worker makes dozens of groups. Not for groups of NCCL's, whose
        root waits for its peers without asking for anything.
        """
        self._gathered = {}
        try:
            yield
            self._write_gathered()
        finally:
            self._gathered = None

    def _write_gathered(self) -> None:
        if self._gathered:
            self._mind_epoch()
            gathered, self._gathered = self._gathered, {}
            self._write(gathered)

    def get(self, key: str) -> bytes:
        # Recorded before the check for a broken epoch, so that an abort finds every peer that passes the check.
        self._sought[key] = None
        value = self._awaited(lambda: self._look(key), [key], self._timeout)
        self._heard.add(value)
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._awaited(lambda: self._inner.check(keys) or None, keys, timeout or self._timeout)

    def _awaited[T](self, look: Callable[[], T | None], keys: Sequence[str], timeout: timedelta) -> T:
        """What is there at last; None: not yet."""
        self._write_gathered()
        deadline = time.monotonic() + timeout.total_seconds()
        pause = FIRST_PAUSE_S
        while True:
            self._mind_epoch()
            if (found := look()) is not None:
                return found
            if time.monotonic() > deadline:
                raise RuntimeError(f"rendezvous: no peer wrote {keys} in time")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _mind_epoch(self) -> None:
        if self._interrupted():
            raise RendezvousBroken("the epoch is broken")

    def add(self, key: str, amount: int) -> int:
        self._write_gathered()
        return self._inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self._write_gathered()
        return self._inner.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._write_gathered()
        return self._inner.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._inner.delete_key(key)

    def num_keys(self) -> int:
        return self._inner.num_keys()

    def has_extended_api(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout


def _write(store: dist.Store, prefix: str, values: Mapping[str, bytes | str]) -> None:
    named = {f"{prefix}/{key}": value for key, value in values.items()}  # as PrefixStore has it
    if isinstance(store, ControlStore):
        store.set_all(named)
    else:
        for key, value in named.items():
            store.set(key, value)


def _look(store: dist.Store, prefix: str, key: str) -> bytes | None:
    """What is there under a key, if anything: by one question where the store can be asked so."""
    key = f"{prefix}/{key}"  # as PrefixStore has it
    if isinstance(store, ControlStore):
        return store.find(key)
    return store.get(key) if store.check([key]) else None
