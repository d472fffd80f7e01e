# SPDX-License-Identifier: Apache-2.0
"""Known models as Megatron's arguments, so that users can name a model. Imports `config` and `layers`.

Sources: the models' own papers and published configurations. "llama2-30b", which was never released, is LLaMA's 30B (as
in the experiments of ResiHP, arXiv 2605.06374).
"""

from collections.abc import Mapping
from typing import Any, Final

from megatron_resihp.config import suggestion
from megatron_resihp.cost.model.layers import Model, ModelError, model_from_arguments

_MODERN: Final = {
    "bf16": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "make_vocab_size_divisible_by": 1,
}


def _dense(layers: int, hidden: int, ffn: int, heads: int, groups: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    grouped = {"group_query_attention": True, "num_query_groups": groups} if groups != heads else {}
    return {
        **_MODERN, **grouped, "swiglu": True, "num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn,
        "num_attention_heads": heads, "vocab_size": vocabulary, **more,
    }  # fmt: skip


def _qwen(layers: int, hidden: int, ffn: int, heads: int, groups: int) -> dict[str, Any]:
    return _dense(layers, hidden, ffn, heads, groups, 152064, add_qkv_bias=True)


def _gemma(layers: int, hidden: int, ffn: int, heads: int, groups: int) -> dict[str, Any]:
    return _dense(
        layers, hidden, ffn, heads, groups, 256000, kv_channels=256, untie_embeddings_and_output_weights=False
    )


def _deepseek(dense: int, moe: int, hidden: int, ffn: int, heads: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    return _dense(
        dense + moe, hidden, ffn, heads, heads, vocabulary,
        moe_layer_freq=[0] * dense + [1] * moe, multi_latent_attention=True, qk_layernorm=True,
        kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128, **more,
    )  # fmt: skip


def _experts(
    layers: int, hidden: int, ffn: int, heads: int, groups: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return _dense(layers, hidden, ffn, heads, groups, vocabulary, moe_layer_freq=1, kv_channels=128, **more)


def _nemotron(pattern: str, hidden: int, ffn: int, heads: int, mamba_head_dim: int) -> dict[str, Any]:
    return {
        **_dense(len(pattern), hidden, ffn, heads, 8, 131072), "swiglu": False, "squared_relu": True,
        "position_embedding_type": "none", "kv_channels": 128, "hybrid_layer_pattern": pattern,
        "mamba_num_heads": 128, "mamba_head_dim": mamba_head_dim, "mamba_num_groups": 8, "mamba_state_dim": 128,
    }  # fmt: skip


PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama2-7b": _dense(32, 4096, 11008, 32, 32, 32000),
    "llama2-13b": _dense(40, 5120, 13824, 40, 40, 32000),
    "llama2-30b": _dense(60, 6656, 17920, 52, 52, 32000),
    "llama2-70b": _dense(80, 8192, 28672, 64, 8, 32000),
    "llama3-405b": _dense(126, 16384, 53248, 128, 8, 128256),
    "mixtral-8x7b": _experts(
        32, 4096, 14336, 32, 8, 32000, num_experts=8, moe_ffn_hidden_size=14336, moe_router_topk=2
    ),
    "qwen3-235b-a22b": _experts(
        94, 4096, 12288, 64, 4, 151936,
        qk_layernorm=True, num_experts=128, moe_ffn_hidden_size=1536, moe_router_topk=8,
    ),
    "qwen2.5-7b": _qwen(28, 3584, 18944, 28, 4),
    "qwen2.5-14b": _qwen(48, 5120, 13824, 40, 8),
    "qwen2.5-32b": _qwen(64, 5120, 27648, 40, 8),
    "qwen2.5-72b": _qwen(80, 8192, 29568, 64, 8),
    "gemma-2b": _gemma(18, 2048, 16384, 8, 1),
    "gemma-7b": _gemma(28, 3072, 24576, 16, 16),
    "deepseek-v2-lite": _deepseek(
        1, 26, 2048, 10944, 16, 102400,
        num_experts=64, moe_ffn_hidden_size=1408, moe_router_topk=6, moe_shared_expert_intermediate_size=2816,
    ),
    "deepseek-v3": _deepseek(
        3, 58, 7168, 18432, 128, 129280, q_lora_rank=1536,
        num_experts=256, moe_ffn_hidden_size=2048, moe_router_topk=8, moe_shared_expert_intermediate_size=2048,
    ),
    "nemotron-h-8b": _nemotron("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 4096, 21504, 32, 64),
    "nemotron-nano-9b-v2": _nemotron("M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", 4480, 15680, 40, 80),
}  # fmt: skip


def preset(name: str) -> Model:
    """The layers of a known model.

    Raises:
        ModelError: the name is unknown; the message lists the known names.
    """
    if name not in PRESETS:
        raise ModelError(f"unknown model {name!r}; {suggestion(name, PRESETS)}known are {', '.join(PRESETS)}")
    return model_from_arguments(PRESETS[name])
