# SPDX-License-Identifier: Apache-2.0
"""What a job's single losses would do to it: whether the others have a plan, and whether that fits into memory.

Pure. May import `control`'s planning, `cost`, `plan` and `planner`; not megatron.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_resihp.control.coordination.exposure import exposure, in_words
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.replanning.recovery.inventory import (
    Held,
    Survivors,
    copied_experts,
    require_all_parts,
    shape_of,
)
from megatron_resihp.control.replanning.recovery.next_plan import uniform_or_less
from megatron_resihp.cost.crossing import Crossing, crossing
from megatron_resihp.cost.memory import memory_of
from megatron_resihp.cost.model.layers import Model
from megatron_resihp.cost.room import gib, peak_of_change, usable
from megatron_resihp.cost.running import UnknownCost, cost_of_job
from megatron_resihp.cost.training import Training
from megatron_resihp.plan import ParallelPlan, PlanError, Shard, spelled_out
from megatron_resihp.planner import JobShape, NoPlanError, initial_plan
from megatron_resihp.protocol.job import JobDescription
from megatron_resihp.protocol.planning import KnownJob


@dataclass(frozen=True)
class Use:
    """The most memory that something takes on a worker.

    Attributes:
        worker: that one.
        bytes: there.
    """

    worker: int
    bytes: int

    def __str__(self) -> str:
        return f"{gib(self.bytes)} on worker {self.worker}"


@dataclass(frozen=True)
class Sent:
    """What crosses nodes with and without --resihp-spread-replicas.

    Attributes:
        asked: whether the flag is given.
        unspread, spread: in an iteration.
        losses: which losses end the job with it; None: it changes nothing.
        refused_with: the flag beside which it is refused, as spelled; None: it isn't.
    """

    asked: bool
    unspread: Crossing
    spread: Crossing
    losses: str | None
    refused_with: str | None = None


@dataclass(frozen=True)
class Outlook:
    """What becomes of a job that loses a worker or a node.

    Attributes:
        losses: which ones end it and what helps, as the job says at its start.
        without_plan: single losses after which there is no plan, and why; node 0, which ends any job, is left out.
        first: memory under the first plan; None: it is not known.
        after: the same under the plan after the worst single loss, and that loss.
        changing: the same while old and new state are together, at most.
        usable: bytes of each device; None: it is not known.
        sent: what crosses nodes, in Megatron's order of ranks and with replicas spread; None: it is not known, or there
            is one node.
        unknown: why memory is not known, nor what crosses nodes.
    """

    losses: str
    without_plan: Mapping[str, str]
    first: Use | None = None
    after: tuple[str, Use] | None = None
    changing: tuple[str, Use] | None = None
    usable: int | None = None
    sent: Sent | None = None
    unknown: str | None = None


def outlook(job: JobDescription, size: JobSize, arguments: Mapping[str, Any], fewest: int = 1) -> Outlook:
    """What becomes of a job, as the uniform planner plans.

    Args:
        job: as workers would tell of it.
        size: of the job.
        arguments: Megatron's, of which the model is made.
        fewest: workers that there must be.

    Raises:
        NoPlanError: the sizes do not fit together.
        PlanError: so do the layers.
    """
    shape = shape_of(job, size.workers_per_node)
    plan = initial_plan(shape, size.workers, job.pipeline_last)
    full = spelled_out(plan, job.chunks)
    following, without = dict[str, ParallelPlan](), dict[str, str]()
    by_keeper = copied_experts(plan, job.chunks, full.members, shape.node_of) if job.expert_copies else {}
    everything = {worker: full.shards_of(worker) for worker in full.members}
    for name, lost in _single_losses(everything, size, by_keeper):
        held = {worker: shards for worker, shards in everything.items() if worker not in lost}
        if len(held) < fewest:
            without[name] = f"{len(held)} are left, fewer than --min-workers {fewest}"
            continue
        try:
            if job.distributed_optimizer:
                require_all_parts(plan, held, shape.node_of)
            copied = tuple(shard for keeper, shards in by_keeper.items() if keeper not in lost for shard in shards)
            survivors = Survivors(shape, job.chunks, held, plan, plan, job, dict(arguments), size.slots, copied=copied)
            following[name] = spelled_out(uniform_or_less(survivors)[0], job.chunks)
        except NoPlanError as error:
            without[name] = str(error)
    exposed = exposure(shape, size.workers, job.pipeline_last, fewest)
    said = in_words(size.nodes, exposed, fewest, has_plans=not without)
    try:
        known = KnownJob.of(job, dict(arguments))
        cost = cost_of_job(known, size.slots, size.workers_per_node, job.chunks, None)
        first, after, changing = _memory(full, following, cost.model, cost.training)
        sent = _sent(job, shape, size, cost.model, cost.training, fewest) if size.nodes > 1 else None
    except (UnknownCost, PlanError) as error:
        return Outlook(said, without, unknown=str(error))
    capacity = None if job.device_memory is None else usable(job.device_memory, job.memory_reserve)
    return Outlook(said, without, first, after, changing, capacity, sent)


def _single_losses(everything: Held, size: JobSize, by_keeper: Held) -> Iterator[tuple[str, frozenset[int]]]:
    """Workers and nodes other than node 0, one of those that are alike: their workers hold the same, whichever experts
    these are, and as much of it is gone, or left in copies only.

    Args:
        everything: what each worker holds.
        by_keeper: the copies of experts.
    """
    workers = [(f"worker {worker}", frozenset([worker])) for worker in everything]
    nodes = [(f"node {node}", frozenset(size.slots_on(node))) for node in range(1, size.nodes)]
    holders = Counter(everything.values())
    keepers = {shards: keeper for keeper, shards in by_keeper.items()}
    seen: set[tuple[Any, ...]] = set()
    for name, lost in [*workers, *nodes]:
        held = Counter(everything[worker] for worker in lost if worker in everything)
        gone = [shards for shards, count in held.items() if count == holders[shards]]
        copied = sum(keepers.get(shards, min(lost)) not in lost for shards in gone)
        kind = (tuple(sorted(map(_but_for_experts, held.elements()))), len(gone), copied)
        if kind not in seen:
            seen.add(kind)
            yield name, lost


def _but_for_experts(shards: tuple[Shard, ...]) -> tuple[Shard, ...]:
    return tuple(shard._replace(expert_rank=0) for shard in shards)


def _sent(job: JobDescription, shape: JobShape, size: JobSize, model: Model, training: Training, fewest: int) -> Sent:
    # Replicas that share sequences or experts are to stay together.
    can_spread = shape.own_sharing.together == 1
    shapes = [replace(shape, spread_replicas=spread and can_spread) for spread in (False, True)]
    plans = [spelled_out(initial_plan(each, size.workers, job.pipeline_last), job.chunks) for each in shapes]
    unspread, spread = (crossing(plan, model, training, shape.node_of) for plan in plans)
    losses = in_words(size.nodes, exposure(shapes[1], size.workers, job.pipeline_last, fewest), fewest)
    refused_with = "--context-parallel-size" if shape.own_sharing.context > 1 else "--expert-model-parallel-size"
    return Sent(
        job.spread_replicas,
        unspread,
        spread,
        None if plans[0] == plans[1] else losses,
        None if can_spread else refused_with,
    )


def _memory(
    first: ParallelPlan, following: Mapping[str, ParallelPlan], model: Model, training: Training
) -> tuple[Use, tuple[str, Use] | None, tuple[str, Use] | None]:
    def most(used: Mapping[int, int]) -> Use:
        worker = max(used, key=lambda worker: (used[worker], -worker))
        return Use(worker, used[worker])

    def under(plan: ParallelPlan) -> Use:
        return most({worker: use.total for worker, use in memory_of(plan, model, training).items()})

    after = [(name, under(plan)) for name, plan in following.items()]
    changing = [(name, most(peak_of_change(first, plan, model, training))) for name, plan in following.items()]
    worst = [max(each, key=lambda pair: pair[1].bytes, default=None) for each in (after, changing)]
    return under(first), worst[0], worst[1]
