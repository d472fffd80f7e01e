# SPDX-License-Identifier: Apache-2.0
"""How much idle time one slow worker causes in others (ResiHP, arXiv 2605.06374, section 8, failure amplification).

Imports `plan`, `planner` and `cost`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.memory import with_layers
from megatron_resihp.plan import ParallelPlan, Replica
from megatron_resihp.planner.evaluation import evaluate, stage_seconds
from megatron_resihp.planner.health import Health


@dataclass(frozen=True)
class Idle:
    """Extra idle GPU-seconds of an iteration, compared to a healthy job, by the workers' position.

    Attributes:
        node: of workers that the plan leaves without work.
        tp, pp, dp: of the slow worker's tensor-parallel group; of the other stages of its replica; of other replicas.
            The slow worker itself does not count.
    """

    node: float
    tp: float
    pp: float
    dp: float


def amplification(plan: ParallelPlan, healthy_plan: ParallelPlan, health: Health, slow: int, cost: JobCost) -> Idle:
    """The idle time of a plan with one slow worker, beyond that of the job's own plan with healthy workers.

    A worker computes for the time that its own work takes at its own speed. It idles for the rest of the iteration: in
    a bubble, in a collective with a slower peer, or in the reduction of gradients.

    Raises:
        PlanError: the layers of a plan differ from the model's.
    """
    well = Health(dict.fromkeys(healthy_plan.members, 1.0))
    base = _idle(healthy_plan, well, cost)
    found = _idle(plan, health, cost)
    more = {worker: max(seconds - base.get(worker, 0.0), 0.0) for worker, seconds in found.items() if worker != slow}
    home = healthy_plan.replica_of(slow)
    own = healthy_plan.replicas[home or 0]
    group = next(members for members in own.stages if slow in members)
    replica = {worker for members in own.stages for worker in members}
    without_work = set(found) - set(plan.working)
    return Idle(
        node=sum(more.get(worker, 0.0) for worker in without_work),
        tp=_sum(more, set(group) - without_work),
        pp=_sum(more, replica - set(group) - without_work),
        dp=_sum(more, set(more) - replica - without_work),
    )


def _sum(more: dict[int, float], workers: set[int]) -> float:
    return sum(more.get(worker, 0.0) for worker in workers)


def _idle(plan: ParallelPlan, health: Health, cost: JobCost) -> dict[int, float]:
    """Idle seconds of each live worker in an iteration."""
    plan = replace(plan, replicas=tuple(with_layers(replica, cost.model) for replica in plan.replicas))
    iteration_s = evaluate(plan, health, cost).iteration_s
    idle = dict.fromkeys(health.speed, iteration_s)
    for replica, counts in zip(plan.replicas, _micro_batches_run(plan), strict=True):
        for worker, seconds in _work(replica, counts, health, cost).items():
            idle[worker] -= seconds
    return idle


def _micro_batches_run(plan: ParallelPlan) -> list[list[int]]:
    """How many micro-batches each replica runs in each of its chunks; migrated ones count where they run."""
    counts = [[len(replica.micro_batches)] * len(replica.chunks) for replica in plan.replicas]
    owner = {index: number for number, replica in enumerate(plan.replicas) for index in replica.micro_batches}
    for migration in plan.migrations:
        counts[owner[migration.micro_batch]][migration.chunk] -= 1
        counts[migration.replica][migration.chunk] += 1
    return counts


def _work(replica: Replica, counts: Sequence[int], health: Health, cost: JobCost) -> dict[int, float]:
    """Seconds that each worker computes in an iteration, at its own speed and with its own share of the shards.

    `counts` gives the micro-batches of each chunk.
    """
    per_chunk = stage_seconds(replica, health, cost).sum(axis=0)
    work: dict[int, float] = {}
    for chunk, seconds, count in zip(replica.chunks, per_chunk, counts, strict=True):
        members = replica.stages[chunk.stage]
        slowest = min((health.speed[worker] for worker in members), default=1.0)
        for tp_rank, worker in enumerate(members):
            share = cost.share_of_largest(len(members), tp_rank, chunk.first, chunk.end)
            own = float(seconds) * slowest / health.speed[worker] * share * count
            work[worker] = work.get(worker, 0.0) + own
    return work
