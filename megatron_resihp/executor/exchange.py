# SPDX-License-Identifier: Apache-2.0
"""Sends and receives the pieces of messages over gloo, while the worker computes. May import torch and this package."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_resihp.executor.groups.waiting import Waiter
from megatron_resihp.executor.host_memory import OnHost, host_memory_of
from megatron_resihp.executor.messages import Message
from megatron_resihp.executor.routes import Step
from megatron_resihp.plan import PlannedOp


class GlooExchange:
    """One worker's end of all messages of an epoch. Tensors of other devices go through host memory.

    Args:
        me: this worker's id.
        group: gloo group of all workers that exchange messages.
        rank_of: rank in `group` of each worker.
        stage_group: gloo group of the members of this worker's stage, in tensor-parallel order; None if it is alone.
        shape: of one token's part of a message: (micro-batch, hidden).
        dtype, device: of the tensors that `receive` returns.
        waiter: ends waits when the epoch breaks; None: c10d's own waits end then (`waiting.Waiter.install`).

    Attributes:
        bytes_sent: to other stages, over the object's lifetime.
    """

    def __init__(
        self,
        me: int,
        group: dist.ProcessGroup,
        rank_of: Mapping[int, int],
        stage_group: dist.ProcessGroup | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        waiter: Waiter | None = None,
    ) -> None:
        self._me = me
        self._group = group
        self._rank_of = rank_of
        self._stage_group = stage_group
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._waiter = waiter
        self._receiving: dict[PlannedOp, tuple[torch.Tensor, list[Any]]] = {}
        self._memory = host_memory_of(device)
        # Each operation with its tensor: gloo forgets a send whose Work has no reference.
        self._sending: dict[PlannedOp, list[tuple[Any, OnHost]]] = {}
        self._met: set[tuple[int, int]] = set()
        self.bytes_sent = 0

    def connect(self, steps: Sequence[Step]) -> None:
        """Connect to all peers of these steps; all workers that run them call it before the first step.

        Gloo connects when it first needs a peer, and one of the two waits there for the other. All workers connect in
        one order of pairs, which prevents a deadlock.
        """
        met = {(piece.sender, piece.receiver) for message in _messages(steps) for piece in message.pieces}
        mine = {(min(pair), max(pair)) for pair in met if self._me in pair} - self._met
        token = torch.zeros(1)
        for low, high in sorted(mine):
            if self._me == low:
                work = self._post(dist.isend, token, group=self._group, group_dst=self._rank_of[high])
            else:
                work = self._post(dist.irecv, token, group=self._group, group_src=self._rank_of[low])
            self._wait(work)
        self._met |= mine

    @contextmanager
    def carrying(self, shape: tuple[int, ...]) -> Iterator[None]:
        """Carry messages in which a token's part has another shape; no message may be under way."""
        usual, self._shape = self._shape, shape
        try:
            yield
        finally:
            self._shape = usual

    def take(self, message: Message) -> None:
        """Post the receives of a message."""
        first, end = message.sent_to(self._me)
        rows = end - first if message.split else _most_rows(message)
        buffer = self._room(rows)
        works = [
            self._post(
                dist.irecv,
                buffer[piece.start - first : piece.end - first],
                group=self._group,
                group_src=self._rank_of[piece.sender],
                tag=message.tag,
            )
            for piece in message.pieces
            if piece.receiver == self._me
        ]
        self._receiving[message.op] = buffer, works

    def receive(self, message: Message) -> torch.Tensor:
        """Wait for a message that `take` was called for. All receivers call it for the same messages in one order.

        Returns:
            this worker's part if the message is split, the whole tensor otherwise.
        """
        buffer, works = self._receiving.pop(message.op)
        self._wait_for(message, works)
        if not message.split and len(message.receivers) > 1:
            buffer = self._gather(message, buffer)
        return self._memory.take_to(self._device, buffer)

    def _room(self, rows: int) -> torch.Tensor:
        return self._memory.room(rows * math.prod(self._shape), self._dtype).view(rows, *self._shape)

    def _wait_for(self, message: Message, works: Sequence[Any]) -> None:
        """Wait for this worker's pieces of a message."""
        for work in works:
            self._wait(work)

    def _gather(self, message: Message, share: torch.Tensor) -> torch.Tensor:
        """All receivers' shares, one after the other."""
        gathered = self._room(len(message.receivers) * len(share))
        aside = self._waiter is not None
        work = dist.all_gather_into_tensor(gathered, share, group=self._stage_group, async_op=aside)
        if aside:
            self._wait(work)
        self._memory.free(share)
        sizes = [end - first for first, end in map(message.sent_to, message.receivers)]
        if len(set(sizes)) == 1:
            return gathered
        whole = self._room(message.tokens)
        torch.cat([part[:size] for part, size in zip(gathered.split(len(share)), sizes, strict=True)], out=whole)
        self._memory.free(gathered)
        return whole

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Begin to send this worker's pieces; the caller must not change the tensor until they are settled.

        Raises:
            ValueError: the tensor is not the part of the message that this worker should have.
        """
        first, end = message.held_by(self._me)
        if tensor.shape != (end - first, *self._shape) or tensor.dtype != self._dtype:
            raise ValueError(
                f"{message} is {tuple(tensor.shape)} of {tensor.dtype}; "
                f"{(end - first, *self._shape)} of {self._dtype} should be sent"
            )
        leaving = [
            (piece.receiver, self._memory.out(tensor[piece.start - first : piece.end - first]))
            for piece in message.pieces
            if piece.sender == self._me
        ]
        sending = []
        for receiver, on_host in leaving:
            rows = on_host.ready()
            to = self._rank_of[receiver]
            work = self._post(dist.isend, rows, group=self._group, group_dst=to, tag=message.tag)
            sending.append((work, on_host))
            self.bytes_sent += rows.nbytes
        self._sending[message.op] = sending

    def settle(self, message: Message) -> None:
        """Wait until a message has been sent, and free its tensor."""
        self._settle(self._sending.pop(message.op))

    def _settle(self, sending: Sequence[tuple[Any, OnHost]]) -> None:
        for work, on_host in sending:
            self._wait(work)
            on_host.free()

    def finish(self) -> None:
        """Wait for everything that is still being sent."""
        while self._sending:
            self._settle(self._sending.popitem()[1])

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


def _messages(steps: Sequence[Step]) -> list[Message]:
    return [end for step in steps for end in (step.source, step.target) if isinstance(end, Message)]


def _most_rows(message: Message) -> int:
    """The number of rows in the largest receiver's share: a collective needs equal shares."""
    return max(end - first for first, end in map(message.sent_to, message.receivers))
