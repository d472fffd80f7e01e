# SPDX-License-Identifier: Apache-2.0
"""The seed of each random stream, from what the stream is for. Imports the standard library only.

A seed depends on nothing else, so whoever computes a layer of a micro-batch draws the same numbers, under any plan and
however often.
"""

from hashlib import blake2b
from typing import Any, Final, NamedTuple

BEFORE_LAYERS: Final = 0
"""Stands for a layer's number where a model draws before its first one. Megatron counts layers from 1."""
EVERYBODY: Final = "default"
"""The stream of whatever tensor-parallel workers compute alike."""


class Part(NamedTuple):
    """A slice of a tensor: number `rank` of `size` ones."""

    rank: int
    size: int


WHOLE: Final = Part(0, 1)


class Key(NamedTuple):
    """What a stream is for.

    Attributes:
        job: the job's --seed.
        iteration, micro_batch: of which it is; micro-batches by their index in the global batch.
        layer: the decoder layer's number in the whole model; what predicts further tokens has numbers behind them.
        kind: which of a layer's streams.
        part: the slice for which its numbers are.
    """

    job: int
    iteration: int
    micro_batch: int
    layer: int
    kind: str
    part: Part


class Predicting(NamedTuple):
    """Numbers of the two parts of what predicts a further token: how it embeds the tokens, and its layer."""

    embedding: int
    inner: int


def predicting_layer(layers: int, depth: int) -> Predicting:
    """`layers`: of the decoder; `depth`: which further token it predicts, from 1."""
    return Predicting(layers + 2 * depth - 1, layers + 2 * depth)


def seed_of(key: Key) -> int:
    """The first 64 bits of a BLAKE2b hash (RFC 7693) of the key. A later version that changed it would give jobs that
    go on from a checkpoint other masks."""
    text = "/".join(map(str, (*key[:-1], *key.part)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def draws(args: Any) -> bool:
    """Whether a model draws random numbers in training. `args`: Megatron's."""
    dropout = args.hidden_dropout or args.attention_dropout
    return bool(dropout or args.moe_input_jitter_eps or args.moe_router_force_load_balancing)
