# SPDX-License-Identifier: Apache-2.0
"""A c10d store in which torch's groups meet, over a connection to the control plane's. May import torch and control.

torch's TCPStore lets whoever reaches its port read and write all keys, so none listens in a job.
"""

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from megatron_resihp.control import keys
from megatron_resihp.control.transport.sockets import StoreError
from megatron_resihp.control.transport.store.client import Connection
from megatron_resihp.control.transport.store.wire import Op, Reply, Said

FIRST_PAUSE_S = 0.0005
LONGEST_PAUSE_S = 0.05


class ControlStore(dist.Store):
    """A c10d store for any thread. C++ does not keep it alive: whoever makes it has to, as long as groups use it.

    Args:
        connection: its own, for no other use.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._lock = threading.Lock()
        self._timeout = timedelta(minutes=5)

    def set(self, key: str, value: bytes | str) -> None:
        self.set_all({key: value})

    def set_all(self, values: Mapping[str, bytes | str]) -> None:
        """By one message."""
        self._ask(Op.SET, *(field for key, value in values.items() for field in (_key(key), _bytes(value))))

    def get(self, key: str) -> bytes:
        if (value := self.find(key)) is None:
            self.wait([key])
            value = self.find(key)
        if value is None:
            raise dist.DistStoreError(f"{key} was deleted")
        return value

    def find(self, key: str) -> bytes | None:
        """What is there now; None: nothing."""
        reply = self._ask(Op.GET, _key(key))
        return None if reply.said is Said.NO else reply.value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        # By looking again: a wait at the server would hold the connection, which other threads need.
        deadline = time.monotonic() + (timeout or self._timeout).total_seconds()
        pause = FIRST_PAUSE_S
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"wait timeout: no process wrote {keys} in time")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def check(self, keys: list[str]) -> bool:
        return self._ask(Op.CHECK, *map(_key, keys)).said is Said.YES

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(Op.ADD, _key(key), str(amount).encode()).value)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        reply = self._ask(Op.COMPARE_SET, _key(key), _bytes(expected), _bytes(desired))
        # As TCPStore: for a key that does not exist what was expected, as if it were there.
        return reply.value if reply.said is Said.YES else _bytes(expected)

    def delete_key(self, key: str) -> bool:
        return self._ask(Op.DELETE, _key(key)).said is Said.YES

    def num_keys(self) -> int:
        return int(self._ask(Op.COUNT).value)

    deleteKey, getNumKeys = delete_key, num_keys
    """The names under which C++ looks for them."""

    def has_extended_api(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def _ask(self, op: Op, *fields: bytes) -> Reply:
        try:
            with self._lock:
                return self._connection.ask(op, *fields)
        except StoreError as error:
            raise dist.DistNetworkError(str(error)) from error


def meet_in(open_connection: Callable[[], Connection]) -> None:
    """Let `init_process_group` without a store meet there, where torch would serve or look for a TCPStore."""

    kept: list[dist.Store] = []

    def meet(url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
        said = {name: values[0] for name, values in parse_qs(urlparse(url).query).items()}
        store = ControlStore(open_connection())
        kept.append(store)
        if timeout is not None:
            store.set_timeout(timeout)
        yield store, int(said.get("rank", os.environ["RANK"])), int(said.get("world_size", os.environ["WORLD_SIZE"]))
        raise RuntimeError("the group can't meet again")

    # The package has a function of the module's name.
    importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers["env"] = meet


def _key(key: str) -> bytes:
    return (keys.TORCH + key).encode()


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
