"""What has to be moved to get from one plan to another, and how long that takes. Imports numpy, `plan` and `cost`."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from megatron_resihp.cost.job import Array, JobCost
from megatron_resihp.cost.memory import with_layers
from megatron_resihp.plan import Chunk, Coordinate, ParallelPlan, Shard


def bytes_to_move(before: ParallelPlan, after: ParallelPlan, cost: JobCost) -> dict[int, float]:
    """Bytes of weights and optimizer that each worker of the next plan lacks; workers that lack none are left out.

    A worker lacks what its new shards hold and none of its old ones does: rectangles of layers × share of a layer, from
    rank / degree to (rank + 1) / degree (where shards are uneven, as if they were even). Of an optimizer that is
    distributed over copies, a worker gets its share.

    Args:
        before: the plan that the state is held by; workers that are dead by now don't matter.
        after: the plan to get to.
        cost: of the job.

    Raises:
        PlanError: a plan has other layers than the model.
    """
    size = _prefix_bytes(cost, len(after.replicas))
    held = _shards(before, cost)
    lacking = {worker: _lacking(shards, held.get(worker, ()), size) for worker, shards in _shards(after, cost).items()}
    return {worker: number for worker, number in lacking.items() if number > 0}


def seconds_to_get_there(before: ParallelPlan, after: ParallelPlan, cost: JobCost) -> float:
    """Until a plan can run: new process groups, then what is lacking over the links of those who lack most.

    All links are used at once, one for each worker; state is taken to have sources enough.

    Raises:
        PlanError: a plan has other layers than the model.
    """
    if before == after:
        return 0.0
    return cost.rebuild_s + max(bytes_to_move(before, after, cost).values(), default=0.0) / cost.device.bandwidth


def _lacking(wanted: Sequence[Shard], held: Sequence[Shard], size: Array) -> float:
    if wanted == held:
        return 0.0
    return sum(_overlap(shard, shard, size) - sum(_overlap(shard, old, size) for old in held) for shard in wanted)


def _overlap(one: Shard, other: Shard, size: Array) -> float:
    """Bytes that two shards have in common."""
    first, end = max(one.first, other.first), min(one.end, other.end)
    if first >= end:
        return 0.0
    start = max(one.tp_rank / one.tp_degree, other.tp_rank / other.tp_degree)
    stop = min((one.tp_rank + 1) / one.tp_degree, (other.tp_rank + 1) / other.tp_degree)
    return max(stop - start, 0.0) * float(size[end] - size[first])


@lru_cache(maxsize=64)
def _prefix_bytes(cost: JobCost, copies: int) -> Array:
    """Bytes of the layers before each one, and of all, [layers + 1]."""
    training = cost.training
    sharers = copies if training.distributed_optimizer else 1
    each = training.weight_bytes + training.optimizer_bytes / sharers
    return np.cumsum([0.0, *(layer.parameters * each for layer in cost.model.layers)])


def _shards(plan: ParallelPlan, cost: JobCost) -> dict[int, tuple[Shard, ...]]:
    """What each worker holds."""
    held: dict[int, tuple[Shard, ...]] = {}
    first = with_layers(plan.replicas[0], cost.model)
    for replica in plan.replicas:
        chunks = _by_stage(with_layers(replica, cost.model).chunks, len(replica.stages))
        for stage, members in enumerate(replica.stages):
            for tp_rank, worker in enumerate(members):
                held[worker] = tuple(Shard(c.first, c.end, tp_rank, len(members)) for c in chunks[stage])
    for worker, kept in plan.standbys.items():
        if isinstance(kept, Coordinate):
            degree = len(first.stages[kept.stage])
            own = _by_stage(first.chunks, len(first.stages))[kept.stage]
            held[worker] = tuple(Shard(chunk.first, chunk.end, kept.tp_rank, degree) for chunk in own)
        else:
            held[worker] = kept or ()
    return held


def _by_stage(chunks: Sequence[Chunk], stages: int) -> list[list[Chunk]]:
    of_stage: list[list[Chunk]] = [[] for _ in range(stages)]
    for chunk in chunks:
        if chunk.end > chunk.first:
            of_stage[chunk.stage].append(chunk)
    return of_stage
