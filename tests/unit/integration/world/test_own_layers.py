# SPDX-License-Identifier: Apache-2.0
"""The job's own layers of each stage, held against Megatron's own sum."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_resihp.integration.world.own_layers import own_chunks, own_layout
from megatron_resihp.plan import Chunk, Coordinate, PlanError, Shard


def arguments(**changed: Any) -> Namespace:
    defaults: dict[str, Any] = {
        "num_layers": 8, "pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_layout": None, "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None, "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False, "sequence_parallel": False,
        "untie_embeddings_and_output_weights": False, "data_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None, "microbatch_group_size_per_vp_stage": None,
        "mtp_num_layers": None, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": None,
        "num_experts": None,
    }  # fmt: skip
    return Namespace(**(defaults | changed))


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"pipeline_model_parallel_size": 1},
        {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 3},
        {"decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 1},
        {"decoder_last_pipeline_num_layers": 2},
        {"num_layers": 7, "account_for_embedding_in_pipeline_split": True},
        {"num_layers": 6, "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
        {"pipeline_model_parallel_size": 1, "account_for_loss_in_pipeline_split": True},
        {"virtual_pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 4},
        {
            "num_layers": 6, "virtual_pipeline_model_parallel_size": 2, "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
        {
            "num_layers": 12, "virtual_pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 2,
            "decoder_last_pipeline_num_layers": 6,
        },
    ],
)  # fmt: skip
def test_stages_have_the_layers_that_megatron_builds(changed: dict[str, Any]) -> None:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    args = arguments(**changed)
    config = Namespace(
        **vars(args), num_layers_in_first_pipeline_stage=args.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=args.decoder_last_pipeline_num_layers,
    )  # fmt: skip
    stages, turns = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    # Of stage and turn; Megatron calls the latter the virtual stage.
    places = [(stage, turn if turns > 1 else None) for turn in range(turns) for stage in range(stages)]
    expected = [get_num_layers_to_build(config, pp_rank=stage, vp_stage=turn) for stage, turn in places]
    first = [1 + get_transformer_layer_offset(config, pp_rank=stage, vp_stage=turn) for stage, turn in places]
    expected[0] += 1
    expected[-1] += 1
    chunks = own_chunks(args)
    assert [chunk.end - chunk.first for chunk in chunks] == expected
    assert [chunk.first for chunk in chunks[1:]] == first[1:]
    assert [chunk.stage for chunk in chunks] == [stage for stage, _ in places]


@pytest.mark.parametrize(
    "changed",
    [
        {"decoder_first_pipeline_num_layers": 3},
        {"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 3},
        {"decoder_first_pipeline_num_layers": 9},
        {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 3,
         "decoder_last_pipeline_num_layers": 3},
        {"decoder_first_pipeline_num_layers": 4, "decoder_last_pipeline_num_layers": 4},
        {"decoder_first_pipeline_num_layers": 5, "virtual_pipeline_model_parallel_size": 2},
    ],
)  # fmt: skip
def test_layers_that_do_not_divide_as_megatron_divides_them(changed: dict[str, Any]) -> None:
    """Megatron refuses all of these, too."""
    from megatron.core.transformer import TransformerConfig

    args = arguments(**changed)
    with pytest.raises(ValueError, match="layers"):
        TransformerConfig(
            num_layers=args.num_layers, hidden_size=8, num_attention_heads=2, pipeline_dtype=torch.float32,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
            num_layers_in_first_pipeline_stage=args.decoder_first_pipeline_num_layers,
            num_layers_in_last_pipeline_stage=args.decoder_last_pipeline_num_layers,
        )  # fmt: skip
    with pytest.raises(PlanError, match="layers"):
        own_chunks(args)


def test_one_stage_whose_layers_are_those_of_the_last() -> None:
    args = arguments(pipeline_model_parallel_size=1, decoder_last_pipeline_num_layers=8)
    assert own_chunks(args) == (Chunk(0, 0, 10),)


def test_a_layout_is_taken_as_it_is() -> None:
    args = arguments(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="E,t*3|t*5,L")
    assert [chunk.end - chunk.first for chunk in own_chunks(args)] == [4, 6]
    several = own_chunks(arguments(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="E|t*3|t*4|t,L"))
    assert several == (Chunk(0, 0, 1), Chunk(1, 1, 4), Chunk(0, 4, 8), Chunk(1, 8, 10))


def test_coordinates_and_shards() -> None:
    own = own_layout(arguments())
    for coordinate in (Coordinate(0, 0), Coordinate(3, 1)):
        assert own.coordinate_of(own.shards_of(coordinate)) == coordinate
    assert own.shards_of(Coordinate(3, 1)) == (Shard(7, 10, 1, 2),)
    assert own.coordinate_of((Shard(7, 10, 0, 1),)) is None
    assert own.coordinate_of(()) is None


def test_a_stage_of_an_interleaved_pipeline_has_several_shards() -> None:
    own = own_layout(arguments(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2))
    assert own.stages == own.micro_batch_group == 2
    shards = own.shards_of(Coordinate(1, 0))
    assert shards == (Shard(3, 5, 0, 2), Shard(7, 10, 0, 2))
    assert own.coordinate_of(shards) == Coordinate(1, 0) and own.coordinate_of(shards[:1]) is None
    assert own.coordinates_in((*shards, Shard(0, 3, 0, 2))) == (Coordinate(1, 0),)


@pytest.mark.parametrize("untied", [False, True])
def test_a_head_may_share_the_word_embeddings(untied: bool) -> None:
    own = own_layout(arguments(untie_embeddings_and_output_weights=untied))
    assert own.tied_head == (None if untied else 9)


@pytest.mark.parametrize("layout", [None, "Et*3|tt|tt|tmmL"])
def test_a_head_that_predicts_further_tokens_has_word_embeddings_beside_its_own_weights(layout: str | None) -> None:
    own = own_layout(
        arguments(untie_embeddings_and_output_weights=True, mtp_num_layers=2, pipeline_model_parallel_layout=layout)
    )
    assert own.tied_head == 9 and own.chunks[-1] == Chunk(3, 7 if layout is None else 8, 10)


@pytest.mark.parametrize(
    ("tensor", "experts", "expert_tensor", "expected"),
    [
        (2, 2, 2, (2, 0, 1)), (2, 2, None, (2, 0, 1)), (2, 4, 1, (2, 1, 2)), (4, 2, 2, (1, 2, 2)), (1, 8, 1, (8, 0, 1)),
    ],
)  # fmt: skip
def test_which_replicas_and_members_share_experts(
    tensor: int, experts: int, expert_tensor: int | None, expected: tuple[int, int, int]
) -> None:
    args = arguments(
        tensor_model_parallel_size=tensor, num_experts=8, expert_model_parallel_size=experts,
        expert_tensor_parallel_size=expert_tensor,
    )  # fmt: skip
    own = own_layout(args)
    assert (own.expert_parallel, own.expert_members, own.expert_groups) == expected and own.shares_experts


def test_without_experts_nothing_is_shared() -> None:
    own = own_layout(arguments(expert_tensor_parallel_size=4))
    assert (own.expert_parallel, own.expert_members, own.shares_experts) == (1, 0, False)
