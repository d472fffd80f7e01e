# SPDX-License-Identifier: Apache-2.0
"""A world of one process, in which Megatron says where its checkpoints have each parameter. May import megatron.

Survivors write when their groups are gone, and a process that joins what they have written has none. Megatron asks
groups for places and sizes only, so stand-ins that can't communicate do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import transformer_block

from megatron_resihp.integration.world.heterogeneous_groups import MegatronGroups, StageGroup
from megatron_resihp.plan import Shard
from megatron_resihp.plan.replica import experts_of

EXPERTS: Final = "_EXPERT_MODEL_PARALLEL_GROUP"
MEMBERS: Final = "_EXPERT_TENSOR_PARALLEL_GROUP"


@contextmanager
def world_of_one() -> Iterator[Any]:
    """torch's default group, with this process as its only member; yields it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@contextmanager
def as_holder_of(shard: Shard, groups: MegatronGroups, alone: Any) -> Iterator[None]:
    """Let Megatron see this process as the member of a tensor-parallel group whose chunk has this shard's layers.

    A chunk knows the numbers of its layers, and Megatron subtracts from them what the pipeline's layout says of the
    layers before: that of the plan in force, which need not be the one in which the chunk was built.
    """
    kept = groups.stand_in(StageGroup(shard.tp_rank, shard.tp_degree), alone)
    experts = experts_of(shard)
    setattr(parallel_state, EXPERTS, StageGroup(experts.rank, experts.degree))
    setattr(parallel_state, MEMBERS, StageGroup(experts.cut, experts.cuts))
    offset_of = transformer_block.get_transformer_layer_offset
    transformer_block.get_transformer_layer_offset = lambda *_, **__: max(shard.first, 1) - 1
    try:
        yield
    finally:
        transformer_block.get_transformer_layer_offset = offset_of
        vars(parallel_state).update(kept)
