# SPDX-License-Identifier: Apache-2.0
"""A gloo group that can include standbys. May import torch and this package."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from megatron_resihp.executor.groups.waiting import Waiter
from megatron_resihp.executor.host_memory import host_memory_of

LOAD: Final = 64 << 20
"""The most bytes that cross together: while they do, the next ones come from the device."""
STANDBY_TIMEOUT = timedelta(days=1)
"""Side groups wait while others evaluate or save; the control plane bounds that by marking the epoch as broken."""


Post = Callable[[], Any]
"""Begins an operation of gloo's; returns what to wait for."""


class SideGroup:
    """A gloo group of any workers, outside torch's default world; built straight from the store.

    torch refuses a second default group, and `new_group` needs a world that standbys are not in.
    """

    def __init__(
        self, store: dist.Store, name: str, workers: Sequence[int], me: int, waiter: Waiter,
        timeout: timedelta = STANDBY_TIMEOUT,
    ) -> None:  # fmt: skip
        self._waiter = waiter
        self._me = me
        self.workers = tuple(workers)
        self._rank_of = {worker: rank for rank, worker in enumerate(self.workers)}
        self._group = dist.ProcessGroupGloo(
            dist.PrefixStore(name, store), self._rank_of[me], len(self.workers), timeout
        )

    def sum(self, values: torch.Tensor) -> None:
        """Sum a host tensor over all workers, in place."""
        self._waiter.wait(self._group.allreduce([values]))

    def maximum(self, values: torch.Tensor) -> None:
        """Take the maximum of each element of a host tensor over all workers, in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._waiter.wait(self._group.allreduce([values], options))

    def send(self, tensor: torch.Tensor, worker: int) -> None:
        """Send a tensor of any device."""
        self.at_once(self.sending(tensor, worker))

    def receive(self, tensor: torch.Tensor, worker: int) -> None:
        """Receive into a contiguous tensor of any device."""
        self.at_once(self.receiving(tensor, worker))

    def sending(self, tensor: torch.Tensor, worker: int) -> Iterator[Post]:
        """What posts each part of a tensor of any device, for `at_once`."""
        for host in self._leaving(tensor.detach().contiguous()):
            yield functools.partial(self._group.send, [host], self._rank_of[worker], 0)

    def receiving(self, tensor: torch.Tensor, worker: int) -> Iterator[Post]:
        """As `sending`, into a contiguous tensor of any device."""
        for host in self._coming(tensor):
            yield functools.partial(self._group.recv, [host], self._rank_of[worker], 0)

    def at_once(self, *transfers: Iterator[Post]) -> None:
        """Make several transfers side by side, of each its next part.

        Args:
            transfers: in an order in which all workers could make them one after another; the first part that two
                workers exchange waits for both.
        """
        for parts in itertools.zip_longest(*transfers):
            for work in [self._waiter.aside(post) for post in parts if post is not None]:
                self._waiter.wait(work)

    @staticmethod
    def _leaving(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """A tensor load by load in host memory; the next load comes from the device while one is used."""
        memory, under_way = host_memory_of(tensor.device), None
        for load in _loads(tensor):
            following = memory.out(load)
            if under_way is not None:
                yield under_way.ready()
                under_way.free()
            under_way = following
        if under_way is not None:
            yield under_way.ready()
            under_way.free()

    @staticmethod
    def _coming(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Host memory for a tensor, load by load; what was written there goes to the device after its use."""
        memory = host_memory_of(tensor.device)
        for load in _loads(tensor):
            if not load.is_cuda:
                yield load
                continue
            host = memory.room(load.numel(), load.dtype)
            yield host
            memory.free(host, memory.copy_back(host, load))

    def broadcast(self, tensor: torch.Tensor, worker: int) -> None:
        """Broadcast a contiguous tensor of any device from `worker` to all."""
        options = dist.BroadcastOptions()
        options.rootRank = self._rank_of[worker]
        for host in self._leaving(tensor) if worker == self._me else self._coming(tensor):
            self._waiter.wait(self._group.broadcast([host], options))


def _loads(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A contiguous tensor in parts, which all workers cut alike."""
    return tensor.detach().view(-1).split(max(1, LOAD // tensor.element_size()))


MakeSideGroup = Callable[[str, Sequence[int]], SideGroup]
"""(name, workers) → the group of these workers, as one of them sees it."""
