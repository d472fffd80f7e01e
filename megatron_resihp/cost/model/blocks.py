# SPDX-License-Identifier: Apache-2.0
"""The parts of each kind of block that Megatron builds: attentions, MLP, experts, Mamba, embedding, head.

Imports `parts`. Activations are those that Megatron keeps from F to B with fused kernels. They follow Korthikanti et
al., Reducing Activation Recomputation in Large Transformer Models (arXiv 2205.05198), table 2. They are generalised to
gated MLPs, grouped queries and separate head widths, and omit dropout masks if there is no dropout.
"""

from dataclasses import dataclass, replace
from math import gcd
from typing import Final

from megatron_resihp.cost.model.parts import Part

MASK_BYTES: Final = 1
"""Bytes per element of a dropout mask."""
FLOAT32: Final = 4
CONVOLUTION: Final = 4
"""Width of Mamba's convolution."""


@dataclass(frozen=True)
class Widths:
    """Sizes and switches of a model.

    `norm`: vectors of a norm, 1 without bias; `positions`: learned positions; `ffn` and `expert_ffn`: columns of an
    MLP; `groups`: query groups; `q_rank`: 0 if queries are not compressed; `linear_…`: of a gated delta net.
    """

    hidden: int
    ffn: int
    heads: int
    groups: int
    head_width: int
    vocabulary: int
    positions: int
    norm: int
    gated: bool
    linear_bias: bool
    qkv_bias: bool
    qk_norm: bool
    output_gate: bool
    tied: bool
    element_bytes: int
    dropout: bool
    attention_dropout: bool
    fused_attention: bool
    latent: bool
    q_rank: int
    kv_rank: int
    qk_width: int
    rope_width: int
    v_width: int
    experts: int
    expert_ffn: int
    experts_per_token: int
    shared_ffn: int
    shared_gate: bool
    mamba_heads: int
    mamba_head_width: int
    mamba_groups: int
    mamba_state: int
    linear_key_heads: int
    linear_value_heads: int
    linear_key_width: int
    linear_value_width: int
    linear_convolution: int

    @property
    def hidden_bytes(self) -> int:
        return self.hidden * self.element_bytes

    @property
    def matrices(self) -> int:
        """Number of matrices of an MLP: up, down, and a gate if it has one."""
        return 3 if self.gated else 2


def attention(w: Widths) -> tuple[Part, ...]:
    """Norm and self-attention with its output projection."""
    return (*_normed_input(w), *(_latent_attention if w.latent else _grouped_attention)(w))


def _grouped_attention(w: Widths) -> tuple[Part, ...]:
    query, key_value = w.heads * w.head_width, 2 * w.groups * w.head_width
    rows = query + key_value + (query if w.output_gate else 0)
    weights = w.hidden * rows + query * w.hidden
    biases = rows if w.qkv_bias or w.linear_bias else 0
    norms = 2 * w.norm * w.head_width if w.qk_norm else 0
    shared = Part(
        # With more members than groups, each member has equally many heads, and equally many rows for keys and values.
        "query groups", w.groups, gcd(w.heads, key_value), weights + biases,
        weight_flops=2 * weights,
        square_flops=2 * query,
        # Query, gate, key and value, and the input of the output projection.
        token_bytes=(query + rows) * w.element_bytes,
        square_bytes=_score_bytes(w),
        exchanged_bytes=key_value * w.element_bytes,
    )  # fmt: skip
    return (shared, Part("norms and bias", parameters=norms + (w.hidden if w.linear_bias else 0)))


def _latent_attention(w: Widths) -> tuple[Part, ...]:
    """Multi-latent attention (DeepSeek): every member holds the down-projections; members share the up-projections."""
    width = w.qk_width + w.rope_width
    query = (w.q_rank or w.hidden) * w.heads * width
    key_value = w.kv_rank * w.heads * (w.qk_width + w.v_width)
    output = w.heads * w.v_width * w.hidden
    down = w.hidden * (w.q_rank + w.kv_rank + w.rope_width)
    norms = w.norm * (w.q_rank + w.kv_rank) if w.qk_norm else 0
    shared = Part(
        "heads", w.heads, parameters=query + key_value + output,
        weight_flops=2 * (query + key_value + output),
        square_flops=w.heads * (width + w.v_width),
        token_bytes=w.heads * (2 * width + 2 * w.v_width) * w.element_bytes,
        square_bytes=_score_bytes(w),
        exchanged_bytes=w.heads * (width + w.v_width) * w.element_bytes,
    )  # fmt: skip
    ranks = (w.q_rank + w.kv_rank) * 2 * w.element_bytes
    return (shared, Part("latents", parameters=down + norms, weight_flops=2 * down, token_bytes=ranks))


def _score_bytes(w: Widths) -> float:
    """Per token²: softmax and, with dropout, its mask and result; fused attention keeps none of them."""
    if w.fused_attention:
        return 0.0
    return float(w.heads * (2 * w.element_bytes + MASK_BYTES if w.attention_dropout else w.element_bytes))


def gated_delta_net(w: Widths) -> tuple[Part, ...]:
    """Norm and gated delta net (arXiv 2412.06464), an attention whose time is linear in the tokens.

    FLOPs are counted as in Megatron. Activations are those of fused kernels: the projections, what the convolution
    makes of them, and the output before and after its gate.
    """
    queries, values = w.linear_key_heads * w.linear_key_width, w.linear_value_heads * w.linear_value_width
    convolved = 2 * queries + values
    projected = convolved + values + 2 * w.linear_value_heads
    weights = w.hidden * projected + values * w.hidden
    # Of each value head the decay and its bias, too.
    small = w.linear_convolution * convolved + 2 * w.linear_value_heads
    shared = Part(
        "key heads", w.linear_key_heads, parameters=weights + small,
        weight_flops=2 * weights,
        token_flops=2 * (w.linear_convolution * convolved + 4 * values * w.linear_value_width),
        token_bytes=(projected + convolved + 2 * values) * w.element_bytes,
    )  # fmt: skip
    return (*_normed_input(w), shared, Part("norm", parameters=w.norm * w.linear_value_width))


def mlp(w: Widths) -> tuple[Part, ...]:
    """Norm and MLP."""
    bias = w.hidden if w.linear_bias else 0
    return (*_normed_input(w), _columns(w, "MLP columns", w.ffn), Part("bias", parameters=bias))


def _columns(w: Widths, name: str, ffn: int) -> Part:
    """Up (and gate) and down projection, cut by columns."""
    up = w.matrices - 1
    bias = up * ffn if w.linear_bias else 0
    return Part(
        name, ffn, parameters=w.matrices * w.hidden * ffn + bias,
        weight_flops=2 * w.matrices * w.hidden * ffn,
        # Before and after the activation function.
        token_bytes=(up + 1) * ffn * w.element_bytes,
    )  # fmt: skip


def moe(w: Widths) -> tuple[Part, ...]:
    """Norm, router, routed experts and shared expert. How evenly tokens are spread is no matter of the model."""
    one, k = _columns(w, "expert columns", w.expert_ffn), w.experts_per_token
    routed = Part(
        one.name, one.units, parameters=one.parameters * w.experts,
        weight_flops=one.weight_flops * k, token_bytes=one.token_bytes * k, experts=w.experts,
        exchanged_bytes=k * w.hidden_bytes,
    )  # fmt: skip
    # Tokens as dispatched and as returned, each to several experts; logits and probabilities.
    dispatched = 2 * k * w.hidden_bytes + 2 * w.experts * FLOAT32
    router = w.hidden * w.experts + (w.experts if w.linear_bias else 0)
    parts = [
        *_normed_input(w),
        Part("router", parameters=router, weight_flops=2 * w.hidden * w.experts, token_bytes=dispatched),
        routed,
    ]
    if w.shared_ffn:
        parts += [
            _columns(w, "shared expert columns", w.shared_ffn),
            Part("shared gate", parameters=w.hidden if w.shared_gate else 0),
        ]
    return tuple(parts)


def mamba(w: Widths) -> tuple[Part, ...]:
    """Norm and Mamba-2 mixer.

    FLOPs are counted as in Megatron, so without the convolution (below 0.1 %). Activations are those of the fused
    kernel, which computes convolution and states again in the backward.
    """
    inner, groups = w.mamba_heads * w.mamba_head_width, 2 * w.mamba_groups * w.mamba_state
    projected = 2 * inner + groups + w.mamba_heads
    weights = w.hidden * projected + inner * w.hidden
    # The convolution with its bias, A, D and the bias of dt of each head, and the gated norm.
    small = (inner + groups) * (CONVOLUTION + 1) + 3 * w.mamba_heads + inner
    shared = Part(
        "Mamba groups", w.mamba_groups, parameters=weights + small,
        weight_flops=2 * weights,
        token_flops=7 * inner * w.mamba_state,
        token_bytes=(projected + 2 * inner) * w.element_bytes,
    )  # fmt: skip
    return (*_normed_input(w), shared)


def _normed_input(w: Widths) -> tuple[Part, ...]:
    """The norm before a block: its input, its output, and the mask of the dropout after the block."""
    mask = w.hidden * MASK_BYTES if w.dropout else 0
    return (Part("norm", parameters=w.norm * w.hidden, token_bytes=2 * w.hidden_bytes + mask),)


def embedding(w: Widths) -> tuple[Part, ...]:
    """Word embedding, cut by rows of the vocabulary, and learned positions; it keeps token ids of eight bytes."""
    mask = w.hidden * MASK_BYTES if w.dropout else 0
    return (
        Part("vocabulary rows", w.vocabulary, parameters=w.vocabulary * w.hidden),
        Part("positions", parameters=w.positions * w.hidden, token_bytes=8 + mask),
    )


def head(w: Widths) -> tuple[Part, ...]:
    """Final norm, output layer and cross entropy, which keeps its softmax in fp32."""
    return (
        Part("norm", parameters=w.norm * w.hidden, token_bytes=2 * w.hidden_bytes),
        _output(w, copy=w.tied),
    )


def mtp_projection(w: Widths) -> tuple[Part, ...]:
    """The parts of a multi-token prediction layer beside its transformer layer.

    These are three norms, the projection of hidden state and embedding, and its own pass through the head's weights.
    """
    projection = 2 * w.hidden * w.hidden
    return (
        Part("norm", parameters=3 * w.norm * w.hidden, token_bytes=6 * w.hidden_bytes),
        Part("columns", w.hidden, parameters=projection, weight_flops=2 * projection),
        replace(_output(w, copy=False), parameters=0),
    )


def word_embeddings_copy(w: Widths) -> tuple[Part, ...]:
    """What a head with weights of its own needs besides to predict further tokens."""
    return (Part("vocabulary rows", w.vocabulary, parameters=w.vocabulary * w.hidden, copy=True),)


def _output(w: Widths, copy: bool) -> Part:
    return Part(
        "vocabulary rows", w.vocabulary, parameters=w.vocabulary * w.hidden, copy=copy,
        weight_flops=2 * w.hidden * w.vocabulary, token_bytes=FLOAT32 * w.vocabulary,
    )  # fmt: skip
