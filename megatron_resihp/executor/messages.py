# SPDX-License-Identifier: Apache-2.0
"""The messages between two pipeline stages, and their pieces. Imports `plan` only."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from megatron_resihp.plan import PlannedOp


class Piece(NamedTuple):
    """Tokens start, …, end − 1 of a message, from one worker to another."""

    sender: int
    receiver: int
    start: int
    end: int


@dataclass(frozen=True)
class Message:
    """One micro-batch's tensor between two stages, [tokens, micro-batch, hidden]: each token crosses once.

    Attributes:
        op: the op whose result this is: F's output, or B's gradient of its input.
        senders, receivers: the members of both stages, in tensor-parallel order.
        tokens: length of the whole tensor.
        split: whether each member has its own part of the tokens (sequence parallelism), instead of all of them.
        tag: distinguishes this message from all other messages between two workers.
    """

    op: PlannedOp
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    tokens: int
    split: bool
    tag: int

    def __str__(self) -> str:
        return f"the result of {self.op}"

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces in token order; at most one piece between two workers.

        Where members have all tokens, there are as many pieces as members in the larger stage, and the receivers gather
        the rest from each other (ResiHP, arXiv 2605.06374). Where each member has its own part, pieces are the overlaps
        of these parts.
        """
        cut: Callable[[int, int, int], tuple[Piece, ...]] = _overlaps if self.split else _even_pieces
        return tuple(
            Piece(self.senders[piece.sender], self.receivers[piece.receiver], piece.start, piece.end)
            for piece in cut(len(self.senders), len(self.receivers), self.tokens)
        )

    def held_by(self, sender: int) -> tuple[int, int]:
        """The first token of a sender's tensor, and the end (exclusive)."""
        if not self.split:
            return 0, self.tokens
        rank = self.senders.index(sender)
        return _cut(self.tokens, rank, len(self.senders)), _cut(self.tokens, rank + 1, len(self.senders))

    def sent_to(self, receiver: int) -> tuple[int, int]:
        """The first token that a receiver gets, and the end: its whole part if `split`, else its share of the gather.

        Shares follow each other in the order of the receivers; they may be empty.
        """
        count = len(self.receivers)
        parts = count if self.split else max(len(self.senders), count)
        rank = self.receivers.index(receiver)
        first, end = (-(-number * parts // count) for number in (rank, rank + 1))
        return _cut(self.tokens, first, parts), _cut(self.tokens, end, parts)


def _cut(tokens: int, part: int, parts: int) -> int:
    """The first token of a part."""
    return part * tokens // parts


@lru_cache(maxsize=256)
def _even_pieces(senders: int, receivers: int, tokens: int) -> tuple[Piece, ...]:
    """Pieces between members, given by number; each sender has all tokens."""
    count = max(senders, receivers)
    pieces = (
        Piece(i * senders // count, i * receivers // count, _cut(tokens, i, count), _cut(tokens, i + 1, count))
        for i in range(count)
    )
    return tuple(piece for piece in pieces if piece.start < piece.end)


@lru_cache(maxsize=256)
def _overlaps(senders: int, receivers: int, tokens: int) -> tuple[Piece, ...]:
    """Pieces between members, given by number; each sender has its own part, and each receiver needs its own part."""
    held, wanted = ([_cut(tokens, part, parts) for part in range(parts + 1)] for parts in (senders, receivers))
    pieces = (
        Piece(sender, receiver, max(first, start), min(last, end))
        for sender, (first, last) in enumerate(pairwise(held))
        for receiver, (start, end) in enumerate(pairwise(wanted))
    )
    return tuple(piece for piece in pieces if piece.start < piece.end)
