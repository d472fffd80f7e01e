# SPDX-License-Identifier: Apache-2.0
"""Which workers keep a shard current without working on it, and how the shard's gradients reach them.

Redundancy outlives replicas: a live worker that holds a shard stays a holder even when its replica has no work
(DESIGN section 8). May import megatron, `plan` and `executor`.
"""

import os
from collections.abc import Iterator

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_resihp.control.node.environment import SLOTS
from megatron_resihp.executor.groups.side_group import MakeSideGroup, SideGroup
from megatron_resihp.integration.state.expert_biases import share_counts
from megatron_resihp.integration.trained import Trained
from megatron_resihp.plan import Coordinate, ParallelPlan
from megatron_resihp.plan.copies import NodeOf
from megatron_resihp.plan.slots import node_of


def nodes_of_job() -> NodeOf:
    """Tells a worker's node, as the coordinator tells it."""
    slots, of_node = int(os.environ[SLOTS]), int(os.environ["LOCAL_WORLD_SIZE"])
    return lambda worker: node_of(worker, slots, of_node)


def keepers_of(plan: ParallelPlan, coordinate: Coordinate) -> tuple[int, ...]:
    """The active worker that sends a shard's gradients, and the standbys that receive them; empty without standbys."""
    standbys = plan.grid.standbys_at(coordinate)
    return (plan.grid.workers_at(coordinate)[0], *standbys) if standbys else ()


def join_buddies(plan: ParallelPlan, coordinate: Coordinate, me: int, make_group: MakeSideGroup) -> SideGroup | None:
    """Make the group over which this shard's gradients reach its standbys, if this worker is in it."""
    workers = keepers_of(plan, coordinate)
    if me not in workers:
        return None
    return make_group(f"buddies/{coordinate.stage}/{coordinate.tp_rank}", workers)


def broadcast_gradients(trained: Trained, buddies: SideGroup) -> None:
    """Give the final gradients of the worker that has them to those that keep them current; all of them call it. Counts
    of tokens go with them."""
    for gradients in _gradient_buffers(trained):
        buddies.broadcast(gradients, buddies.workers[0])
    share_counts(trained.model, lambda counts: buddies.broadcast(counts, buddies.workers[0]))


def _gradient_buffers(trained: Trained) -> Iterator[torch.Tensor]:
    for chunk in trained.model:
        assert isinstance(chunk, DistributedDataParallel), "only Megatron's own DDP is supported"
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data
