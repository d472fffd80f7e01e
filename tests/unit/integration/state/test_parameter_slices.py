# SPDX-License-Identifier: Apache-2.0
"""Parameters cut into slices, as layers that only GPUs have mark them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_resihp.integration.state.parameter_slices import counted_by_megatron, pieces_of
from megatron_resihp.plan import Shard


def marked(rows: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(rows.unsqueeze(1).clone())
    # As megatron.core.extensions.transformer_engine marks the first weights of grouped experts, gated or not.
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1
    return parameter


def cut(name: str, rows: torch.Tensor, shard: Shard, gated: bool) -> list[list[float]]:
    """The rows of each slice, if layers are thought in two cuts."""
    parameter = marked(rows)
    module = SimpleNamespace(
        config=SimpleNamespace(gated_linear_unit=gated), named_parameters=lambda: [(name, parameter)]
    )
    return [piece.of(parameter).flatten().tolist() for piece in pieces_of([module], [shard], 2, None)]


@pytest.mark.parametrize("gated", [True, False])
def test_a_slice_of_grouped_experts_is_the_same_whoever_holds_it(gated: bool) -> None:
    """A member of two holds the first half of the gate and the first half of the up-projection, one after the other; a
    single worker all of the gate, then all of the up-projection."""
    name = "module.decoder.layers.0.mlp.experts.linear_fc1.weight3"
    whole = torch.arange(8.0)
    halves = [whole[[0, 1, 4, 5]], whole[[2, 3, 6, 7]]] if gated else [whole[:4], whole[4:]]
    alone = cut(name, whole, Shard(1, 2, 0, 1), gated)
    members = [*cut(name, halves[0], Shard(1, 2, 0, 2), gated), *cut(name, halves[1], Shard(1, 2, 1, 2), gated)]
    assert alone == members
    assert alone[0] == ([0, 1, 4, 5] if gated else [0, 1, 2, 3])


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
