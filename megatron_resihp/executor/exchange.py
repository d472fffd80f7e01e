# SPDX-License-Identifier: Apache-2.0
"""Sends and receives the pieces of messages while the worker computes. May import torch and this package."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_resihp.executor.carriers import Carrier
from megatron_resihp.executor.direct.peers import Pending
from megatron_resihp.executor.messages import Message
from megatron_resihp.executor.routes import Step
from megatron_resihp.plan import PlannedOp


class PieceExchange:
    """One worker's end of all messages of an epoch.

    Args:
        me: this worker's id.
        carrier: carries pieces.
        shape: of one token's part of a message: (micro-batch, hidden).
        dtype: of the tensors.

    Attributes:
        bytes_sent: to other stages, over the object's lifetime.
    """

    def __init__(self, me: int, carrier: Carrier, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._me = me
        self._carrier = carrier
        self._shape = shape
        self._dtype = dtype
        self._receiving: dict[PlannedOp, tuple[torch.Tensor, list[Pending]]] = {}
        self._sending: dict[PlannedOp, list[Pending]] = {}
        self._met: set[tuple[int, int]] = set()
        self.bytes_sent = 0

    def connect(self, steps: Sequence[Step]) -> None:
        """Connect to all peers of these steps; all workers that run them call it before the first step.

        All workers connect in one order of pairs, which prevents a deadlock.
        """
        met = {(piece.sender, piece.receiver) for message in _messages(steps) for piece in message.pieces}
        mine = {(min(pair), max(pair)) for pair in met if self._me in pair} - self._met
        self._carrier.connect(sorted(mine))
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
        buffer = self._room(end - first if message.split else _most_rows(message))
        parts = [
            (buffer[piece.start - first : piece.end - first], piece.sender)
            for piece in message.pieces
            if piece.receiver == self._me
        ]
        self._receiving[message.op] = buffer, self._carrier.receive(parts, message.tag)

    def receive(self, message: Message) -> torch.Tensor:
        """Wait for a message that `take` was called for. All receivers call it for the same messages in one order.

        Returns:
            this worker's part if the message is split, the whole tensor otherwise.
        """
        buffer, works = self._receiving.pop(message.op)
        self._wait_for(message, works)
        if not message.split and len(message.receivers) > 1:
            buffer = self._gather(message, buffer)
        return self._carrier.arrived(buffer)

    def _room(self, rows: int) -> torch.Tensor:
        return self._carrier.room((rows, *self._shape), self._dtype)

    def _wait_for(self, message: Message, works: Sequence[Pending]) -> None:
        """Wait for this worker's pieces of a message."""
        for work in works:
            work.wait()

    def _gather(self, message: Message, share: torch.Tensor) -> torch.Tensor:
        """All receivers' shares, one after the other."""
        gathered = self._room(len(message.receivers) * len(share))
        self._carrier.gather(gathered, share)
        self._carrier.free(share)
        sizes = [end - first for first, end in map(message.sent_to, message.receivers)]
        if len(set(sizes)) == 1:
            return gathered
        whole = self._room(message.tokens)
        torch.cat([part[:size] for part, size in zip(gathered.split(len(share)), sizes, strict=True)], out=whole)
        self._carrier.free(gathered)
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
        parts = [
            (tensor[piece.start - first : piece.end - first], piece.receiver)
            for piece in message.pieces
            if piece.sender == self._me
        ]
        self._sending[message.op] = self._carrier.send(parts, message.tag)
        self.bytes_sent += sum(part.nbytes for part, _ in parts)

    def settle(self, message: Message) -> None:
        """Wait until a message has been sent, unless `finish` has, and free its tensor."""
        for work in self._sending.pop(message.op, ()):
            work.wait()

    def finish(self) -> None:
        """Wait for everything that is still being sent."""
        while self._sending:
            _, sending = self._sending.popitem()
            for work in sending:
                work.wait()


def _messages(steps: Sequence[Step]) -> list[Message]:
    return [end for step in steps for end in (step.source, step.target) if isinstance(end, Message)]


def _most_rows(message: Message) -> int:
    """The number of rows in the largest receiver's share: a collective needs equal shares."""
    return max(end - first for first, end in map(message.sent_to, message.receivers))
