# SPDX-License-Identifier: Apache-2.0
"""A model as its list of layers, from Megatron's arguments. Imports `parts` and `blocks`.

Embedding and head are separate layers: layer 0 and the last one. What predicts further tokens is a part of the head. A
plan's chunks use the same layer numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from megatron_resihp.cost.model.blocks import (
    Widths,
    attention,
    embedding,
    gated_delta_net,
    head,
    mamba,
    mlp,
    moe,
    mtp_projection,
    word_embeddings_copy,
)
from megatron_resihp.cost.model.parts import Part, ShardError


class ModelError(ValueError):
    """Arguments that do not describe a model of known layers; the message names the argument."""


class LayerKind(StrEnum):
    """What a layer does; the first letters are those of Megatron's pipeline layout."""

    EMBEDDING = "embedding"
    TRANSFORMER = "transformer"
    MOE_TRANSFORMER = "moe transformer"
    LINEAR_TRANSFORMER = "linear transformer"
    """Its attention's time is linear in the tokens."""
    LINEAR_MOE_TRANSFORMER = "linear moe transformer"
    ATTENTION = "attention"
    MLP = "mlp"
    MOE = "moe"
    MAMBA = "mamba"
    HEAD = "head"


LETTERS: Mapping[LayerKind, str] = {
    LayerKind.EMBEDDING: "E",
    LayerKind.TRANSFORMER: "t",
    LayerKind.MOE_TRANSFORMER: "t",
    LayerKind.LINEAR_TRANSFORMER: "t",
    LayerKind.LINEAR_MOE_TRANSFORMER: "t",
    LayerKind.HEAD: "L",
}
"""Letters of Megatron's pipeline layout. It has none for the layers of hybrid models."""
PREDICTION = "m"
"""Its letter for a layer that predicts a further token."""

_HYBRID = {"M": LayerKind.MAMBA, "*": LayerKind.ATTENTION, "-": LayerKind.MLP, "E": LayerKind.MOE}


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        kind: what the layer does.
        parts: what it consists of.
        input_bytes: per token, the input from the layer before it; full recomputation keeps only this. 0 for the
            embedding.
        recomputable: whether full recomputation applies to it; embedding and head are excluded.
        predicting: of a head, the kind of each of the layers that predict further tokens.
    """

    kind: LayerKind
    parts: tuple[Part, ...]
    input_bytes: float
    recomputable: bool = True
    predicting: tuple[LayerKind, ...] = ()

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """What it takes the time of: a prediction of further tokens takes that of a layer and of a head."""
        return (self.kind, *(kind for layer in self.predicting for kind in (layer, self.kind)))

    @property
    def parameters(self) -> int:
        """Number of parameters, without copies of another layer's."""
        return sum(part.parameters for part in self.parts if not part.copy)

    @property
    def token_flops(self) -> float:
        """FLOPs of the forward pass, per token, without attention's scores."""
        return sum(part.weight_flops + part.token_flops for part in self.parts)

    @property
    def square_flops(self) -> float:
        """FLOPs of the forward pass, per token² of a document."""
        return sum(part.square_flops for part in self.parts)


@dataclass(frozen=True)
class Model:
    """A model's layers from embedding to head.

    Attributes:
        layers: in order.
        hidden_bytes: per token, the output of a layer to the next.
    """

    layers: tuple[Layer, ...]
    hidden_bytes: float

    @cached_property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @cached_property
    def experts(self) -> int:
        """Routed experts of a layer; 0: there are none."""
        return max(part.experts for layer in self.distinct[0] for part in layer.parts)

    @property
    def letters(self) -> tuple[str, ...]:
        """Each layer in the letters of Megatron's pipeline layout.

        Raises:
            ModelError: the model is a hybrid, for which Megatron has no such layout.
        """
        unknown = {layer.kind for layer in self.layers} - LETTERS.keys()
        if unknown:
            raise ModelError(f"Megatron's pipeline layout has no letter for {', '.join(sorted(unknown))} layers")
        return tuple(len(layer.predicting) * PREDICTION + LETTERS[layer.kind] for layer in self.layers)

    @cached_property
    def distinct(self) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
        """The distinct layers, and for each layer of the model its index among them."""
        first: dict[Layer, int] = {}
        index = tuple(first.setdefault(layer, len(first)) for layer in self.layers)
        return tuple(first), index

    def require_even(self, degree: int) -> None:
        """Raises ShardError unless members of a tensor-parallel group of this degree can hold equal shards."""
        for part in (part for layer in self.distinct[0] for part in layer.parts):
            part.share(degree, 0)
            if part.uneven(degree):
                raise ShardError(f"{degree} TP members can't share {part.units} {part.name} evenly")

    def uneven(self, degree: int) -> bool:
        """Whether a tensor-parallel group of this degree would hold unequal shards of some layer."""
        return any(part.uneven(degree) for layer in self.distinct[0] for part in layer.parts)


def model_from_arguments(arguments: Mapping[str, Any]) -> Model:
    """The layers that Megatron builds from its arguments (`vars(get_args())`, or the relevant ones of them).

    Absent arguments have Megatron's default. `padded_vocab_size` is needed, or `vocab_size` to be padded for
    `tensor_model_parallel_size`, since the number of rows depends on the tokenizer.

    Raises:
        ModelError: a needed argument is missing, or an argument asks for a feature that is not modelled.
    """
    widths = _widths(arguments)
    decoder = _decoder_layers(arguments, widths)
    predicting = [decoder[-1]] * (arguments.get("mtp_num_layers") or 0)
    return Model(
        (Layer(LayerKind.EMBEDDING, embedding(widths), 0.0, recomputable=False), *decoder, _head(widths, predicting)),
        widths.hidden_bytes,
    )


def _head(widths: Widths, predicting: Sequence[Layer]) -> Layer:
    """`predicting`: a layer like those that predict each further token. Megatron recomputes these as it does other
    layers; here all that they keep is counted."""
    parts = [part for layer in predicting for part in (*mtp_projection(widths), *layer.parts)]
    copies = word_embeddings_copy(widths) if predicting and not widths.tied else ()
    kinds = tuple(layer.kind for layer in predicting)
    return Layer(
        LayerKind.HEAD, (*copies, *parts, *head(widths)), widths.hidden_bytes, recomputable=False, predicting=kinds
    )  # fmt: skip


def _decoder_layers(arguments: Mapping[str, Any], widths: Widths) -> list[Layer]:
    pattern = arguments.get("hybrid_layer_pattern") or arguments.get("hybrid_override_pattern")
    if pattern:
        return _hybrid_layers(str(pattern), widths)
    count = _need(arguments, "num_layers")
    kinds = zip(_linear_pattern(arguments, count), _moe_pattern(arguments, count), strict=True)
    return [_transformer(widths, linear, moe_layer) for linear, moe_layer in kinds]


def _transformer(widths: Widths, linear: bool, moe_layer: bool) -> Layer:
    dense = LayerKind.LINEAR_TRANSFORMER if linear else LayerKind.TRANSFORMER
    mixed = LayerKind.LINEAR_MOE_TRANSFORMER if linear else LayerKind.MOE_TRANSFORMER
    first, second = gated_delta_net if linear else attention, moe if moe_layer else mlp
    return Layer(mixed if moe_layer else dense, (*first(widths), *second(widths)), widths.hidden_bytes)


def _hybrid_layers(pattern: str, widths: Widths) -> list[Layer]:
    main = pattern.split("/")[0].replace("|", "")
    if main != pattern.replace("|", ""):
        raise ModelError(f"hybrid_layer_pattern {pattern!r}: multi-token prediction of hybrids is not modelled")
    unknown = sorted(set(main) - _HYBRID.keys())
    if unknown or not main:
        raise ModelError(f"hybrid_layer_pattern {pattern!r}: not modelled: {', '.join(unknown) or 'no layer'}")
    blocks = {"M": mamba, "*": attention, "-": mlp, "E": moe}
    made = {letter: Layer(_HYBRID[letter], blocks[letter](widths), widths.hidden_bytes) for letter in set(main)}
    return [made[letter] for letter in main]


def _moe_pattern(arguments: Mapping[str, Any], layers: int) -> list[bool]:
    """For each transformer layer, whether its MLP is a mixture of experts."""
    if not arguments.get("num_experts"):
        return [False] * layers
    frequency = arguments.get("moe_layer_freq", 1)
    if isinstance(frequency, int):
        return [number % frequency == 0 for number in range(layers)]
    if len(frequency) != layers:
        raise ModelError(f"moe_layer_freq has {len(frequency)} elements for {layers} layers")
    return [bool(each) for each in frequency]


def _linear_pattern(arguments: Mapping[str, Any], layers: int) -> list[bool]:
    """For each transformer layer, whether its attention is linear: all but every n-th one's, or those of a list."""
    variant, frequency = arguments.get("experimental_attention_variant"), arguments.get("linear_attention_freq")
    if variant is None:
        return [False] * layers
    if variant != "gated_delta_net":
        raise ModelError(f"experimental_attention_variant {variant} is not modelled")
    if isinstance(frequency, int):
        return [(number + 1) % frequency != 0 for number in range(layers)]
    if len(frequency or ()) != layers:
        raise ModelError(f"linear_attention_freq has {len(frequency or ())} elements for {layers} layers")
    return [bool(each) for each in frequency or ()]


def _widths(arguments: Mapping[str, Any]) -> Widths:
    hidden, heads = _need(arguments, "hidden_size"), _need(arguments, "num_attention_heads")
    gated = bool(arguments.get("swiglu") or arguments.get("quick_geglu"))
    grouped = arguments.get("group_query_attention")
    dropout = arguments.get("hidden_dropout", 0.1) > 0
    # Megatron's own attention always has the scores in memory.
    backend, layers = arguments.get("attention_backend"), arguments.get("transformer_impl")
    fused = backend not in ("unfused", "local") and layers != "local"
    latent = bool(arguments.get("multi_latent_attention"))
    if arguments.get("moe_latent_size"):
        raise ModelError("moe_latent_size is not modelled")
    return Widths(
        hidden=hidden,
        ffn=arguments.get("ffn_hidden_size") or (int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden),
        heads=heads,
        groups=arguments["num_query_groups"] if grouped else heads,
        head_width=arguments.get("kv_channels") or hidden // heads,
        vocabulary=padded_vocabulary(arguments),
        positions=_need(arguments, "max_position_embeddings")
        if arguments.get("position_embedding_type", "learned_absolute") == "learned_absolute"
        else 0,
        norm=1 if arguments.get("normalization") == "RMSNorm" else 2,
        gated=gated,
        linear_bias=arguments.get("add_bias_linear", True),
        qkv_bias=arguments.get("add_qkv_bias", False),
        qk_norm=bool(arguments.get("qk_layernorm")),
        output_gate=bool(arguments.get("attention_output_gate")),
        tied=not arguments.get("untie_embeddings_and_output_weights"),
        element_bytes=2 if arguments.get("bf16") or arguments.get("fp16") else 4,
        dropout=dropout,
        attention_dropout=arguments.get("attention_dropout", 0.1) > 0,
        fused_attention=fused,
        latent=latent,
        q_rank=arguments.get("q_lora_rank") or 0,
        kv_rank=arguments.get("kv_lora_rank", 32),
        qk_width=arguments.get("qk_head_dim", 128),
        rope_width=arguments.get("qk_pos_emb_head_dim", 64),
        v_width=arguments.get("v_head_dim", 128),
        experts=arguments.get("num_experts") or 0,
        expert_ffn=arguments.get("moe_ffn_hidden_size") or arguments.get("ffn_hidden_size") or 4 * hidden,
        experts_per_token=arguments.get("moe_router_topk", 2),
        shared_ffn=arguments.get("moe_shared_expert_intermediate_size") or 0,
        shared_gate=bool(arguments.get("moe_shared_expert_gate")),
        mamba_heads=arguments.get("mamba_num_heads") or 2 * hidden // arguments.get("mamba_head_dim", 64),
        mamba_head_width=arguments.get("mamba_head_dim", 64),
        mamba_groups=arguments.get("mamba_num_groups", 8),
        mamba_state=arguments.get("mamba_state_dim", 128),
        linear_key_heads=arguments.get("linear_num_key_heads") or 0,
        linear_value_heads=arguments.get("linear_num_value_heads") or 0,
        linear_key_width=arguments.get("linear_key_head_dim") or 0,
        linear_value_width=arguments.get("linear_value_head_dim") or 0,
        linear_convolution=arguments.get("linear_conv_kernel_dim") or 0,
    )


def padded_vocabulary(arguments: Mapping[str, Any]) -> int:
    """Rows of the embedding: `padded_vocab_size`, or `vocab_size` rounded up as Megatron does."""
    padded = arguments.get("padded_vocab_size")
    if padded:
        return int(padded)
    multiple = arguments.get("make_vocab_size_divisible_by", 128) * arguments.get("tensor_model_parallel_size", 1)
    return -(-_need(arguments, "vocab_size") // multiple) * multiple


def _need(arguments: Mapping[str, Any], name: str) -> int:
    value = arguments.get(name)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{name} must be a whole number of at least 1, got {value!r}")
    return value
