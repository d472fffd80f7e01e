# SPDX-License-Identifier: Apache-2.0
"""What carries pieces of messages between workers: gloo through host memory, or the devices' own group.

May import torch and this package.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_resihp.executor.direct.peers import Parts, Peers, Pending
from megatron_resihp.executor.groups.waiting import Waiter
from megatron_resihp.executor.host_memory import OnHost, host_memory_of


class Carrier(Protocol):
    """Carries the pieces of one worker's messages."""

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Connect with the others in these pairs of workers, lower ones first; all workers call it together."""
        ...

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor to receive into."""
        ...

    def free(self, room: torch.Tensor) -> None:
        """Take a room back that is out of use."""
        ...

    def receive(self, parts: Parts, tag: int) -> list[Pending]:
        """Begin to receive pieces of one message."""
        ...

    def send(self, parts: Parts, tag: int) -> list[Pending]:
        """Begin to send pieces of one message, which the caller must not change."""
        ...

    def gather(self, gathered: torch.Tensor, share: torch.Tensor) -> None:
        """Gather equal shares from all members of this worker's stage."""
        ...

    def arrived(self, room: torch.Tensor) -> torch.Tensor:
        """What has come, on the device; the room is taken back."""
        ...


class HostCarrier:
    """Gloo. Tensors of other devices go through host memory.

    Args:
        me: this worker's id.
        group: gloo group of all workers that exchange messages.
        rank_of: rank in `group` of each worker.
        stage_group: gloo group of the members of this worker's stage, in tensor-parallel order; None if it is alone.
        device: of the tensors that `arrived` returns.
        waiter: ends waits when the epoch breaks; None: c10d's own waits end then (`waiting.Waiter.install`).
    """

    def __init__(
        self, me: int, group: dist.ProcessGroup, rank_of: Mapping[int, int], stage_group: dist.ProcessGroup | None,
        device: torch.device, waiter: Waiter | None = None,
    ) -> None:  # fmt: skip
        self._me, self._group, self._rank_of, self._stage_group = me, group, rank_of, stage_group
        self._device, self._waiter = device, waiter
        self._memory = host_memory_of(device)

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Gloo connects when it first needs a peer, and one of the two waits there for the other."""
        token = torch.zeros(1)
        for low, high in pairs:
            if self._me == low:
                work = self._post(dist.isend, token, group=self._group, group_dst=self._rank_of[high])
            else:
                work = self._post(dist.irecv, token, group=self._group, group_src=self._rank_of[low])
            self._wait(work)

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._memory.room(torch.Size(shape).numel(), dtype).view(*shape)

    def free(self, room: torch.Tensor) -> None:
        self._memory.free(room)

    def receive(self, parts: Parts, tag: int) -> list[Pending]:
        return [
            _Posted(
                self._post(dist.irecv, part, group=self._group, group_src=self._rank_of[worker], tag=tag), self._wait
            )
            for part, worker in parts
        ]

    def send(self, parts: Parts, tag: int) -> list[Pending]:
        leaving = [(self._memory.out(part), worker) for part, worker in parts]
        return [
            _Posted(
                self._post(dist.isend, part.ready(), group=self._group, group_dst=self._rank_of[worker], tag=tag),
                self._wait,
                part,
            )
            for part, worker in leaving
        ]

    def gather(self, gathered: torch.Tensor, share: torch.Tensor) -> None:
        aside = self._waiter is not None
        work = dist.all_gather_into_tensor(gathered, share, group=self._stage_group, async_op=aside)
        if aside:
            self._wait(work)

    def arrived(self, room: torch.Tensor) -> torch.Tensor:
        return self._memory.take_to(self._device, room)

    def _post(self, operation: Callable[..., Any], tensor: torch.Tensor, **options: Any) -> Any:
        post = functools.partial(operation, tensor, **options)
        return post() if self._waiter is None else self._waiter.aside(post)

    def _wait(self, work: Any) -> None:
        # torch returns None to ranks outside the group.
        assert work is not None
        if self._waiter is None:
            work.wait()
        else:
            self._waiter.wait(work)


class _Posted:
    """An operation of gloo's, with what it sends: gloo forgets a send whose Work has no reference."""

    def __init__(self, work: Any, wait: Callable[[Any], None], sent: OnHost | None = None) -> None:
        self._work, self._wait, self._sent = work, wait, sent

    def wait(self) -> None:
        self._wait(self._work)
        if self._sent is not None:
            self._sent.free()


class DirectCarrier:
    """The devices' own groups. The order of messages identifies them (`direct.order.in_agreed_order`).

    Args:
        peers: of all workers of the plan.
        stage_group: torch's group of the members of this worker's stage, in tensor-parallel order; None if it is alone.
    """

    def __init__(self, peers: Peers, stage_group: dist.ProcessGroup | None) -> None:
        self._peers, self._stage_group = peers, stage_group

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """The group is connected."""

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._peers.room(shape, dtype)

    def free(self, room: torch.Tensor) -> None:
        """torch does."""

    def receive(self, parts: Parts, tag: int) -> list[Pending]:
        return [self._peers.exchange((), parts)] if parts else []

    def send(self, parts: Parts, tag: int) -> list[Pending]:
        return [self._peers.exchange([(part.detach().contiguous(), peer) for part, peer in parts], ())] if parts else []

    def gather(self, gathered: torch.Tensor, share: torch.Tensor) -> None:
        dist.all_gather_into_tensor(gathered, share, group=self._stage_group)

    def arrived(self, room: torch.Tensor) -> torch.Tensor:
        return room
