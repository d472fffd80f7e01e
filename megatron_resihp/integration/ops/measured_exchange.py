# SPDX-License-Identifier: Apache-2.0
"""Messages between workers under a heterogeneous plan, timed for the records and, on the emulated clock, padded.

A message may come while its receiver computes, and gloo does not say when. So its time is known only where it was
waited for; on the emulated clock each message is followed by the moment at which it was sent, and comes when it would
have come on the device. May import torch, `executor` and this package.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from megatron_resihp.detector.input.records import OpKind
from megatron_resihp.executor.direct.peers import Pending
from megatron_resihp.executor.exchange import PieceExchange
from megatron_resihp.executor.messages import Message, Piece
from megatron_resihp.integration.probes.padding import Padding
from megatron_resihp.integration.probes.probes import Probes
from megatron_resihp.plan import PlannedOp

Stamps = tuple[dist.ProcessGroup, Mapping[int, int]]
"""A gloo group of all workers that exchange messages, and the rank of each worker in it."""
STAMPS: Final = 1 << 24
"""Added to a message's tag for the moment at which it was sent."""
AT_ONCE_S: Final = 1e-4
"""What took less to wait for had been there before."""
NAN: Final = float("nan")


class MeasuredExchange(PieceExchange):
    """A PieceExchange whose transfers the probes note; `begin` is called once, before all else."""

    def begin(
        self, probes: Probes, padding: Padding | None, own_chunks: Sequence[int], at_transfer: Callable[[], None],
        stamps: Stamps,
    ) -> None:  # fmt: skip
        """Say what there is to measure.

        Args:
            own_chunks: numbers of this worker's chunks in the plan.
            at_transfer: called before each transfer, where a fault injection may strike.
            stamps: the group in which moments of sending cross on the emulated clock.
        """
        self._stamp_group = stamps
        self._probes, self._padding, self._at_transfer = probes, padding, at_transfer
        self._own = {chunk: index for index, chunk in enumerate(own_chunks)}
        self._token_bytes = self._dtype.itemsize * self._shape[0] * self._shape[1]
        self._taken: dict[PlannedOp, float] = {}
        self._stamps: dict[PlannedOp, list[tuple[Any, torch.Tensor]]] = {}

    def take(self, message: Message) -> None:
        super().take(message)
        self._taken[message.op] = time.monotonic()
        if self._padding is not None:
            self._stamps[message.op] = [self._take_stamp(message, piece) for piece in self._pieces_to_me(message)]

    def receive(self, message: Message) -> torch.Tensor:
        self._at_transfer()
        return super().receive(message)

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        self._at_transfer()
        super().send(message, tensor)
        now = time.monotonic()
        for piece in message.pieces:
            if piece.sender != self._me:
                continue
            if self._noting:
                self._note(message, piece.receiver, message.op.chunk, piece, now, NAN, received=False)
            if self._padding is not None:
                stamp = torch.tensor([now], dtype=torch.float64)
                group, rank_of = self._stamp_group
                to = rank_of[piece.receiver]
                work = dist.isend(stamp, group=group, group_dst=to, tag=STAMPS + message.tag)
                self._sending[message.op].append(_SentStamp(work, stamp))

    def _wait_for(self, message: Message, works: Sequence[Pending]) -> None:
        began = time.monotonic()
        super()._wait_for(message, works)
        came, posted = time.monotonic(), self._taken.pop(message.op)
        chunk = message.op.chunk + (1 if message.op.kind == "F" else -1)
        arrivals = self._arrivals(message)
        for piece, (sent, arrival) in zip(self._pieces_to_me(message), arrivals, strict=True):
            if self._noting:
                done = _end(arrival, began, came, self._padding is not None)
                self._note(message, piece.sender, chunk, piece, min(posted, sent), done, received=True)
        if self._padding is not None and self._probes.recording and arrivals:
            self._padding.pad_arrival(max(arrival for _, arrival in arrivals))

    @property
    def _noting(self) -> bool:
        """Only in an iteration, and not among moments of a device's clock: these are the host's."""
        return self._probes.recording and self._probes.immediate

    def _pieces_to_me(self, message: Message) -> list[Piece]:
        return [piece for piece in message.pieces if piece.receiver == self._me]

    def _take_stamp(self, message: Message, piece: Piece) -> tuple[Any, torch.Tensor]:
        stamp = torch.empty(1, dtype=torch.float64)
        group, rank_of = self._stamp_group
        return dist.irecv(stamp, group=group, group_src=rank_of[piece.sender], tag=STAMPS + message.tag), stamp

    def _arrivals(self, message: Message) -> list[tuple[float, float]]:
        """When each piece was sent, and comes on the emulated device; what never was (∞, 0) on a real one."""
        pieces, padding = self._pieces_to_me(message), self._padding
        if padding is None:
            return [(float("inf"), 0.0)] * len(pieces)
        arrivals = []
        for piece, (work, stamp) in zip(pieces, self._stamps.pop(message.op), strict=True):
            work.wait()
            sent = float(stamp)
            arrivals.append((sent, sent + padding.transfer_seconds(piece.sender, self._size(piece))))
        return arrivals

    def _size(self, piece: Piece) -> float:
        return float((piece.end - piece.start) * self._token_bytes)

    def _note(
        self, message: Message, peer: int, chunk: int, piece: Piece, posted: float, done: float, *, received: bool
    ) -> None:
        kind, own = OpKind[message.op.kind], self._own[chunk]
        size = self._size(piece)
        self._probes.transfers.note(peer, received, kind, own, message.op.micro_batch, posted, done, size)


class _SentStamp(NamedTuple):
    """Under way, with its tensor."""

    work: Any
    stamp: torch.Tensor

    def wait(self) -> None:
        self.work.wait()


def _end(arrival: float, began: float, came: float, emulated: bool) -> float:
    """When a transfer ended that was waited for from `began` to `came`; NaN: at an unknown moment before.

    On the emulated clock that is known by its `arrival`: reading what had been there may take long on a busy machine.
    """
    if emulated:
        return max(arrival, came) if arrival > began else NAN
    return came if came - began > AT_ONCE_S else NAN
