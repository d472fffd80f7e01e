# SPDX-License-Identifier: Apache-2.0
"""Lazarus (arXiv 2407.04656): experts are placed anew on the survivors, all of which go on as data-parallel members.

What is taken where the text is silent, or wasn't at hand, is in docs/planning.md. Plans can't say which worker has
which experts. So a plan's replicas are in the order of places, and `Dispatched` knows the rest.

Imports numpy, `plan`, `cost` and `planner`.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, floor
from typing import Final

import numpy as np

from megatron_resihp.cost.bounds import iteration_bound
from megatron_resihp.cost.device import layer_work
from megatron_resihp.cost.exchange import exchange_seconds
from megatron_resihp.cost.job import Array, JobCost
from megatron_resihp.cost.memory import memory_of
from megatron_resihp.cost.training import Training
from megatron_resihp.lab.baselines.expert_placement import Places, busiest_share, placed, replicas_of
from megatron_resihp.plan import Coordinate, ParallelPlan, Replica
from megatron_resihp.planner import NoPlanError
from megatron_resihp.planner.evaluation import Evaluation, GroupRun, evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.moves import prefix_bytes
from megatron_resihp.planner.strategies.common import Group, all_well, evenly_shared, spelt_out
from megatron_resihp.planner.strategies.rows import rows_of, speed_of_row, teams_of

LEAST: Final = 2
"""Replicas of each expert, as far as there is room."""


def lazarus(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    """As many pipelines as the surviving tensor-parallel groups make; each takes the place among them whose experts it
    lacks least of, greedily. Speeds don't count.

    Raises:
        NoPlanError: the job has no experts, or shares sequences; there are too few survivors, or too little memory.
    """
    if not cost.model.experts or cost.sharings[0].context > 1:
        raise NoPlanError("lazarus plans jobs that share experts, and no sequences")
    plan, unaware = spelt_out(plan, cost), all_well(health)
    rows = rows_of(teams_of(plan, unaware, cost), plan, 1, lambda row: True, speed_of_row)
    stages = [[team.members for row in of_stage for team in row][: cost.micro_batches] for of_stage in rows.values()]
    if not stages[0]:
        raise NoPlanError(f"{len(health.live)} workers make no pipeline of {len(stages)} stages")
    columns = list(zip(*stages, strict=True))
    formed = evenly_shared([Replica(column, (), plan.replicas[0].chunks) for column in columns], cost)
    experts = _places(ParallelPlan(formed), cost)
    held = _held(plan, cost)
    arranged = [_arranged(groups, experts, plan, held) for groups in stages]
    replicas = (
        replace(replica, stages=column) for replica, column in zip(formed, zip(*arranged, strict=True), strict=True)
    )
    working = {worker for groups in stages for group in groups for worker in group}
    return ParallelPlan(tuple(replicas), {worker: None for worker in health.live if worker not in working})


def _arranged(
    groups: Sequence[Group], places: Places, plan: ParallelPlan, held: dict[int, frozenset[int]]
) -> list[Group]:
    """The groups of a stage by place: greedily, those that have most of a place's experts first."""
    before = {group: (plan.replica_of(group[0]), held.get(group[0], frozenset())) for group in groups}
    pairs = sorted(
        (-len(places[place] & before[group][1]), before[group][0] != place, place, number)
        for number, group in enumerate(groups)
        for place in range(len(places))
    )
    found: dict[int, Group] = {}
    left = set(range(len(groups)))
    for _, _, place, number in pairs:
        if place not in found and number in left:
            found[place] = groups[number]
            left.remove(number)
    return [found[place] for place in range(len(places))]


class Dispatched:
    """Tokens go to the experts' replicas wherever they are, as many to each, those of the own worker first.

    All replicas wait for each other in every layer with experts. Micro-batches are made equal: a replica's share of
    the batch needn't be whole samples.
    """

    def evaluate(self, plan: ParallelPlan, health: Health, cost: JobCost) -> Evaluation:
        if plan.expert_parallel > 1 or not cost.model.experts:  # the job's own layout, before anything has happened
            return evaluate(plan, health, cost)
        places = _places(plan, cost)
        if all(len(each) == cost.model.experts for each in places):
            return evaluate(plan, health, cost)
        first, count = plan.replicas[0], len(plan.replicas)
        rows = zip(*([worker for worker, _ in replica.workers()] for replica in plan.replicas), strict=True)
        slowest = {row[0]: min(health.speed[worker] for worker in row) for row in rows}
        own = _cost(cost, max(first.shape), busiest_share(places, _loads(cost)), _spread(plan, places, cost))
        run = GroupRun(plan.replicas, Health(slowest), health, own)
        equal = cost.micro_batches / (count * len(first.micro_batches))
        return Evaluation(
            replica_s=(run.timeline().makespan * equal,),
            sums_s=cost.sums(plan),
            bound=iteration_bound(cost, health.speed),
            samples=cost.micro_batches * cost.training.micro_batch_size,
        )

    def bytes_to_move(self, before: ParallelPlan, after: ParallelPlan, cost: JobCost) -> dict[int, float]:
        """Experts that a worker lacks, and all else of a stage or rank that it didn't have."""
        held, wanted = _held(before, cost), _held(after, cost)
        slots = max(1, len(next(iter(wanted.values()))))
        size = prefix_bytes(cost, len(after.replicas), max(1, cost.model.experts // slots))
        of_stage = {chunk.stage: size[:, chunk.end] - size[:, chunk.first] for chunk in after.replicas[0].chunks}
        moved: dict[int, float] = {}
        for replica in after.replicas:
            for worker, coordinate in replica.workers():
                rest, experts = of_stage[coordinate.stage] / len(replica.stages[coordinate.stage])
                there = before.coordinate_of(worker) == coordinate
                lacking = len(wanted[worker] - held[worker]) if there else len(wanted[worker])
                moved[worker] = lacking / cost.model.experts * experts + (0.0 if there else rest)
        return {worker: size for worker, size in moved.items() if size > 0}

    def require_state(self, plan: ParallelPlan, health: Health, cost: JobCost) -> None:
        held: dict[Coordinate, set[int]] = defaultdict(set)
        for worker, experts in _held(plan, cost).items():
            coordinate = plan.coordinate_of(worker)
            if coordinate is not None and worker in health.speed:
                held[coordinate] |= experts
        for stage, members in enumerate(plan.replicas[0].stages):
            for rank in range(len(members)):
                if len(held[Coordinate(stage, rank)]) < cost.model.experts:
                    raise NoPlanError(f"experts of stage {stage} TP rank {rank} are not held by the survivors")


DISPATCHED: Final = Dispatched()


def _loads(cost: JobCost) -> tuple[float, ...]:
    return cost.training.expert_loads or (1.0,) * cost.model.experts


def _places(plan: ParallelPlan, cost: JobCost) -> Places:
    """The experts of each replica of a plan that `lazarus` has made."""
    slots, count = _slots(plan, cost), len(plan.replicas)
    try:
        return _placed(_loads(cost), count, slots)
    except ValueError as error:
        raise NoPlanError(f"memory is too small: {error}") from None


@lru_cache(maxsize=256)
def _placed(loads: tuple[float, ...], count: int, slots: int) -> Places:
    return placed(replicas_of(loads, count, slots, LEAST), count, slots)


def _slots(plan: ParallelPlan, cost: JobCost) -> int:
    """How many experts of each layer every worker has room for."""
    experts, training = cost.model.experts, cost.training
    each = training.weight_bytes + training.gradient_bytes
    each += 0 if training.distributed_optimizer else training.optimizer_bytes
    slots, use = experts, memory_of(replace(plan, standbys={}), cost.model, training)
    replica = plan.replicas[0]
    for chunk in replica.chunks:
        members = replica.stages[chunk.stage]
        parts = (part for layer in cost.model.layers[chunk.first : chunk.end] for part in layer.parts if part.experts)
        of_experts = each * sum(float(part.parameters * part.share(len(members), 0)) for part in parts)
        over = use[members[0]].total - cost.device.memory
        if over > 0:
            slots = min(slots, floor(experts * (1 - over / of_experts)) if of_experts else 0)
    return max(slots, 0)


def _held(plan: ParallelPlan, cost: JobCost) -> dict[int, frozenset[int]]:
    """The experts that each worker with work has, under the job's own layout or one of `lazarus`."""
    experts, sharers = cost.model.experts, plan.expert_parallel
    if sharers > 1:
        each = ceil(experts / sharers)
        places: Places = tuple(frozenset(range(n * each, min((n + 1) * each, experts))) for n in range(sharers))
    else:
        places = _places(plan, cost)
    return {
        worker: places[number % len(places)]
        for number, replica in enumerate(plan.replicas)
        for worker, _ in replica.workers()
    }


def _spread(plan: ParallelPlan, places: Places, cost: JobCost) -> tuple[float, float]:
    """Which share of tokens goes to others of a worker's node, and to other nodes: of the worker that takes longest.

    Experts of the own worker take its tokens, then those of the own node.
    """
    loads, device = _loads(cost), cost.device
    total = sum(loads)
    worst = (0.0, 0.0)
    for stage in range(len(plan.replicas[0].stages)):
        near: dict[int, frozenset[int]] = defaultdict(frozenset)
        nodes = [replica.stages[stage][0] // cost.workers_per_node for replica in plan.replicas]
        for node, experts in zip(nodes, places, strict=True):
            near[node] |= experts
        for node, experts in set(zip(nodes, places, strict=True)):
            there, own = (sum(loads[expert] for expert in each) / total for each in (near[node], experts))
            worst = max(worst, (there - own, 1 - there),
                        key=lambda each: max(each[0] / device.node_bandwidth, each[1] / device.bandwidth))  # fmt: skip
    return worst


@dataclass(frozen=True, eq=False)
class _DispatchingCost(JobCost):
    """Costs where tokens are spread as `spread` says."""

    spread: tuple[float, float] = (0.0, 0.0)

    def exchange(self, degree: int, near: int) -> Array:
        return exchange_seconds(self.model, self.training, self.device, degree, near, self.spread)


def _cost(cost: JobCost, degree: int, busiest: float, spread: tuple[float, float]) -> JobCost:
    """Costs of the worker with the busiest experts."""
    even = replace(cost.training, expert_loads=(), expert_groups=1)
    twice = replace(even, expert_loads=(1.0, 0.0), expert_parallel=2)

    def seconds(training: Training) -> Array:
        found: Array = layer_work(cost.model, training, degree) @ np.array([training.tokens, cost.typical_squares])
        return found / cost.device.rate(degree)

    once = seconds(even)
    busy = once + (busiest - 1) * (seconds(twice) - once)
    fields = {name: getattr(cost, name) for name in cost.__dataclass_fields__}
    changed = {"training": even, "alone": None, "measured": {degree: busy}}
    return _DispatchingCost(**{**fields, **changed}, spread=spread)
