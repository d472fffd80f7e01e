# SPDX-License-Identifier: Apache-2.0
"""Biases that even out the loads of experts (--moe-router-enable-expert-bias), and the counts of tokens behind them.

Replaces finalize_model_grads._update_router_expert_bias and reset_model_temporary_tensors. Megatron changes biases
where it finishes gradients. That is before the step is agreed on, so an iteration that is repeated would change them
twice. Here each expert's tokens are counted from the start of an attempt and summed as gradients are. The step changes
the biases by these sums, also where it is taken in a recovery (DESIGN contract 3). May import megatron.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import get_model_config

COUNTS: Final = "local_tokens_per_expert"
"""The buffer of a router in which Megatron counts; it is not part of checkpoints."""


def sum_only(original: Callable[..., None]) -> Callable[..., None]:
    """The replacement of _update_router_expert_bias: sums the counts over all replicas, and changes no bias yet."""

    def update_router_expert_bias(model: Sequence[Any], config: Any, tp_dp_cp_group: Any = None) -> None:
        group = tp_dp_cp_group or mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
        share_counts(model, lambda counts: dist.all_reduce(counts, group=group))

    return update_router_expert_bias


def keep_counts(original: Callable[..., None]) -> Callable[..., None]:
    """The replacement of reset_model_temporary_tensors: all but the counts, which the step needs."""

    def reset_model_temporary_tensors(config: Any, model: Sequence[Any]) -> None:
        without = copy.copy(config)
        without.moe_router_enable_expert_bias = False
        original(without, model)

    return reset_model_temporary_tensors


def count_exactly(model: Sequence[Any]) -> None:
    """Let new chunks count in 32 bits: Megatron's wrapper for 16 bits narrows buffers, too.

    Counts that were rounded would depend on how micro-batches are dealt out. Megatron itself widens biases, but only
    in the first forward pass, and the state of other workers comes before that.
    """
    for router in _routers(model):
        router._maintain_float32_expert_bias()
        counts = getattr(router, COUNTS)
        counts.data = counts.data.float()


def begin_counting(model: Sequence[Any]) -> None:
    """An attempt at an iteration begins: what an earlier one has counted is of no use."""
    for router in _routers(model):
        getattr(router, COUNTS).zero_()


@torch.no_grad()
def share_counts(model: Sequence[Any], change: Callable[[torch.Tensor], Any]) -> None:
    """Change the counts of all routers together, such as by a sum over workers. `change`: does so in place."""
    routers = _routers(model)
    if routers:
        together = torch.stack([getattr(router, COUNTS) for router in routers])
        change(together)
        for router, counts in zip(routers, together, strict=True):
            getattr(router, COUNTS).copy_(counts)


def named_counts(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The counts of a chunk's routers, by name."""
    return ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(COUNTS))


@torch.no_grad()
def change_biases(model: Sequence[Any]) -> None:
    """Megatron's rule, with summed counts: experts with fewer tokens than the mean get more, and the other way round.

    In 64 bits, so that the sign is right however many tokens there are; all holders of a router come to the same bits.
    """
    for router in _routers(model):
        counts = getattr(router, COUNTS).double()
        direction = torch.sign(counts.mean() - counts).to(router.expert_bias.dtype)
        router.expert_bias += direction * router.config.moe_router_bias_update_rate


def _routers(model: Sequence[Any]) -> list[Any]:
    """Those of a worker's chunks that have such biases; nobody looks for them in jobs without the flag."""
    if not model or not get_model_config(model[0]).moe_router_enable_expert_bias:
        return []
    modules: Iterable[Any] = (module for chunk in model for module in chunk.modules())
    return [module for module in modules if getattr(module, "expert_bias", None) is not None]
