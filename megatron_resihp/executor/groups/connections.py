# SPDX-License-Identifier: Apache-2.0
"""The connections of an epoch's groups: which are its own, and how an abort cuts them.

May import torch and the executor's `gloo` and `nccl`.
"""

import socket
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from megatron_resihp.executor.gloo import sockets as gloo_sockets
from megatron_resihp.executor.gloo.groups_ahead import GroupsAhead
from megatron_resihp.executor.groups.rendezvous import InterruptibleStore
from megatron_resihp.executor.nccl.aborts import ABORT_S, NcclAborts, group_error


class Connections:
    """The connections of one worker's groups, epoch after epoch.

    Args:
        me: this worker's id.
        interrupted: whether the epoch under construction is broken.
        abort_s: how long NCCL may take to abort an epoch.

    Attributes:
        store: in which the epoch's groups meet; None while there is no epoch.
    """

    def __init__(self, me: int, interrupted: Callable[[], bool], abort_s: float = ABORT_S) -> None:
        self._me = me
        self._interrupted = interrupted
        self._foreign = gloo_sockets.identities()
        self._peer_ports: set[int] | None = None
        self._kept_open: dict[str, socket.socket] = {}
        self._nccl = NcclAborts(abort_s)
        self.store: InterruptibleStore | None = None
        self._lock = threading.Lock()

    def begin(self, ahead: GroupsAhead | None) -> None:
        """All connections from now on are the epoch's, and those of the groups that were made ahead for it."""
        with self._lock:
            self._foreign = gloo_sockets.identities(ahead.ports() if ahead is not None else ())
            self._peer_ports = None

    def ports(self) -> list[int]:
        """Ports at which this worker's gloo groups listen."""
        return [] if self.store is None else sorted(gloo_sockets.ports(self.store.published))

    def narrow(self, peer_ports: set[int]) -> None:
        """From now on only connections that have an end at one of these ports are cut on abort."""
        with self._lock:
            self._peer_ports = peer_ports

    def listeners(self, published: Iterable[bytes]) -> set[str]:
        """This worker's listening sockets of the epoch."""
        return gloo_sockets.listeners(published, self._foreign)

    def check(self) -> None:
        """Ask NCCL for errors of the epoch's groups.

        Raises:
            DistError: some group is in error, so its results can't be believed.
        """
        failure = group_error()
        if failure is not None:
            raise dist.DistBackendError(failure)

    # ---- aborts

    def abort(self) -> None:
        """Make every blocked or later operation of the epoch fail. Called from any thread, any number of times.

        Raises:
            DeviceLost: NCCL did not finish its aborts in time, or the device has faulted.
        """
        with self._lock:
            self._start_abort()
        self._end_abort()

    def abort_if_interrupted(self) -> None:
        """`abort` for another thread than the one that builds epochs, which may have begun the next epoch. It aborts
        only a broken epoch, because results of aborted NCCL collectives are noticed only there.
        """
        with self._lock:
            if not self._interrupted():
                return
            self._start_abort()
        self._end_abort()

    def abort_anew(self, group: Any) -> None:
        """Abort again: a communicator that was made while its group was being aborted was not aborted with it."""
        with self._lock:
            self._nccl.repeat(group)

    def _start_abort(self) -> None:
        self._nccl.start()
        if self.store is None:
            return
        ports = self._peer_ports
        if ports is None:
            ports = gloo_sockets.ports([*self.store.published, *self.store.heard])
        self._kept_open |= gloo_sockets.end_receiving(self._foreign | self._kept_open.keys(), ports)
        gloo_sockets.stand_in(self.store.take_sought(), self._foreign)

    def _end_abort(self) -> None:
        """Without the lock: NCCL may take seconds, in which another thread must be able to abort its communicator."""
        for error in self._nccl.wait():
            print(f"resihp: worker {self._me} could not abort {error}", file=sys.stderr, flush=True)

    def forget_aborts(self) -> None:
        """The epoch's groups are destroyed."""
        self._nccl.forget()

    def close_aborted(self) -> None:
        """Close the sockets that an abort has ended, which had to stay open until their groups were destroyed."""
        with self._lock:
            for connection in self._kept_open.values():
                connection.close()
            self._kept_open.clear()
