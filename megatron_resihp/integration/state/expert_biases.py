# SPDX-License-Identifier: Apache-2.0
"""Biases that even out the loads of experts, and the counts behind them.

There are two kinds: --moe-router-enable-expert-bias follows counts of tokens, and quantile balancing follows sums of
quantiles of scores. Replaces finalize_model_grads._update_router_expert_bias, _update_router_qb_beta and
reset_model_temporary_tensors. Megatron changes biases where it finishes gradients. That is before the step is agreed
on, so an iteration that is repeated would change them twice. Here counts start with an attempt and are summed as
gradients are. The step changes the biases by these sums, also where it is taken in a recovery (DESIGN contract 3). May
import megatron.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import get_model_config

TOKENS: Final = ("local_tokens_per_expert",)
"""A router's buffers in which Megatron counts tokens by expert; not part of checkpoints."""
QUANTILES: Final = ("qb_beta_accum", "qb_beta_count")
"""Those in which it sums the quantiles of micro-batches, and how many these are. All members of a stage, and all that
share a sequence, have the same: Megatron takes quantiles over whole sequences."""
BALANCED: Final = "quantile_balancing"


def sum_only(original: Callable[..., None]) -> Callable[..., None]:
    """The replacement of _update_router_expert_bias: sums the counts over all replicas, and changes no bias yet."""

    def update_router_expert_bias(model: Sequence[Any], config: Any, tp_dp_cp_group: Any = None) -> None:
        group = tp_dp_cp_group or mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
        share_counts(model, lambda counts: dist.all_reduce(counts, group=group), TOKENS)

    return update_router_expert_bias


def sum_quantiles(original: Callable[..., None]) -> Callable[..., None]:
    """The replacement of _update_router_qb_beta, likewise.

    Megatron takes the mean of replicas' means, each of which has as many micro-batches. Here they may have unlike
    numbers, and sums and numbers give the same mean.
    """

    def update_router_qb_beta(model: Sequence[Any], config: Any, dp_cp_group: Any = None) -> None:
        share_counts(model, lambda sums: dist.all_reduce(sums, group=dp_cp_group), QUANTILES)

    return update_router_qb_beta


def keep_counts(original: Callable[..., None]) -> Callable[..., None]:
    """The replacement of reset_model_temporary_tensors: all but the counts, which the step needs."""

    def reset_model_temporary_tensors(config: Any, model: Sequence[Any]) -> None:
        if config.moe_router_load_balancing_type == BALANCED:
            return  # which has no other temporary tensors, and resets sums of quantiles whatever the configuration
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
        for counts in _counts_of(router):
            counts.data = counts.data.float()


def begin_counting(model: Sequence[Any]) -> None:
    """An attempt at an iteration begins: what an earlier one has counted is of no use."""
    for router in _routers(model):
        for counts in _counts_of(router):
            counts.zero_()


@torch.no_grad()
def share_counts(
    model: Sequence[Any], change: Callable[[torch.Tensor], Any], names: Sequence[str] = (*TOKENS, *QUANTILES)
) -> None:
    """Change the counts of all routers together, such as by a sum over workers.

    Args:
        change: does so in place.
        names: of the buffers that are changed.
    """
    counts = counts_in(model, names)
    if counts:
        together = torch.cat([each.flatten() for each in counts])
        change(together)
        for each, changed in zip(counts, together.split([each.numel() for each in counts]), strict=True):
            each.copy_(changed.view_as(each))


def counts_in(model: Sequence[Any], names: Sequence[str] = (*TOKENS, *QUANTILES)) -> list[torch.Tensor]:
    """The counts of all routers of a worker's chunks. `names`: of the buffers."""
    return [each for router in _routers(model) for each in _counts_of(router, names)]


def named_counts(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The counts of a chunk's routers, by name, as vectors."""
    return ((name, buffer.view(-1)) for name, buffer in chunk.named_buffers() if name.endswith((*TOKENS, *QUANTILES)))


@torch.no_grad()
def change_biases(model: Sequence[Any]) -> None:
    """Megatron's rules, with summed counts; all holders of a router come to the same bits."""
    for router in _routers(model):
        if getattr(router, "expert_bias", None) is not None:
            _follow_tokens(router)
        if getattr(router, "qb_beta", None) is not None:
            _follow_quantiles(router)


def _follow_tokens(router: Any) -> None:
    """Experts with fewer tokens than the mean get more, and the other way round.

    In 64 bits, so that the sign is right however many tokens there are.
    """
    counts = router.local_tokens_per_expert.double()
    direction = torch.sign(counts.mean() - counts).to(router.expert_bias.dtype)
    router.expert_bias += direction * router.config.moe_router_bias_update_rate


def _follow_quantiles(router: Any) -> None:
    """The mean quantile is the new bias, or a part of it, around 0."""
    mean = router.qb_beta_accum / router.qb_beta_count.clamp(min=1)
    ema = router.config.moe_router_quantile_balancing_ema
    bias = ema * router.qb_beta + (1.0 - ema) * mean
    router.qb_beta.copy_(bias - bias.mean())


def _counts_of(router: Any, names: Sequence[str] = (*TOKENS, *QUANTILES)) -> list[torch.Tensor]:
    found = [getattr(router, name, None) for name in names]
    return [each for each in found if each is not None]


def _routers(model: Sequence[Any]) -> list[Any]:
    """Those of a worker's chunks that have such biases; nobody looks for them in jobs without the flags."""
    if not model:
        return []
    config = get_model_config(model[0])
    if not config.moe_router_enable_expert_bias and config.moe_router_load_balancing_type != BALANCED:
        return []
    modules: Iterable[Any] = (module for chunk in model for module in chunk.modules())
    return [module for module in modules if _counts_of(module)]
