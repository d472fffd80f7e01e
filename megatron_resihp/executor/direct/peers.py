# SPDX-License-Identifier: Apache-2.0
"""One group of all workers of a plan, standbys included, for grouped sends and receives between their devices.

May import torch and the executor's groups. On CPUs gloo takes NCCL's place: like NCCL it is given no tags here, so a
wrong order shows.
"""

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from megatron_resihp.executor.groups.side_group import SideGroup

NAME: Final = "peers"
NCCL: Final = "nccl"

Parts = Sequence[tuple[torch.Tensor, int]]
"""Contiguous tensors, and the workers that they go to or come from."""


class Pending(Protocol):
    """Operations under way."""

    def wait(self) -> None:
        """Wait for the end of them, or let the device's later work wait for it."""
        ...


class Peers(Protocol):
    """The group, as one of its workers sees it."""

    def connect(self) -> None:
        """Make what the first operation needs; all workers call it together."""
        ...

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the device to receive into."""
        ...

    def exchange(self, sends: Parts, receives: Parts) -> Pending:
        """Begin to send and receive, all at once: none of them waits for another one. With each peer, parts are
        received in the order in which they are sent."""
        ...


class GlooPeers(SideGroup):
    """The group of host tensors."""

    def connect(self) -> None:
        """Gloo connects two workers when they first meet."""

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    def exchange(self, sends: Parts, receives: Parts) -> Pending:
        send, receive = self._group.send, self._group.recv
        posts = [(peer, 0, functools.partial(send, [tensor], self._rank_of[peer], 0)) for tensor, peer in sends]
        posts += [(peer, 1, functools.partial(receive, [tensor], self._rank_of[peer], 0)) for tensor, peer in receives]
        # In one order of pairs: the first operation of two workers waits until both have come to it.
        posts.sort(key=lambda post: (sorted((post[0], self._me)), post[1]))
        return _Works(self, [self._waiter.aside(post) for *_, post in posts], (sends, receives))

    def wait_for(self, work: Any) -> None:
        self._waiter.wait(work)


class _Works:
    """`kept`: gloo forgets an operation whose tensor has no reference."""

    def __init__(self, group: GlooPeers, works: Sequence[Any], kept: Any) -> None:
        self._group, self._works, self._kept = group, works, kept

    def wait(self) -> None:
        for work in self._works:
            self._group.wait_for(work)
        self._works, self._kept = (), None


class NcclPeers:
    """The group of a device's tensors, beside torch's world, which standbys are not in."""

    def __init__(self, store: dist.Store, workers: Sequence[int], me: int, timeout: timedelta) -> None:
        self._rank_of = {worker: rank for rank, worker in enumerate(workers)}
        self._group = _nccl_group(dist.PrefixStore(NAME, store), self._rank_of[me], len(workers), timeout)

    def connect(self) -> None:
        number = torch.zeros(1, device="cuda")
        self._group.allreduce([number]).wait()

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="cuda")

    def exchange(self, sends: Parts, receives: Parts) -> Pending:
        device = torch.device("cuda")
        # In a batch, which uses the group's communicator; single operations would make one for each pair.
        self._group._start_coalescing(device)
        for tensor, peer in sends:
            self._group.send([tensor], self._rank_of[peer], 0)
        for tensor, peer in receives:
            self._group.recv([tensor], self._rank_of[peer], 0)
        return _Batch(self._group._end_coalescing(device), (sends, receives))


class _Batch:
    """`kept`: tensors that must not be freed before the device's later work waits for the batch."""

    def __init__(self, work: Any, kept: Any) -> None:
        self._work, self._kept = work, kept

    def wait(self) -> None:
        self._work.wait()
        self._kept = None


def _nccl_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A group outside torch's world, but in its table of groups, where all that have to be aborted are looked up."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    kind = dist.ProcessGroup.BackendType.NCCL
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device("cuda"), kind, dist.ProcessGroupNCCL(store, rank, size, options))
    group._set_group_name(NAME)  # each backend keeps it
    dist.distributed_c10d._world.pg_map[group] = (NCCL, store)
    return group
