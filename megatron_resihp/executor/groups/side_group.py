# SPDX-License-Identifier: Apache-2.0
"""A gloo group that can include standbys. May import torch and this package."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_resihp.executor.groups.waiting import Waiter

STANDBY_TIMEOUT = timedelta(days=1)
"""Side groups wait while others evaluate or save; the control plane bounds that by marking the epoch as broken."""


class SideGroup:
    """A gloo group of any workers, outside torch's default world; built straight from the store.

    torch refuses a second default group, and `new_group` needs a world that standbys are not in.
    """

    def __init__(self, store: dist.Store, name: str, workers: Sequence[int], me: int, waiter: Waiter) -> None:
        self._waiter = waiter
        self.workers = tuple(workers)
        self._rank_of = {worker: rank for rank, worker in enumerate(self.workers)}
        self._group = dist.ProcessGroupGloo(
            dist.PrefixStore(name, store), self._rank_of[me], len(self.workers), STANDBY_TIMEOUT
        )

    def sum(self, values: torch.Tensor) -> None:
        """Sum a host tensor over all workers, in place."""
        self._waiter.wait(self._group.allreduce([values]))

    def send(self, tensor: torch.Tensor, worker: int) -> None:
        """Send a tensor of any device."""
        host = tensor.detach().cpu().contiguous()
        self._peer_to_peer(lambda: self._group.send([host], self._rank_of[worker], 0))

    def receive(self, tensor: torch.Tensor, worker: int) -> None:
        """Receive into a tensor of any device."""
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            self._peer_to_peer(lambda: self._group.recv([tensor], self._rank_of[worker], 0))
            return
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._peer_to_peer(lambda: self._group.recv([host], self._rank_of[worker], 0))
        tensor.copy_(host)

    def _peer_to_peer(self, post: Callable[[], Any]) -> None:
        self._waiter.wait(self._waiter.aside(post))

    def broadcast(self, tensor: torch.Tensor, worker: int) -> None:
        """Broadcast a tensor of any device from `worker` to all."""
        host = tensor.detach().cpu().contiguous()
        options = dist.BroadcastOptions()
        options.rootRank = self._rank_of[worker]
        self._waiter.wait(self._group.broadcast([host], options))
        if host.data_ptr() != tensor.data_ptr():
            tensor.copy_(host)


MakeSideGroup = Callable[[str, Sequence[int]], SideGroup]
"""(name, workers) → the group of these workers, as one of them sees it."""
