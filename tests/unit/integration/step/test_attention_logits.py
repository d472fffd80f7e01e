# SPDX-License-Identifier: Apache-2.0
"""Weights are clipped as Megatron clips them, however many members hold them. The log has the last rank's maximum."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron_resihp.integration.step.attention_logits import (
    Attention,
    Clip,
    clip,
    maximum_of_last,
    take_maxima,
)
from megatron_resihp.integration.world.own_layers import OwnLayout
from megatron_resihp.plan import Chunk, Shard

HEADS, GROUPS, CHANNELS, WIDTH = 4, 2, 8, 6
POSITIONS, VALUES = 4, 5
HOW = Clip(1.5, 0.3)
MAXIMA = torch.tensor([[0.5, 1.0, 0.2, 0.1], [3.0, 1.0, 2.0, 7.0], [0.3, 0.2, 1.4, 9.0]])
CONFIG: dict[str, Any] = {
    "qk_clip": True, "qk_clip_threshold": HOW.threshold, "qk_clip_alpha": HOW.alpha, "num_query_groups": GROUPS,
    "kv_channels": CHANNELS, "q_lora_rank": 3, "qk_head_dim": CHANNELS, "qk_pos_emb_head_dim": POSITIONS,
    "v_head_dim": VALUES,
}  # fmt: skip
GROUPED, LATENT = ["linear_qkv"], ["linear_q_up_proj", "linear_kv_up_proj"]
ROWS = {
    "linear_qkv": (HEADS + 2 * GROUPS) * CHANNELS, "linear_q_up_proj": HEADS * (CHANNELS + POSITIONS),
    "linear_kv_up_proj": HEADS * (CHANNELS + VALUES),
}  # fmt: skip


def weights(names: list[str], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn(ROWS[name], WIDTH).to(dtype) for name in names}


def attention(cut: dict[str, torch.Tensor]) -> Any:
    """A layer's attention with these weights, or a cut of them; in 16 bits they have masters."""
    config = SimpleNamespace(**CONFIG, multi_latent_attention="linear_qkv" not in cut)
    module = SimpleNamespace(config=config, core_attention=SimpleNamespace(current_max_attn_logits=None))
    for name, weight in cut.items():
        parameter = torch.nn.Parameter(weight.clone())
        if weight.dtype != torch.float32:
            parameter.main_param = weight.float()  # type: ignore[attr-defined]
        setattr(module, name, SimpleNamespace(weight=parameter))
    return module


def all_of(module: Any, names: list[str]) -> list[torch.Tensor]:
    found = [getattr(module, name).weight for name in names]
    return [each.data for each in [*found, *(each.main_param for each in found if hasattr(each, "main_param"))]]


def clipped_by_megatron(names: list[str], dtype: torch.dtype, maxima: torch.Tensor) -> list[torch.Tensor]:
    module = attention(weights(names, dtype))
    vars(module).update(
        num_attention_heads_per_partition=HEADS, num_query_groups_per_partition=GROUPS, cache_mla_latents=False,
        query_projection_size=HEADS * CHANNELS, kv_projection_size=GROUPS * CHANNELS,
    )  # fmt: skip
    module.core_attention.current_max_attn_logits = maxima.clone()
    kind: Any = SelfAttention if names is GROUPED else MLASelfAttention
    for name in ("_clip_linear_qkv", "_clip_q_proj_weight", "_clip_kv_proj_weight"):
        if hasattr(kind, name):
            setattr(module, name, partial(getattr(kind, name), module))
    with torch.no_grad():
        kind.clip_qk(module)
    return all_of(module, names)


@pytest.mark.parametrize("names", [GROUPED, LATENT], ids=["groups", "latents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("layer", range(3))
def test_members_clip_what_megatron_clips(names: list[str], dtype: torch.dtype, degree: int, layer: int) -> None:
    """Also where more members than groups of heads hold a layer."""
    whole = weights(names, dtype)
    cuts = [attention({name: each.chunk(degree)[rank] for name, each in whole.items()}) for rank in range(degree)]
    for rank, module in enumerate(cuts):
        clip(iter([Attention(layer, Shard(0, 4, rank, degree), module)]), MAXIMA, HOW)
    joined = [torch.cat(parts) for parts in zip(*(all_of(module, names) for module in cuts), strict=True)]
    expected = clipped_by_megatron(names, dtype, MAXIMA[layer])
    assert all(map(torch.equal, joined, expected)) and len(joined) == len(expected)
    unchanged = all_of(attention(whole), names)
    assert all(map(torch.equal, joined, unchanged)) == (layer == 0)


def test_heads_are_in_their_places_and_counted_once() -> None:
    module = attention(weights(GROUPED, torch.float32))
    module.core_attention.current_max_attn_logits = torch.tensor([2.0, -1.0])
    own = [Attention(1, Shard(2, 4, 1, 2), module)]
    assert take_maxima(iter(own), torch.zeros(2, HEADS)).tolist() == [[0] * 4, [0, 0, 2, 0]]
    assert take_maxima(iter(own), torch.zeros(2, HEADS)).tolist() == [[0] * 4] * 2


def test_the_log_has_the_maximum_of_the_last_member_of_the_last_stage() -> None:
    """Layers 0 and 4 are the embedding and the head."""
    own = OwnLayout((Chunk(0, 0, 3), Chunk(1, 3, 5)), 2, 1, False, None)
    assert maximum_of_last(MAXIMA, own) == 9.0
    assert maximum_of_last(MAXIMA.flip(1), own) == pytest.approx(0.3)
    only_the_head = OwnLayout((Chunk(0, 0, 4), Chunk(1, 4, 5)), 2, 1, False, None)
    assert maximum_of_last(MAXIMA, only_the_head) == 0.0
