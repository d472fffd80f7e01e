# SPDX-License-Identifier: Apache-2.0
"""Oobleck (Jang et al., SOSP 2023, arXiv 2309.08125): pipelines from templates for given numbers of nodes.

Imports numpy, `plan`, `cost` and this package.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from megatron_resihp.cost.job import JobCost
from megatron_resihp.plan import Chunk, ParallelPlan, Replica, even_counts
from megatron_resihp.planner.balance import balanced_chunks
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.job_shape import NoPlanError
from megatron_resihp.planner.shares import fastest_shares, pace_of
from megatron_resihp.planner.strategies.common import (
    Group,
    all_well,
    groups_that_came_back,
    job_degree,
    next_plan,
    position_of,
    require_parameters,
    spelt_out,
    with_shares,
)

FAILURES = 1
"""f, the simultaneous failures that a job must survive: it keeps at least f + 1 pipelines."""


def oobleck(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    """Pipelines that lost nodes take a smaller template, borrow nodes, or are merged; the batch is distributed to
    match.

    The paper's node is the hardware that fails as one. Here that is a tensor-parallel group: stages keep the job's
    tensor-parallel degree, so a group that lost a worker is idle until it is whole again.

    1. Node specification: n0 is the fewest nodes that hold the model with f + 1 copies. With fewer than (f + 1) · n0
    nodes, the job ends.
    2. Template of n nodes: the paper's divide and conquer over layers and nodes minimises the time of a pipeline of N_b
    micro-batches, in which the slowest stage counts N_b times. A stage may not span nodes, and fills one, so n nodes
    make n stages. The template is the exact split with the fastest slowest stage.
    3. Reconfiguration: a pipeline with n0 nodes or more left takes the template for them. With fewer, it borrows nodes
    from the pipelines that have the most. If none can spare a node, it is merged with the smallest other pipeline.
    4. Batch distribution: micro-batches in proportion to the pipelines' speed, so that all pipelines end together.

    Where the text leaves open what happens to nodes that come back: all nodes form new pipelines. Their sizes differ by
    at most one, and their number gives the most throughput. The strategy ignores slow workers.

    Raises:
        NoPlanError: fewer than (f + 1) · n0 nodes are left, none of them holds a layer's state, or a template does not
            fit in memory.
    """
    plan = spelt_out(plan, cost)
    degree = job_degree(plan, cost)
    pipelines = [_alive(replica, degree, health) for replica in plan.replicas]
    used = [group for groups in pipelines for group in groups]
    returned = groups_that_came_back(plan, used, degree, health, cost)
    least = _fewest_nodes(degree, cost)
    nodes = len(used) + len(returned)
    if nodes < (FAILURES + 1) * least:
        needed = f"{FAILURES + 1} pipelines of {least}"
        raise NoPlanError(f"{nodes} groups of {degree} workers are left; Oobleck needs {needed}")
    require_parameters(plan, health)
    if returned:
        pipelines = _instantiated([*used, *returned], least, plan, cost)
        return _planned(pipelines, degree, plan, health, cost)
    if not plan.migrations and pipelines == [list(replica.stages) for replica in plan.replicas]:
        return next_plan(plan.replicas, plan, health, cost)
    return _planned(_reconfigured(pipelines, least, plan), degree, plan, health, cost)


def _alive(replica: Replica, degree: int, health: Health) -> list[Group]:
    """The nodes of a pipeline that lost no worker, in the order of its stages."""
    return [
        members
        for members in replica.stages
        if len(members) == degree and all(worker in health.speed for worker in members)
    ]


def _fewest_nodes(degree: int, cost: JobCost) -> int:
    """n0; greater than the number of layers if memory is too small for any number of nodes."""
    return next((n for n in range(1, cost.layers) if _template(n, degree, FAILURES + 1, cost)), cost.layers + 1)


def _template(nodes: int, degree: int, copies: int, cost: JobCost) -> tuple[Chunk, ...] | None:
    in_flight = range(nodes, 0, -1)
    return balanced_chunks([degree] * nodes, [1.0] * nodes, cost, copies, in_flight)


def _reconfigured(pipelines: list[list[Group]], least: int, plan: ParallelPlan) -> list[list[Group]]:
    """Step 3: reconfiguration."""
    pipelines = [list(groups) for groups in pipelines]
    while True:
        short = next((groups for groups in pipelines if len(groups) < least), None)
        if short is None:
            return [sorted(groups, key=lambda group: _home(group, plan)) for groups in pipelines]
        largest = max(pipelines, key=len)
        if len(largest) > least:
            short.append(largest.pop())
            continue
        pipelines = [groups for groups in pipelines if groups is not short]
        min(pipelines, key=len).extend(short)


def _instantiated(groups: list[Group], least: int, plan: ParallelPlan, cost: JobCost) -> list[list[Group]]:
    """New pipelines of all nodes, in the sizes with the most throughput; each node stays near its old place."""
    degree = len(groups[0])
    most = min(len(groups) // least, cost.micro_batches)
    sizes = min(
        (even_counts(len(groups), count) for count in range(min(FAILURES + 1, most), most + 1)),
        key=lambda sizes: _expected_s(sizes, degree, cost),
    )
    groups = sorted(groups, key=lambda group: (plan.replica_of(group[0]) is None, plan.replica_of(group[0]) or 0))
    rows = [groups[first:end] for first, end in pairwise([0, *accumulate(sizes)])]
    return [sorted(row, key=lambda group: _home(group, plan)) for row in rows]


def _expected_s(sizes: Sequence[int], degree: int, cost: JobCost) -> float:
    """Seconds of an iteration of healthy pipelines of these sizes; infinite if a template doesn't fit."""
    paces = {}
    for nodes in set(sizes):
        chunks = _template(nodes, degree, len(sizes), cost)
        if chunks is None:
            return float("inf")
        stages = tuple(tuple(range(stage * degree, (stage + 1) * degree)) for stage in range(nodes))
        speed = Health({worker: 1.0 for members in stages for worker in members})
        paces[nodes] = pace_of(Replica(stages, (), chunks), speed, cost)
    counts = fastest_shares([paces[nodes] for nodes in sizes], cost.micro_batches)
    return max(paces[nodes][0] + (count - 1) * paces[nodes][1] for nodes, count in zip(sizes, counts, strict=True))


def _home(group: Group, plan: ParallelPlan) -> tuple[int, tuple[float, float], Group]:
    """Sort key of a node: the first layer that it holds, so that few layers move, and then its place until now."""
    held = plan.shards_of(group[0])
    first = held[0].first if held else plan.replicas[0].chunks[-1].end
    return first, position_of(group, plan), group


def _planned(
    pipelines: Sequence[Sequence[Group]], degree: int, plan: ParallelPlan, health: Health, cost: JobCost
) -> ParallelPlan:
    """The pipelines with their templates' layers and their share of the batch."""
    before = {replica.stages: replica for replica in plan.replicas}
    replicas = []
    for groups in pipelines:
        stages = tuple(groups)
        if stages in before:
            replicas.append(before[stages])
            continue
        chunks = _template(len(stages), degree, len(pipelines), cost)
        if chunks is None:
            raise NoPlanError(f"there is no template for {len(stages)} groups of {degree} workers: memory is too small")
        replicas.append(Replica(stages, (), chunks))
    unaware = all_well(health)
    counts = fastest_shares([pace_of(replica, unaware, cost) for replica in replicas], cost.micro_batches)
    return next_plan(with_shares(replicas, counts), plan, health, cost)
