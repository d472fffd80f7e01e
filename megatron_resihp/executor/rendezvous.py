"""A c10d store whose waits end when the epoch is broken. May import torch.

Groups meet by waiting for keys of their peers. A peer that died while a group is built never writes its key, and c10d's
own wait would last until the group's timeout.
"""

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

FIRST_PAUSE_S = 0.0005
LONGEST_PAUSE_S = 0.02


class RendezvousBroken(RuntimeError):
    """The epoch was marked as broken while its groups were being built."""


class InterruptibleStore(dist.Store):
    """Passes everything on to `inner`, under a prefix of the epoch.

    Args:
        inner: a raw c10d store.
        interrupted: asked while waiting; True ends the wait with RendezvousBroken.
    """

    def __init__(self, inner: dist.Store, interrupted: Callable[[], bool]) -> None:
        super().__init__()
        self._inner = inner
        self._interrupted = interrupted
        self._timeout = timedelta(minutes=10)

    def set(self, key: str, value: bytes | str) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._inner.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + (timeout or self._timeout).total_seconds()
        pause = FIRST_PAUSE_S
        while not self._inner.check(keys):
            if self._interrupted():
                raise RendezvousBroken("the epoch is broken")
            if time.monotonic() > deadline:
                raise RuntimeError(f"rendezvous: no peer wrote {keys} in time")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def add(self, key: str, amount: int) -> int:
        return self._inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
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
