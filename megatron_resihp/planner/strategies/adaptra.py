# SPDX-License-Identifier: Apache-2.0
"""Adaptra (Wu et al., arXiv 2504.19232): pipeline schedules that absorb slow links between stages.

Imports numpy, `plan`, `pipeline`, `cost` and this package.
"""

from dataclasses import replace

import numpy as np

from megatron_resihp.cost.job import Array, JobCost
from megatron_resihp.pipeline.planned import explicit_schedule
from megatron_resihp.pipeline.program import Program, ProgramError
from megatron_resihp.pipeline.search.list_scheduling import list_schedule
from megatron_resihp.pipeline.simulate import simulate
from megatron_resihp.plan import ParallelPlan, Replica, Schedule
from megatron_resihp.planner.evaluation import stage_seconds, timeline_of, transfer_seconds
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.job_shape import NoPlanError
from megatron_resihp.planner.strategies.common import next_plan, spelt_out

_DECOUPLED = Schedule("zero-bubble-h1")
"""Makes `stage_seconds` give B and W separately."""


def adaptra(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    """Each replica gets the order of ops that ends first with its links and speeds; workers keep their places.

    1. Slackness: a delay between two stages is absorbed if the earlier stage runs enough forwards ahead. It needs one
    more for each time that the slowest stage's work for a micro-batch fits into the round trip. Backwards are split, so
    that W fills what would be bubbles. The paper uses a greedy search for the numbers of warm-up forwards under the
    memory limit. Here `pipeline.search.list_scheduling` tries multiples of that number instead.
    2. Delegated communication: transfers leave the device's queue, so that slow ones do not block kernels. In the
    simulator, no strategy's transfers block their ends.

    The text leaves open what happens once all workers are healthy; here an adapted order of ops is adapted again.
    Shares of micro-batches stay the same, since the paper does not change replicas.

    Raises:
        NoPlanError: a working worker is dead, which Adaptra does not handle, or the plan in force does not fit.
    """
    plan = spelt_out(plan, cost)
    dead = [worker for worker in plan.working if worker not in health.speed]
    if dead:
        raise NoPlanError(f"worker {dead[0]} is dead; Adaptra reacts to slow links and workers only")
    if plan.migrations:
        return next_plan(plan.replicas, plan, health, cost, plan.migrations)
    slow = bool(health.link) or any(health.speed[worker] < 1 for worker in plan.working)
    known: dict[bytes, Program | None] = {}
    replicas = [
        _adapted(replica, len(plan.replicas), health, cost, known)
        if slow or (replica.schedule and replica.schedule.orders)
        else replica
        for replica in plan.replicas
    ]
    return next_plan(replicas, plan, health, cost)


def _adapted(
    replica: Replica, copies: int, health: Health, cost: JobCost, known: dict[bytes, Program | None]
) -> Replica:
    """The replica with the fastest order of ops found, its own included; equal replicas are planned once."""
    micro_batches = len(replica.micro_batches)
    shape = (3, len(replica.chunks), micro_batches)
    durations = np.broadcast_to(
        stage_seconds(replace(replica, schedule=_DECOUPLED), health, cost)[..., np.newaxis], shape
    )
    transfers = transfer_seconds(replica, health, cost)
    limit, size = _memory(replica, copies, cost)
    key = b"".join(array.tobytes() for array in (durations, transfers, limit, size))
    if key not in known:
        known[key] = _listed(replica, durations, transfers, limit, size)
    program = known[key]
    if program is None or simulate(program, durations, transfers).makespan >= _own_s(replica, health, cost):
        return replica
    return replace(replica, schedule=explicit_schedule(program, replica.micro_batches))


def _listed(replica: Replica, durations: Array, transfers: Array, limit: Array, size: Array) -> Program | None:
    try:
        return list_schedule(replica.stage_of_chunk, durations, transfers, limit, size[:, np.newaxis])
    except ProgramError:
        return None


def _own_s(replica: Replica, health: Health, cost: JobCost) -> float:
    return timeline_of(replica, health, cost).makespan


def _memory(replica: Replica, copies: int, cost: JobCost) -> tuple[Array, Array]:
    """Bytes that each stage has for activations, and bytes that each chunk keeps of a micro-batch."""
    limit, size = np.full(len(replica.stages), float(cost.device.memory)), np.zeros(len(replica.chunks))
    working = np.zeros(len(replica.stages))
    for number, chunk in enumerate(replica.chunks):
        sizes = cost.bytes(len(replica.stages[chunk.stage]), copies)
        layers = slice(chunk.first, chunk.end)
        limit[chunk.stage] -= sizes.state[layers].sum()
        size[number] = sizes.kept[layers].sum()
        working[chunk.stage] = max(working[chunk.stage], sizes.working[layers].max(initial=0.0))
    return np.maximum(limit - working, 0.0) * (1 - 1e-6), size
