# SPDX-License-Identifier: Apache-2.0
"""Causal attention of workers that share each sequence (context parallelism). May import torch and Megatron's types.

Megatron cuts a sequence in two chunks for each worker, and worker r of n has chunks r and 2n − 1 − r, so that all have
as much to attend to. Here each worker gathers all keys and values, and attends with its own tokens. The gradients of
keys and values are summed, and each worker gets those of its own tokens. Transformer Engine's ways on a GPU compute the
same.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def chunks_of(rank: int, workers: int) -> tuple[int, int]:
    """The chunks of a sequence that a worker has, in the order in which it has them."""
    return rank, 2 * workers - 1 - rank


def positions(rank: int, workers: int, tokens: int) -> Tensor:
    """Where a worker's tokens are in the sequence. `tokens`: of the sequence."""
    size = tokens // (2 * workers)
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in chunks_of(rank, workers)])


def causal_mask(rank: int, workers: int, tokens: int) -> Tensor:
    """True where a worker's token may not attend: [1, 1, own tokens, tokens of the sequence]."""
    return (torch.arange(tokens) > positions(rank, workers, tokens)[:, None])[None, None]


def whole_sequence(own: Tensor, group: Any) -> Tensor:
    """Keys or values of all tokens of the sequence in their order, out of each worker's, [tokens, …]."""
    gathered: Tensor = Gathered.apply(own, group)
    return gathered


class Gathered(torch.autograd.Function):
    """All-gather forwards, reduce-scatter backwards."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        ctx.group = group
        workers = dist.get_world_size(group)
        by_worker = own.new_empty((workers * own.size(0), *own.shape[1:]))
        dist.all_gather_into_tensor(by_worker, own.contiguous(), group=group)
        order = _order(workers).argsort()
        return _chunked(by_worker, workers)[order].flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        [whole] = gradients
        workers = dist.get_world_size(ctx.group)
        by_worker = _chunked(whole.contiguous(), workers)[_order(workers)].flatten(0, 1)
        own = whole.new_empty((whole.size(0) // workers, *whole.shape[1:]))
        dist.reduce_scatter_tensor(own, by_worker, group=ctx.group)
        return own, None


def _order(workers: int) -> Tensor:
    """The chunks of the sequence, worker by worker."""
    return torch.tensor([chunk for rank in range(workers) for chunk in chunks_of(rank, workers)])


def _chunked(tokens: Tensor, workers: int) -> Tensor:
    return tokens.unflatten(0, (2 * workers, -1))
