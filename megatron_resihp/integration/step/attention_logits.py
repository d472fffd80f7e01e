# SPDX-License-Identifier: Apache-2.0
"""The largest attention logits of an iteration: --log-max-attention-logit tells of them, --qk-clip shrinks by them what
makes queries and keys.

Megatron takes maxima over the replicas of a stage once the step is taken, and then changes weights. A worker that died
between would leave some weights changed and others not. Here all workers, standbys included, take the maximum of each
head of each layer before the step is agreed on. The step itself changes the weights, also where it is taken in a
recovery (DESIGN contract 3). Replaces training.clip_qk. May import torch, megatron, `plan` and modules of this package
that know no runtime but in `Runtime`'s type.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.world.own_layers import OwnLayout
from megatron_resihp.plan import Coordinate, Shard


class Attention(NamedTuple):
    """A layer's attention on this worker.

    Attributes:
        layer: its number among the decoder's, from 0.
        shard: that it belongs to.
        module: Megatron's.
    """

    layer: int
    shard: Shard
    module: Any


class Clip(NamedTuple):
    """What says how weights are clipped.

    Attributes:
        threshold: above which a head's largest logit is brought down to it.
        alpha: the queries' share of that; keys have the rest.
    """

    threshold: float
    alpha: float


# ---- an iteration


def are_wanted(args: Any) -> bool:
    """Whether the job follows attention logits. `args`: Megatron's."""
    return bool(args.qk_clip or args.log_max_attention_logit)


def forget_logits(runtime: Runtime) -> None:
    """An attempt at an iteration begins: what forward passes have met so far is of no use to it."""
    if are_wanted(runtime.job.args):
        _take(runtime)


def note_evaluated(runtime: Runtime) -> None:
    """An evaluation is over, on all workers with work: Megatron's next step counts its logits, too."""
    if not are_wanted(runtime.job.args):
        return
    found = _take(runtime).to("cuda")
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    runtime.progress.evaluated = found.cpu()


def share_logits(runtime: Runtime) -> None:
    """Take the maxima over all members, before the step can be agreed on; all of them call it."""
    if not are_wanted(runtime.job.args):
        return
    found = _take(runtime) if runtime.view.works else _nothing(runtime.job.args)
    if runtime.progress.evaluated is not None:
        found = torch.maximum(found, runtime.progress.evaluated)
    runtime.mode.everybody.maximum(found)
    runtime.progress.logits = found


def clip_weights(runtime: Runtime) -> None:
    """The end of a step, whether or not it was skipped, as in Megatron: shrink weights by the maxima, if wanted."""
    args, progress, held = runtime.job.args, runtime.progress, runtime.held
    progress.evaluated = None
    if args.qk_clip and held.shards:
        assert progress.logits is not None
        clip(
            _attentions(held.live.model, held.shards), progress.logits, Clip(args.qk_clip_threshold, args.qk_clip_alpha)
        )


def logged_maximum(runtime: Runtime) -> float | None:
    """What Megatron logs in the job's own layout: the maximum of what the last rank has there."""
    if not are_wanted(runtime.job.args):
        return None
    assert runtime.progress.logits is not None
    return maximum_of_last(runtime.progress.logits, runtime.job.own)


def tell_maximum(runtime: Runtime, original: Callable[..., float]) -> Callable[..., float]:
    """The replacement of clip_qk, which Megatron calls after the step: the agreed maximum, for the log."""

    def clip_qk(model: Any, log_max_only: bool = False) -> float:
        return runtime.progress.outcomes[runtime.progress.iteration].attention_logit or 0.0

    return clip_qk


# ---- maxima by layer and head


def _nothing(args: Any) -> Tensor:
    """Maxima of no logits. Those below 0 aren't told apart from 0: it is what Megatron's log begins with, and far below
    any threshold."""
    return torch.zeros(args.num_layers, args.num_attention_heads)


def _take(runtime: Runtime) -> Tensor:
    held = runtime.held
    return take_maxima(_attentions(held.live.model, held.shards), _nothing(runtime.job.args))


def take_maxima(attentions: Iterator[Attention], into: Tensor) -> Tensor:
    """Collect what forward passes have met since the last call. `into`: maxima by layer and head."""
    for layer, shard, module in attentions:
        found, module.core_attention.current_max_attn_logits = module.core_attention.current_max_attn_logits, None
        if found is not None:
            own = into[layer].view(shard.tp_degree, -1)[shard.tp_rank]
            torch.maximum(own, found.float().cpu(), out=own)
    return into


def maximum_of_last(maxima: Tensor, own: OwnLayout) -> float:
    """The maximum of what the last member of the last stage has. `own`: the job's layout."""
    shards = own.shards_of(Coordinate(own.stages - 1, own.tensor_parallel - 1))
    layers = [layer - 1 for shard in shards for layer in range(shard.first, shard.end) if 0 < layer <= len(maxima)]
    return float(maxima[layers].view(len(layers), own.tensor_parallel, -1)[:, -1].max()) if layers else 0.0


def _attentions(model: Sequence[Any], shards: Sequence[Shard]) -> Iterator[Attention]:
    """Those of all decoder layers of a worker's chunks that have logits."""
    for chunk, shard in zip(model, shards, strict=True):
        for index, layer in enumerate(get_attr_wrapped_model(chunk, "decoder").layers):
            if hasattr(layer.self_attention, "clip_qk"):
                yield Attention(max(shard.first, 1) - 1 + index, shard, layer.self_attention)


# ---- weights


@torch.no_grad()
def clip(attentions: Iterator[Attention], maxima: Tensor, how: Clip) -> None:
    """Megatron's rule, SelfAttention.clip_qk and MLASelfAttention.clip_qk, for weights of whatever degree.

    Factors are made of the whole layer's maxima on the host, so that all holders have the same bits.
    """
    for layer, shard, module in attentions:
        if float(maxima[layer].max()) <= how.threshold:
            continue
        for weight, factors in _factors(module, maxima[layer], how):
            own = factors.view(shard.tp_degree, -1)[shard.tp_rank].unsqueeze(1)
            for tensor in (weight, getattr(weight, "main_param", None)):
                if tensor is not None:
                    tensor.data.mul_(own.to(tensor.device))


def _factors(module: Any, maxima: Tensor, how: Clip) -> list[tuple[Tensor, Tensor]]:
    """The weights that are clipped, and factors of the whole layer's rows of each."""
    config = module.config
    if config.multi_latent_attention:
        queries = module.linear_q_proj if config.q_lora_rank is None else module.linear_q_up_proj
        sizes = config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
        rows = rows_of_latents(maxima, how, *sizes)
        return [(queries.weight, rows[0]), (module.linear_kv_up_proj.weight, rows[1])]
    return [(module.linear_qkv.weight, rows_of_groups(maxima, how, config.num_query_groups, config.kv_channels))]


def rows_of_groups(maxima: Tensor, how: Clip, groups: int, channels: int) -> Tensor:
    """Factors of the rows of a layer's weight of queries, keys and values.

    Args:
        maxima: by head.
        groups: of heads of queries that share keys and values.
        channels: rows of each head.
    """
    scale = _scale(maxima.view(groups, -1).max(dim=1).values, how)
    heads = len(maxima) // groups
    return _rows((heads * channels, scale**how.alpha), (channels, scale ** (1 - how.alpha)), (channels, None))


def rows_of_latents(maxima: Tensor, how: Clip, channels: int, positions: int, values: int) -> tuple[Tensor, Tensor]:
    """Factors of the rows that make queries of latents, and of those that make keys and values.

    Args:
        maxima: by head.
        channels, positions: rows of each head's queries without and with positions. Keys have the same. Heads share
            those with positions, so queries are brought down alone there.
        values: rows of each head's values.
    """
    scale = _scale(maxima, how)
    queries = _rows((channels, scale**how.alpha), (positions, scale))
    return queries, _rows((channels, scale ** (1 - how.alpha)), (values, None))


def _scale(maxima: Tensor, how: Clip) -> Tensor:
    return (how.threshold / maxima).clamp(max=1.0)


def _rows(*blocks: tuple[int, Tensor | None]) -> Tensor:
    """For each head or group one block of rows after the other: how many, and each head's factor; None: 1."""
    like = next(factor for _, factor in blocks if factor is not None)
    columns = [(like.new_ones(len(like)) if factor is None else factor, count) for count, factor in blocks]
    return torch.cat([each.unsqueeze(1).expand(-1, count) for each, count in columns], dim=1).flatten()
