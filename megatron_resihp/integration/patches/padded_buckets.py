# SPDX-License-Identifier: Apache-2.0
"""Patch: what Megatron saves of a distributed optimizer in the fully reshardable format. May import torch.

Megatron puts an optimizer's buckets together without the padding between them, and then looks parameters up by where
they are in the buffer with that padding. So parameters behind a padded bucket are saved with other parameters' numbers,
and the last ones with zeros. Buckets are padded to a multiple of the replicas that share them out. Sizes of real models
are such multiples for most numbers of replicas that people start with, but not for those that a death leaves. Wraps
DistributedOptimizer.sharded_param_state_fully_reshardable.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def wrap_fully_reshardable(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same with buckets where they are in their buffers."""

    @functools.wraps(original)
    def sharded_param_state_fully_reshardable(self: Any, *positional: Any, **options: Any) -> Any:
        gather = self.get_parameter_state_dp_zero

        def gather_in_place(**how: Any) -> Any:
            state = gather(**how)
            return None if state is None else _in_place(state, self.buffers)

        self.get_parameter_state_dp_zero = gather_in_place
        try:
            return original(self, *positional, **options)
        finally:
            del self.get_parameter_state_dp_zero

    return sharded_param_state_fully_reshardable


def _in_place(state: Mapping[Any, Any], buffers: Sequence[Any]) -> dict[Any, Any]:
    return {key: {dtype: with_padding(tensors, buffers[key]) for dtype, tensors in of_buffer.items()}
            if isinstance(key, int) and not isinstance(key, bool) else of_buffer
            for key, of_buffer in state.items()}  # fmt: skip


def with_padding(tensors: Mapping[str, Any], buffer: Any) -> dict[str, Any]:
    """Tensors of a whole buffer, as Megatron puts them together, with the padding between its buckets."""
    if buffer.numel == buffer.numel_unpadded:
        return dict(tensors)
    return {name: _padded(each, buffer) if isinstance(each, torch.Tensor) else each for name, each in tensors.items()}


def _padded(tensor: torch.Tensor, buffer: Any) -> torch.Tensor:
    padded, start = tensor.new_zeros(buffer.numel), 0
    for bucket in buffer.buckets:
        count = bucket.numel_unpadded
        padded[bucket.offset : bucket.offset + count] = tensor[start : start + count]
        start += count
    return padded
