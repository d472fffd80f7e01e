# SPDX-License-Identifier: Apache-2.0
"""Megatron's groups for a heterogeneous plan: its own tensor-parallel group, and singletons for all the rest.

Replicas and stages that differ have no common grid of ranks. So Megatron is told of one stage only: a world of one
tensor-parallel group, in which each model chunk is built and run as if it were a pipeline stage of its own
(`as_stage`). What crosses stages and replicas is done by `executor`. May import megatron and this package.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_resihp.integration.patches.arguments.derived_arguments import DerivedArguments
from megatron_resihp.integration.world.group_needs import GLOO
from megatron_resihp.integration.world.heterogeneous import HeterogeneousView
from megatron_resihp.plan import Chunk

PIPELINE_GROUP = "_PIPELINE_MODEL_PARALLEL_GROUP"
LETTERS = {"first": "embedding", "middle": "decoder", "last": "loss"}


class StageGroup:
    """Stands for a pipeline group: says which stage of how many this is, and can't communicate."""

    def __init__(self, number: int, count: int) -> None:
        self._number, self._count = number, count

    def rank(self) -> int:
        return self._number

    def size(self) -> int:
        return self._count


class MegatronGroups:
    """Megatron's table of groups, by the names that its own initialisation fills."""

    def __init__(self) -> None:
        """Called where Megatron has made its own groups, once."""
        state = vars(parallel_state)
        self._groups = [name for name, value in state.items() if re.fullmatch(r"_[A-Z_]*GROUP[A-Z_]*", name) and value]
        self._ranks = [name for name, value in state.items() if re.fullmatch(r"_[A-Z_]*RANKS[A-Z_]*", name) and value]

    def on_host(self, backend: str) -> list[str]:
        """Those that Megatron expects to carry host tensors, where groups of this backend don't."""
        return [] if backend == GLOO else [name for name in self._groups if GLOO in name.lower()]

    def replace(self, view: HeterogeneousView, backend: str) -> None:
        """Fill the table for a heterogeneous plan; the world of its working workers has been joined.

        Args:
            backend: of groups that ask for none.
        """
        own, peers = ranks_of_stage(view)
        # As many on all workers, also where no other worker is in the stage: torch names a group by how many its member
        # has made before, and all members of those that follow must have made as many.
        alone = dist.new_group([own], use_local_synchronization=True)
        together = dist.new_group(peers, use_local_synchronization=True)
        self.stand_in(together, alone)
        if on_host := self.on_host(backend):
            group = dist.new_group([own], backend=GLOO, use_local_synchronization=True)
            vars(parallel_state).update(dict.fromkeys(on_host, group))
        for name in self._ranks:
            spans = name in ("_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS", "_MODEL_PARALLEL_GLOBAL_RANKS")
            setattr(parallel_state, name, peers if spans else [own])
        parallel_state._set_global_memory_buffer()

    def stand_in(self, together: Any, alone: Any) -> dict[str, Any]:
        """Fill the table of groups, with one for those that span tensor-parallel members; returns what was there."""
        kept = {name: getattr(parallel_state, name) for name in self._groups}
        for name in self._groups:
            spans = "TENSOR" in name or name == "_MODEL_PARALLEL_GROUP"
            setattr(parallel_state, name, together if spans else alone)
        return kept


def ranks_of_stage(view: HeterogeneousView) -> tuple[int, list[int]]:
    """This worker's rank in the plan's world, and those of its stage."""
    order = view.rank_order
    return order.index(view.worker), [order.index(worker) for worker in view.peers]


@contextmanager
def as_stage(number: int, count: int) -> Iterator[None]:
    """Let Megatron see a chunk as stage `number` of `count`."""
    names = ("_MPU_PIPELINE_MODEL_PARALLEL_RANK", "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", PIPELINE_GROUP)
    kept = [getattr(parallel_state, name) for name in names]
    for name, value in zip(names, (number, count, StageGroup(number, count)), strict=True):
        setattr(parallel_state, name, value)
    try:
        yield
    finally:
        for name, value in zip(names, kept, strict=True):
            setattr(parallel_state, name, value)


def layout_of_chunks(chunks: tuple[Chunk, ...], layers: int, predicting: int) -> PipelineParallelLayerLayout:
    """Megatron's layout in which each chunk is a stage.

    Args:
        layers: of the model, embedding and head included.
        predicting: layers that predict further tokens, a part of the head.
    """
    whole = [["embedding"], *[["decoder"]] * (layers - 2), [*["mtp"] * predicting, "loss"]]
    rows = [[name for names in whole[first:end] for name in names] for _, first, end in chunks]
    return PipelineParallelLayerLayout(rows, len(rows))


class Sizes:
    """What arguments and model configuration say of the layout; Megatron looks it up wherever it builds or runs.

    Scripts build a configuration from the arguments for each micro-batch, so what Megatron has derived from the degree
    has to be that of the stage, too.
    """

    NAMES = ("tensor_model_parallel_size", "expert_tensor_parallel_size", "pipeline_model_parallel_size",
             "pipeline_model_parallel_layout", "virtual_pipeline_model_parallel_size",
             "sequence_parallel", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
             "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
             "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
             "should_pad_vocab", "vocab_size", "deallocate_pipeline_outputs", "use_distributed_optimizer",
             "overlap_grad_reduce", "overlap_param_gather", "bucket_size",
             "use_layer_wise_param_layout", "context_parallel_size", "expert_model_parallel_size",
             "num_distributed_optimizer_instances", "overlap_param_gather_with_optimizer_step",
             "defer_embedding_wgrad_compute", "moe_pad_expert_input_to_capacity",
             "overlap_moe_expert_parallel_comm", "ep_overlap_early_attn_memory_release")  # fmt: skip

    def __init__(self, padded_vocabulary: int, derived: DerivedArguments, *holders: Any) -> None:
        """`holders`: arguments and configuration objects; what they say now is the job's own."""
        self._padded_vocabulary = padded_vocabulary
        self._derived = derived
        self._own = [
            (holder, {name: getattr(holder, name) for name in self.NAMES if hasattr(holder, name)})
            for holder in holders
        ]

    def own(self, holder: Any) -> dict[str, Any]:
        """What a holder says in the job's own layout."""
        return next(values for each, values in self._own if each is holder)

    def restore(self, changed: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Restore the job's own sizes, but for some that a uniform plan has changed."""
        for holder, values in self._own:
            for name, value in values.items():
                setattr(holder, name, changed.get(name, value))

    def replace(self, view: HeterogeneousView) -> None:
        """Replace the job's own sizes by those of a worker's place in a plan.

        Raises:
            RuntimeError: Megatron refuses the degree of its stage.
        """
        degree, chunks = len(view.peers), view.chunks
        derived = self._derived.of_degree(degree)
        self.restore()
        for holder, values in self._own:
            for name in derived:
                if hasattr(holder, name):
                    values.setdefault(name, getattr(holder, name))
            new = {
                **derived,
                "tensor_model_parallel_size": degree,
                "expert_tensor_parallel_size": degree,
                "context_parallel_size": 1,
                "pipeline_model_parallel_size": len(chunks),
                "pipeline_model_parallel_layout": layout_of_chunks(
                    chunks, chunks[-1].end, getattr(holder, "mtp_num_layers", None) or 0
                ),
                "virtual_pipeline_model_parallel_size": None,
                "sequence_parallel": values.get("sequence_parallel", False) and degree > 1,
                "num_layers_in_first_pipeline_stage": None,
                "num_layers_in_last_pipeline_stage": None,
                "decoder_first_pipeline_num_layers": None,
                "decoder_last_pipeline_num_layers": None,
                "account_for_embedding_in_pipeline_split": False,
                "account_for_loss_in_pipeline_split": False,
                "deallocate_pipeline_outputs": len(chunks) > 1,
                # Replicas that differ have no parts in common; all holders of a slice have all of its state.
                "use_distributed_optimizer": False,
                # Without a layout the layer-wise one of a single replica owns all that there is.
                "use_layer_wise_param_layout": False,
                # `modes.early_sums` sums gradients in the backward pass. DDP would insist on each as soon as B is done,
                # not W, and knows nothing of what other workers hold.
                "overlap_grad_reduce": False,
                "overlap_param_gather": False,
                "overlap_param_gather_with_optimizer_step": False,
                "num_distributed_optimizer_instances": 1,
                # Megatron keeps what is left for later in order of F, and a plan's B may be in another one.
                "defer_embedding_wgrad_compute": False,
                # Members of another degree have several of the job's own parts of a sequence, or pieces of them.
                "moe_pad_expert_input_to_capacity": values.get("moe_pad_expert_input_to_capacity", False)
                and degree == values.get("tensor_model_parallel_size"),
            }
            if "should_pad_vocab" in values:
                new |= {"should_pad_vocab": False, "vocab_size": self._padded_vocabulary}
            for name in values.keys() & new.keys():
                setattr(holder, name, new[name])
