# SPDX-License-Identifier: Apache-2.0
"""Layers of a model: parameters, FLOPs and activations, beside hand-made arithmetic and Megatron's own."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.cost.model.layers import LayerKind, ModelError, model_from_arguments
from megatron_resihp.cost.model.parts import Part, ShardError
from megatron_resihp.cost.model.presets import PRESETS, preset

GPT = {
    "num_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
}
LLAMA = {**PRESETS["llama2-7b"], "num_layers": 2}


def megatrons(arguments: dict[str, Any], **more: Any) -> SimpleNamespace:
    """Arguments as Megatron's own formulas want them, with the defaults that they need."""
    heads = arguments["num_attention_heads"]
    defaults = {
        "group_query_attention": False, "num_query_groups": heads, "num_experts": None, "swiglu": False,
        "moe_shared_expert_intermediate_size": None, "mtp_num_layers": None, "normalization": "LayerNorm",
        "multi_latent_attention": False, "untie_embeddings_and_output_weights": False, "moe_latent_size": None,
        "kv_channels": arguments["hidden_size"] // heads, "ffn_hidden_size": 4 * arguments["hidden_size"],
        "add_bias_linear": True, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 1, "world_size": 1, "data_parallel_size": 1,
        "use_distributed_optimizer": False, "moe_ffn_hidden_size": None, "moe_router_topk": 2, "moe_layer_freq": 1,
        "experimental_attention_variant": None, "attention_output_gate": False, "hybrid_layer_pattern": None,
        "linear_key_head_dim": None, "linear_value_head_dim": None, "linear_num_key_heads": None,
        "linear_num_value_heads": None, "linear_conv_kernel_dim": None, "q_lora_rank": None, "qk_head_dim": 128,
    }  # fmt: skip
    given = {**defaults, **arguments, **more}
    given.setdefault("padded_vocab_size", given.get("vocab_size"))
    return SimpleNamespace(**given)


class TestParameters:
    @pytest.mark.parametrize(
        ("name", "count"),
        [
            # As published with the weights.
            ("llama2-7b", 6_738_415_616),
            ("llama2-13b", 13_015_864_320),
            ("llama2-30b", 32_528_943_616),
            ("llama2-70b", 68_976_648_192),
            ("llama3-405b", 405_853_388_800),
            ("mixtral-8x7b", 46_702_792_704),
            ("qwen3-235b-a22b", 235_093_634_560),
            ("qwen2.5-7b", 7_615_616_512),
            ("qwen2.5-14b", 14_770_033_664),
            ("qwen2.5-32b", 32_763_876_352),
            ("qwen2.5-72b", 72_706_203_648),
            ("gemma-2b", 2_506_172_416),
            ("gemma-7b", 8_537_680_896),
            ("deepseek-v2-lite", 15_706_484_224),
            # 671,026,419,200 are published; 58 layers have a bias for each of 256 experts that is no parameter.
            ("deepseek-v3", 671_026_419_200 - 58 * 256),
            ("nemotron-nano-9b-v2", 8_888_227_328),
        ],
    )
    def test_of_known_models(self, name: str, count: int) -> None:
        assert preset(name).parameters == count

    def test_of_a_gpt_with_biases_and_learned_positions(self) -> None:
        model = model_from_arguments(GPT)
        h, padded = 512, 1024
        attention = 3 * h * h + 3 * h + h * h + h
        mlp = h * 4 * h + 4 * h + 4 * h * h + h
        assert [layer.parameters for layer in model.layers] == [
            padded * h + 256 * h,
            *[attention + mlp + 2 * 2 * h] * 4,
            # The output layer's weights are the embedding's.
            2 * h,
        ]

    def test_of_a_mamba_layer(self) -> None:
        [mamba] = {layer for layer in preset("nemotron-h-8b").layers if layer.kind == LayerKind.MAMBA}
        inner, states = 128 * 64, 2 * 8 * 128
        projections = 4096 * (2 * inner + states + 128) + inner * 4096
        convolution = (inner + states) * 4 + (inner + states)
        assert mamba.parameters == 4096 + projections + convolution + 3 * 128 + inner

    def test_of_a_gated_delta_net(self) -> None:
        """All layers but each third one have it."""
        sizes = {
            "linear_attention_freq": 3, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 64,
            "linear_value_head_dim": 32, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        }  # fmt: skip
        model = model_from_arguments({**GPT, **sizes, "experimental_attention_variant": "gated_delta_net"})
        plain = model_from_arguments(GPT).layers[1]
        assert [layer is plain or layer == plain for layer in model.layers[1:-1]] == [False, False, True, False]
        h, queries, values = 512, 4 * 64, 8 * 32
        attention = 3 * h * h + 3 * h + h * h + h
        delta_net = h * (2 * queries + 2 * values + 2 * 8) + values * h + 4 * (2 * queries + values) + 2 * 8 + 2 * 32
        assert model.layers[1].parameters - plain.parameters == delta_net - attention
        assert model.layers[1].square_flops == 0
        model.require_even(4)
        with pytest.raises(ShardError, match="8 TP members can't share 4 key heads"):
            model.require_even(8)

    @pytest.mark.parametrize("name", ["llama2-13b", "llama2-70b", "gemma-7b", "deepseek-v2-lite"])
    def test_as_megatron_reports_them(self, name: str) -> None:
        memory = pytest.importorskip("megatron.training.theoretical_memory_usage")
        arguments = megatrons(dict(PRESETS[name]))
        # 18 bytes for each parameter on the one worker.
        reported = memory.compute_weight_and_optimizer_memory(arguments) / 18
        assert preset(name).parameters == reported

    def test_predictions_of_further_tokens_are_a_part_of_the_head(self) -> None:
        """A layer like the last one each, three norms, and a projection of what two layers give."""
        untied = {**GPT, "untie_embeddings_and_output_weights": True}
        plain, predicting = (model_from_arguments({**untied, "mtp_num_layers": depths}) for depths in (None, 2))
        layer, head = plain.layers[-2], plain.layers[-1]
        h = GPT["hidden_size"]
        assert len(predicting.layers) == len(plain.layers)
        more = predicting.layers[-1].parameters - head.parameters
        assert more == 2 * (layer.parameters + 2 * h * h + 3 * 2 * h)
        flops = 2 * (layer.token_flops + head.token_flops + 2 * 2 * h * h)
        assert predicting.layers[-1].token_flops == head.token_flops + flops
        assert predicting.layers[-1].kinds == (LayerKind.HEAD, *2 * (LayerKind.TRANSFORMER, LayerKind.HEAD))

    def test_letters_are_those_of_megatrons_layout(self) -> None:
        assert model_from_arguments({**GPT, "mtp_num_layers": 2}).letters == ("E", *"tttt", "mmL")
        assert preset("deepseek-v2-lite").letters == ("E", *27 * "t", "L")
        with pytest.raises(ModelError, match="no letter for attention, mamba, mlp layers"):
            _ = preset("nemotron-h-8b").letters


class TestFlops:
    def test_of_a_llama_layer(self) -> None:
        layer = model_from_arguments(LLAMA).layers[1]
        h, ffn = 4096, 11008
        assert layer.token_flops == 2 * (4 * h * h + 3 * h * ffn)
        # Scores and weighted sum, half of which a causal mask leaves: 2 · 2h · ½ + ½ of the same.
        assert layer.square_flops == 2 * h

    @pytest.mark.parametrize("name", ["llama2-70b", "qwen2.5-7b", "gemma-2b", "deepseek-v2-lite", "nemotron-h-8b"])
    def test_as_megatron_counts_them(self, name: str) -> None:
        training = pytest.importorskip("megatron.training.training")
        model, arguments = preset(name), megatrons(dict(PRESETS[name]), seq_length=4096)
        if name == "nemotron-h-8b":
            assert 2 * arguments.hidden_size == 128 * 64, "Megatron takes Mamba's inner width as 2h"
        counted = training.num_floating_point_operations(arguments, 3) / 3
        tokens, squares = 3 * 4096, 3 * 4096**2
        ours = sum(layer.token_flops * tokens + layer.square_flops * squares for layer in model.layers)
        # What Megatron leaves out: routers. What it has in excess: norms of MLA's latents, two FLOPs for each.
        routers = 26 * 2 * 2048 * 64 * tokens if name == "deepseek-v2-lite" else 0
        latents = 27 * 2 * 512 * tokens if name == "deepseek-v2-lite" else 0
        assert ours - routers + latents == pytest.approx(counted, rel=1e-9)


class TestActivations:
    """Table 2 of arXiv 2205.05198: 34 sbh, and 5 a s² b for scores that are kept; here per token, and per token²."""

    def test_of_a_gpt_layer(self) -> None:
        layer = model_from_arguments({**GPT, "bf16": True, "attention_backend": "unfused"}).layers[1]
        assert sum(part.token_bytes for part in layer.parts) == 34 * 512
        assert sum(part.square_bytes for part in layer.parts) == 5 * 8

    @pytest.mark.parametrize(("layers", "scores"), [("local", 5 * 8), ("transformer_engine", 0)])
    def test_megatrons_own_attention_keeps_its_scores(self, layers: str, scores: int) -> None:
        """Whatever backend it is told."""
        layer = model_from_arguments({**GPT, "bf16": True, "transformer_impl": layers}).layers[1]
        assert sum(part.square_bytes for part in layer.parts) == scores

    def test_what_tensor_parallel_members_share_without_sequence_parallelism(self) -> None:
        """Section 4.1: sbh (10 + 24/t)."""
        parts = model_from_arguments({**GPT, "bf16": True}).layers[1].parts
        assert sum(part.token_bytes for part in parts if not part.units) == 10 * 512
        assert sum(part.token_bytes * part.share(4, 0) for part in parts if part.units) == 24 * 512 / 4

    def test_of_a_gated_layer_with_grouped_queries_and_no_dropout(self) -> None:
        layer = preset("llama2-70b").layers[1]
        h, groups, head, ffn = 8192, 8, 128, 28672
        norms, queries, keys_and_values, before_projection = 4 * h, h, 2 * groups * head, h
        mlp = 3 * ffn
        values = norms + queries + keys_and_values + before_projection + mlp
        assert sum(part.token_bytes for part in layer.parts) == 2 * values
        assert not any(part.square_bytes for part in layer.parts)

    def test_of_the_head(self) -> None:
        head = preset("llama2-7b").layers[-1]
        assert sum(part.token_bytes for part in head.parts) == 4 * (4096 + 32000)


class TestShards:
    @given(units=st.integers(1, 300), degree=st.integers(1, 300))
    def test_members_share_the_whole_and_differ_by_one_unit_at_most(self, units: int, degree: int) -> None:
        part = Part("columns", units)
        if degree > units:
            with pytest.raises(ShardError, match=f"{degree} TP members can't share {units} columns"):
                part.share(degree, 0)
            return
        shares = [part.share(degree, rank) for rank in range(degree)]
        assert sum(shares) == 1
        assert max(shares) - min(shares) <= Fraction(1, units) and shares == sorted(shares, reverse=True)
        assert part.uneven(degree) == (len(set(shares)) > 1)

    def test_three_members_of_a_llama_70b(self) -> None:
        layer = preset("llama2-70b").layers[1]
        held = [sum(part.parameters * part.share(3, rank) for part in layer.parts) for rank in range(3)]
        h, head, ffn = 8192, 128, 28672
        # 8 query groups are 3 + 3 + 2; a group is 8 query heads, a key and a value head.
        group = h * 10 * head + 8 * head * h
        columns = [9558, 9557, 9557]
        assert sum(columns) == ffn
        assert held == [2 * h + n * group + c * 3 * h for n, c in zip([3, 3, 2], columns, strict=True)]

    def test_more_members_than_query_groups(self) -> None:
        [part] = [part for part in preset("gemma-2b").layers[1].parts if part.name == "query groups"]
        assert part.share(4, 3) == Fraction(1, 4)
        with pytest.raises(ShardError, match="3 TP members can't share 1 query groups"):
            part.share(3, 0)


class TestBadArguments:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"hidden_size": None}, "hidden_size must be a whole number"),
            ({"vocab_size": 0}, "vocab_size must be"),
            ({"num_experts": 4, "moe_layer_freq": [1, 0]}, "moe_layer_freq has 2 elements for 4 layers"),
            ({"hybrid_layer_pattern": "MG*"}, "not modelled: G"),
            ({"hybrid_layer_pattern": "M*/M"}, "multi-token prediction"),
        ],
    )
    def test_are_named(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(ModelError, match=message):
            model_from_arguments({**GPT, **change})

    def test_an_unknown_preset(self) -> None:
        with pytest.raises(ModelError, match="unknown model 'gpt-5'; known are llama2-7b, "):
            preset("gpt-5")
