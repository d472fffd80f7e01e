# SPDX-License-Identifier: Apache-2.0
"""Parameters cut into slices, as layers that only GPUs have mark them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_resihp.integration.state.parameter_slices import counted_by_megatron, expert_of, lasting_names, pieces_of
from megatron_resihp.plan import Shard
from megatron_resihp.plan.slices import NO_EXPERT, TIED


def marked(rows: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(rows.unsqueeze(1).clone())
    # As megatron.core.extensions.transformer_engine marks the first weights of its experts, gated or not.
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1
    return parameter


def cut(name: str, rows: torch.Tensor, shard: Shard, gated: bool) -> list[list[float]]:
    """The rows of each slice, if layers are thought in two cuts."""
    parameter = marked(rows)
    module = SimpleNamespace(
        config=SimpleNamespace(gated_linear_unit=gated), named_parameters=lambda: [(name, parameter)]
    )
    return [piece.of(parameter).flatten().tolist() for piece in pieces_of([module], [shard], 2, None)]


EXPERTS = "module.decoder.layers.0.mlp.experts."


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "name",
    ["linear_fc1.weight3", "linear_fc1.bias3", "local_experts.3.linear_fc1.weight", "local_experts.3.linear_fc1.bias"],
)
def test_a_slice_of_experts_is_the_same_whoever_holds_it(name: str, gated: bool) -> None:
    """A member of two holds the first half of the gate and the first half of the up-projection, one after the other; a
    single worker all of the gate, then all of the up-projection."""
    name = EXPERTS + name
    whole = torch.arange(8.0)
    halves = [whole[[0, 1, 4, 5]], whole[[2, 3, 6, 7]]] if gated else [whole[:4], whole[4:]]
    alone = cut(name, whole, Shard(1, 2, 0, 1), gated)
    members = [*cut(name, halves[0], Shard(1, 2, 0, 2), gated), *cut(name, halves[1], Shard(1, 2, 1, 2), gated)]
    assert alone == members
    assert alone[0] == ([0, 1, 4, 5] if gated else [0, 1, 2, 3])


@pytest.mark.parametrize("name", ["linear_fc2.weight3", "local_experts.3.linear_fc2.weight"])
def test_an_experts_second_weight_is_cut_by_what_comes_in(name: str) -> None:
    """Whatever Megatron says: 0.18 says its first dimension for those of Transformer Engine that are not grouped."""
    parameter = torch.nn.Parameter(torch.arange(8.0).reshape(2, 4))
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1
    module = SimpleNamespace(
        config=SimpleNamespace(gated_linear_unit=True), named_parameters=lambda: [(EXPERTS + name, parameter)]
    )
    first, second = (piece.of(parameter).tolist() for piece in pieces_of([module], [Shard(1, 2, 0, 1)], 2, None))
    assert first == [[[0, 1]], [[4, 5]]] and second == [[[2, 3]], [[6, 7]]]


def delta_net(rows: torch.Tensor, members: int, weight: str) -> tuple[SimpleNamespace, torch.nn.Parameter]:
    """One member's part of a model with a gated delta net, of two key heads of width 2 and two value heads of 3."""
    name, parameter = f"module.decoder.layers.0.self_attention.{weight}", marked(rows)
    del parameter.partition_stride  # Megatron says none for convolutions
    net = SimpleNamespace(
        conv_dim_local_tp=14 // members, qk_dim_local_tp=4 // members, v_dim_local_tp=6 // members, num_value_heads=2,
        tp_size=members,
    )  # fmt: skip
    config = SimpleNamespace(gated_linear_unit=False, experimental_attention_variant="gated_delta_net")
    return SimpleNamespace(
        config=config,
        named_parameters=lambda: [(name, parameter)],
        named_modules=lambda: [("module.decoder.layers.0.self_attention", net)],
    ), parameter


@pytest.mark.parametrize(("weight", "lengths"), [("in_proj.weight", (4, 4, 6, 6, 2, 2)), ("conv1d.weight", (4, 4, 6))])
def test_a_slice_of_a_gated_delta_net_is_the_same_whoever_holds_it(weight: str, lengths: tuple[int, ...]) -> None:
    """Queries, keys, values, gates and two numbers for each head, of which each of two members has its half."""
    sections = torch.arange(float(sum(lengths))).split(lengths)
    halves = [torch.cat([section.chunk(2)[member] for section in sections]) for member in range(2)]

    def cut_of(rows: torch.Tensor, shard: Shard) -> dict[tuple[object, str], list[float]]:
        module, parameter = delta_net(rows, shard.tp_degree, weight)
        pieces = pieces_of([module], [shard], 2, None)
        return {(piece.slice, piece.name): piece.of(parameter).flatten().tolist() for piece in pieces}

    alone = cut_of(torch.cat(sections), Shard(1, 2, 0, 1))
    assert alone == cut_of(halves[0], Shard(1, 2, 0, 2)) | cut_of(halves[1], Shard(1, 2, 1, 2))
    assert sorted(number for rows in alone.values() for number in rows) == torch.cat(sections).tolist()


@pytest.mark.parametrize("own_degree", [1, 2, 4])
def test_offsets_of_heads_are_cut_with_them_and_counted_as_megatron_counts_them(own_degree: int) -> None:
    """It counts those of the first member of the job's own layout: of eight heads the first 8, 4 or 2."""
    name, offsets = "module.decoder.layers.0.self_attention.core_attention.softmax_offset", torch.arange(8.0)
    parameter = torch.nn.Parameter(offsets.clone())
    module = SimpleNamespace(
        config=SimpleNamespace(gated_linear_unit=False), named_parameters=lambda: [(name, parameter)]
    )
    for cuts in (1, 2, 4):
        pieces = list(pieces_of([module], [Shard(1, 2, 0, 1)], cuts, None))
        assert torch.cat([piece.of(offsets).flatten() for piece in pieces]).tolist() == offsets.tolist()
        counted = [counted_by_megatron(each.slice, each.name, each.of(offsets), cuts, own_degree) for each in pieces]
        assert torch.cat(counted).tolist() == offsets[: 8 // own_degree].tolist()


HEAD = 5
"""Layers 1 to 4 are the decoder's."""


def places(shard: Shard, predicts: bool, *names: str) -> dict[str, int]:
    """The layer of each parameter of a chunk whose word embeddings are the head's, too, or are beside its weights."""
    module = SimpleNamespace(
        config=SimpleNamespace(mtp_num_layers=1 if predicts else None),
        named_parameters=lambda: [(f"module.{name}", torch.nn.Parameter(torch.zeros(2))) for name in names],
    )
    return {piece.name: piece.slice.layer for piece in pieces_of([module], [shard], 1, HEAD)}


def test_a_head_that_predicts_further_tokens_has_weights_of_its_own_beside_word_embeddings() -> None:
    """Wherever the last decoder layer is, the norm behind it is with it, as in Megatron."""
    last = ("decoder.layers.0.mlp.weight", "decoder.final_layernorm.weight")
    head = ("embedding.word_embeddings.weight", "mtp.layers.0.eh_proj.weight", "output_layer.weight")
    expected = {"mlp.weight": 4, "decoder.final_layernorm.weight": 4}
    of_head = {"word_embeddings.weight": TIED, "mtp.layers.0.eh_proj.weight": HEAD, "output_layer.weight": HEAD}
    assert places(Shard(4, 6, 0, 1), True, *last, *head) == expected | of_head
    assert places(Shard(4, 5, 0, 1), True, *last) == expected
    assert places(Shard(5, 6, 0, 1), True, *head) == of_head


def test_a_head_that_shares_word_embeddings_has_no_others() -> None:
    found = places(Shard(5, 6, 0, 1), False, "decoder.final_layernorm.weight", "output_layer.weight")
    assert found == {"word_embeddings.weight": TIED, "decoder.final_layernorm.weight": HEAD}


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        ("mlp.experts.local_experts.1.linear_fc1.weight", (1, "mlp.experts.local_experts.3.linear_fc1.weight")),
        ("mlp.experts.linear_fc2.weight0", (1, "mlp.experts.linear_fc2.weight2")),
        ("mlp.shared_experts.linear_fc1.weight", (NO_EXPERT, "mlp.shared_experts.linear_fc1.weight")),
        ("mlp.router.weight", (NO_EXPERT, "mlp.router.weight")),
    ],
)
def test_experts_are_named_by_their_number_among_all(inner: str, expected: tuple[int, str]) -> None:
    """The second of two workers that share four experts has the last two."""
    assert expert_of(inner, Shard(1, 2, 0, 1, 1, 2), SimpleNamespace(num_moe_experts=4), 2) == expected


def test_an_expert_is_the_same_slice_whoever_holds_it() -> None:
    def of(shard: Shard, count: int) -> dict[tuple[int, str], int]:
        names = [f"decoder.layers.0.mlp.experts.local_experts.{number}.linear_fc1.weight" for number in range(count)]
        named = [(name, marked(torch.arange(2.0))) for name in names]
        config = SimpleNamespace(gated_linear_unit=False, num_moe_experts=4)
        module = SimpleNamespace(config=config, named_parameters=lambda: named)
        return {(piece.slice.share, piece.name): piece.slice.cut for piece in pieces_of([module], [shard], 1, None, 2)}

    halves = of(Shard(1, 2, 0, 1, 0, 2), 2) | of(Shard(1, 2, 0, 1, 1, 2), 2)
    assert halves == of(Shard(1, 2, 0, 1), 4) and len(halves) == 4


def test_an_expert_is_the_same_slice_where_workers_have_unequal_numbers_of_them() -> None:
    """Three workers have 3, 3 and 2 of eight experts, or one has all."""
    config, inner = SimpleNamespace(num_moe_experts=8), "mlp.experts.local_experts.{}.linear_fc1.weight"
    found = [
        expert_of(inner.format(place), Shard(1, 2, 0, 1, rank, 3, 0, 8), config, 8)
        for rank, count in enumerate([3, 3, 2])
        for place in range(count)
    ]
    assert found == [expert_of(inner.format(place), Shard(1, 2, 0, 1), config, 8) for place in range(8)]


def test_members_of_a_stage_may_have_whole_experts() -> None:
    """Two members with one expert each have the same slices of them between them as one that has both."""

    def of(shard: Shard, count: int) -> set[tuple[int, int, str, tuple[float, ...]]]:
        names = [f"decoder.layers.0.mlp.experts.local_experts.{number}.linear_fc1.weight" for number in range(count)]
        named = [(name, marked(torch.arange(4.0))) for name in names]
        config = SimpleNamespace(gated_linear_unit=False, num_moe_experts=2)
        module = SimpleNamespace(config=config, named_parameters=lambda: named)
        found = pieces_of([module], [shard], 2, None, 2)
        return {(*each.slice[1:], each.name, tuple(each.of(each.parameter).flatten().tolist())) for each in found}

    members = [of(Shard(1, 2, rank, 2, 0, 1, 1), 1) for rank in range(2)]
    assert members[0] | members[1] == of(Shard(1, 2, 0, 1), 2) and not members[0] & members[1]


def test_names_last_whichever_share_a_worker_has() -> None:
    """The second of two workers that share four experts."""
    layer = torch.nn.Module()
    layer.local_expert_indices = [2, 3]
    layer.experts, layer.router = torch.nn.Module(), torch.nn.Linear(1, 4, bias=False)
    layer.experts.local_experts = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(2))
    names = [name for name, _ in lasting_names(torch.nn.ModuleDict({"mlp": layer}))]
    assert names == ["mlp.experts.local_experts.2.weight", "mlp.experts.local_experts.3.weight", "mlp.router.weight"]
