# SPDX-License-Identifier: Apache-2.0
"""Patches: routers that weigh tokens against each other (sinkhorn, expert capacity) see those of the job's own layout.

A tensor-parallel member routes its part of a micro-batch's sequence. Which tokens an expert gets or drops depends on
all tokens of that part. In a stage of another degree parts would be others, and so would the model that is trained. So
there the job's own parts are looked at, one by one. Which tokens are chosen has no gradient, so members need only tell
each other numbers. Replaces router.sinkhorn and router.apply_router_token_dropping. May import megatron and this
package.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu

from megatron_resihp.integration.runtime import Runtime

OfRows = Callable[..., torch.Tensor]
"""From the rows of a part's tokens to a row for each of them."""


def wrap_sinkhorn(runtime: Runtime, original: OfRows) -> OfRows:
    """The replacement of router.sinkhorn, from whose result the router takes the places of the largest only."""

    @functools.wraps(original)
    def sinkhorn(cost: torch.Tensor, *positional: Any, **options: Any) -> torch.Tensor:
        parts = _other_parts(runtime)
        if parts is None:
            return original(cost, *positional, **options)
        return part_by_part(parts, lambda part: original(part, *positional, **options), cost)

    return sinkhorn


def wrap_dropping(
    runtime: Runtime, original: Callable[..., tuple[torch.Tensor, torch.Tensor]]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The replacement of router.apply_router_token_dropping, which keeps a token's probabilities or makes them 0."""

    @functools.wraps(original)
    def apply_router_token_dropping(
        routing_probs: torch.Tensor, routing_map: torch.Tensor, *positional: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = _other_parts(runtime)
        if parts is None:
            return original(routing_probs, routing_map, *positional, **options)

        def kept_in(probs: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
            return original(probs, routed.bool(), *positional, **options)[1]

        with torch.no_grad():
            # As bytes, which every backend carries.
            kept = part_by_part(parts, kept_in, routing_probs.detach(), routing_map.byte())
        return routing_probs * kept, kept

    return apply_router_token_dropping


def _other_parts(runtime: Runtime) -> int | None:
    """In how many parts the job's own layout cuts a sequence, if this worker's stage cuts it otherwise.

    As many as it has tensor-parallel members: where there are several, Megatron refuses to train experts without
    sequence parallelism.
    """
    own = runtime.job.own.tensor_parallel
    return None if mpu.get_tensor_model_parallel_group().size() == own else own


def part_by_part(parts: int, function: OfRows, *rows: torch.Tensor) -> torch.Tensor:
    """What a function makes of each part of a micro-batch, for this member's tokens.

    Args:
        parts: in how many equal ones all tokens of the stage's members are cut, in the order of ranks.
        rows: tensors with a row for each of this member's tokens.
    """
    group = mpu.get_tensor_model_parallel_group()
    members, mine = group.size(), len(rows[0])
    if parts % members == 0:
        return _of_parts(parts // members, function, rows)
    first = group.rank() * mine
    return _of_parts(parts, function, [_of_all(group, each) for each in rows])[first : first + mine]


def _of_parts(count: int, function: OfRows, rows: Any) -> torch.Tensor:
    if len(rows[0]) % count:
        raise RuntimeError(f"{len(rows[0])} tokens can't be routed as in the job's own layout, in {count} equal parts")
    cut = zip(*(each.chunk(count) for each in rows), strict=True)
    return torch.cat([function(*part) for part in cut])


def _of_all(group: Any, rows: torch.Tensor) -> torch.Tensor:
    """The rows of all members, in the order of ranks."""
    every = rows.new_empty((group.size() * len(rows), *rows.shape[1:]))
    dist.all_gather_into_tensor(every, rows.contiguous(), group=group)
    return every
