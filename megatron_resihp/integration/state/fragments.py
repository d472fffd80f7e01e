# SPDX-License-Identifier: Apache-2.0
"""Tensors of a distributed checkpoint, cut wherever some worker's shard of them ends.

Megatron expects one shape of shard for each tensor; workers under a heterogeneous plan have others. May import torch
and megatron.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from megatron.core.dist_checkpointing.mapping import ShardedTensor


def fragments_of(tensor: ShardedTensor) -> tuple[int, ...]:
    """In how many parts each axis of the whole tensor is cut."""
    assert tensor.axis_fragmentations is not None, f"{tensor.key} is cut unevenly"
    return tensor.axis_fragmentations


def finest(tables: Iterable[Mapping[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """Numbers of parts for each axis such that each worker's shards are whole numbers of them."""
    found: dict[str, tuple[int, ...]] = {}
    for table in tables:
        for key, counts in table.items():
            found[key] = tuple(map(math.lcm, found.get(key, counts), counts))
    return found


def cut(tensor: ShardedTensor, fragments: tuple[int, ...]) -> list[ShardedTensor]:
    """A shard in parts: views, so that nothing is copied.

    Raises:
        ValueError: an axis can't be cut in so many parts.
    """
    parts = [replace(tensor, data=tensor.data.detach())]
    for axis, (coarse, fine) in enumerate(zip(fragments_of(tensor), fragments, strict=True)):
        count, own = fine // coarse, axis - tensor.prepend_axis_num
        if count > 1:
            if own < 0 or tensor.local_shape[own] % count:
                raise ValueError(f"{tensor.key}, {tensor.local_shape}, can't be cut in {count} parts along {own}")
            parts = [smaller for part in parts for smaller in _split(part, axis, own, count)]
    return [replace(part, axis_fragmentations=fragments) for part in parts]


def _split(part: ShardedTensor, axis: int, own: int, count: int) -> Iterator[ShardedTensor]:
    length = part.local_shape[own] // count
    for data, number in zip(part.data.split(length, own), range(count), strict=True):
        offset = list(part.global_offset)
        offset[axis] += number * length
        fragments = list(fragments_of(part))
        fragments[axis] *= count
        yield replace(
            part, data=data, local_shape=tuple(data.shape), global_offset=tuple(offset),
            axis_fragmentations=tuple(fragments),
        )  # fmt: skip
