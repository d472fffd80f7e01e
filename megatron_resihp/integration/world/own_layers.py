# SPDX-License-Identifier: Apache-2.0
"""The job's own split of the model into stages, as Megatron makes it from its arguments. Imports `plan` only."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import product
from typing import Any

from megatron_resihp.plan import Chunk, Coordinate, PlanError, Shard, chunks_of_layout
from megatron_resihp.plan.layers import chunks_from, interleaves
from megatron_resihp.plan.replica import shards_at
from megatron_resihp.plan.spelling import coordinate_at


def own_chunks(args: Any) -> tuple[Chunk, ...]:
    """The layers of each stage, embedding and head included, of Megatron's validated arguments.

    Where the pipeline is interleaved, a stage has several chunks of layers. They are dealt to the stages in turns.
    Source: megatron-core 0.19.2, `get_num_layers_to_build` and `get_transformer_layer_offset`.

    Raises:
        PlanError: the layers can't be split so.
    """
    stages = args.pipeline_model_parallel_size
    if args.pipeline_model_parallel_layout is not None:
        return chunks_of_layout(str(args.pipeline_model_parallel_layout), stages)
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    ends = bool(args.account_for_embedding_in_pipeline_split), bool(args.account_for_loss_in_pipeline_split)
    rest = args.num_layers + sum(ends) - (first or 0) - (last or 0)
    stages_left = stages - (first is not None) - (last is not None)
    of_stage = [_even(rest, stages_left)] * stages
    if first is not None:
        of_stage[0] = first
    if last is not None:
        of_stage[-1] = last
    turns = args.virtual_pipeline_model_parallel_size or 1
    if any(layers % turns for layers in of_stage):
        raise PlanError(f"stages of {', '.join(map(str, of_stage))} layers can't be divided into {turns} chunks each")
    counts = [layers // turns for layers in of_stage] * turns
    counts[0] += 1 - ends[0]
    counts[-1] += 1 - ends[1]
    return chunks_from(counts, stages)


def _even(layers: int, stages: int) -> int:
    """How many layers each of the stages has whose number is not given; PlanError: they don't divide."""
    if min(layers, stages) < 0 or bool(layers) != bool(stages) or (stages and layers % stages):
        raise PlanError(f"{layers} layers are left for {stages} stages, which can't have the same number each")
    return layers // stages if stages else 0


@dataclass(frozen=True)
class OwnLayout:
    """What the job's own arguments say of its layout, taken down before any plan changes what Megatron sees of them.

    Attributes:
        chunks: the layers of each stage; several for each where the pipeline is interleaved.
        tensor_parallel: its degree.
        data_parallel: number of replicas at the start.
        sequence_parallel: whether members of a group share the tokens between layers.
        tied_head: number of the head's layer if it has the word embeddings, too.
        micro_batch_group: micro-batches that go through one chunk of an interleaved pipeline before its stages turn to
            the next chunk; None: it isn't interleaved.
        expert_parallel: how many replicas share each layer's experts.
        expert_members: how many members of a stage have a cut each of the same experts; 0: all have.
    """

    chunks: tuple[Chunk, ...]
    tensor_parallel: int
    data_parallel: int
    sequence_parallel: bool
    tied_head: int | None
    micro_batch_group: int | None = None
    expert_parallel: int = 1
    expert_members: int = 0

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return 1 + max(chunk.stage for chunk in self.chunks)

    def shards_of(self, coordinate: Coordinate) -> tuple[Shard, ...]:
        """What the holder of a coordinate holds."""
        return shards_at(self.chunks, coordinate, self.tensor_parallel, (0, 1, self.expert_members))

    @property
    def expert_groups(self) -> int:
        """How many groups of a stage's members have experts of their own."""
        return self.tensor_parallel // (self.expert_members or self.tensor_parallel)

    @property
    def shares_experts(self) -> bool:
        """Whether any workers have other experts of a layer than others."""
        return self.expert_parallel * self.expert_groups > 1

    def coordinates_in(self, shards: Collection[Shard]) -> tuple[Coordinate, ...]:
        """The coordinates all of whose shards are among these."""
        everything = (Coordinate(*place) for place in product(range(self.stages), range(self.tensor_parallel)))
        return tuple(each for each in everything if {*self.shards_of(each)} <= {*shards} and self.shards_of(each))

    def coordinate_of(self, shards: tuple[Shard, ...]) -> Coordinate | None:
        """The coordinate whose holder holds just these shards; None: there is no such."""
        return coordinate_at(self.chunks, shards, self.tensor_parallel)


def own_layout(args: Any) -> OwnLayout:
    """The layout that Megatron's validated arguments give."""
    chunks = own_chunks(args)
    has_embeddings = bool(args.mtp_num_layers) or not args.untie_embeddings_and_output_weights
    tied_head = chunks[-1].end - 1 if has_embeddings else None
    group = args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size
    replicas, members = sharers_of_experts(args)
    return OwnLayout(
        chunks, args.tensor_model_parallel_size, args.data_parallel_size, args.sequence_parallel, tied_head,
        group if interleaves(chunks) else None, replicas, members,
    )  # fmt: skip


def sharers_of_experts(args: Any) -> tuple[int, int]:
    """How many replicas share each layer's experts, and how many members of a stage the same of them; 0: all do.

    Megatron counts those that share experts from the first member of a stage on: what one replica hasn't the next has.
    """
    members, degree = args.expert_tensor_parallel_size, args.tensor_model_parallel_size
    if not args.num_experts or members in (None, degree):
        return args.expert_model_parallel_size, 0
    return args.expert_model_parallel_size * members // degree, members
