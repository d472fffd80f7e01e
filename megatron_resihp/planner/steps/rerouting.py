# SPDX-License-Identifier: Apache-2.0
"""Data-parallel peers do the work of stages without workers. Imports numpy, `plan`, `pipeline` and `cost`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.cost.job import Array, JobCost
from megatron_resihp.pipeline.op import Op
from megatron_resihp.pipeline.program import ProgramError
from megatron_resihp.pipeline.search.rerouted import Ways, order_ops
from megatron_resihp.plan import Migration, PlannedOp, Replica, Schedule
from megatron_resihp.plan.schedule import EXPLICIT
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.job_shape import NoPlanError

_ROUNDING = 8
"""Bytes by which `memory_of`, which rounds each kind of memory up, may exceed the sum here."""


class Place(NamedTuple):
    """A stage of a replica."""

    replica: int
    stage: int


def rerouted(
    replicas: Sequence[Replica], health: Health, cost: JobCost
) -> tuple[tuple[Replica, ...], tuple[Migration, ...]]:
    """Give the work of stages without workers to other replicas, and order the ops of all replicas that take part.

    Each micro-batch goes to the peer that would finish first with its own micro-batches and those given to it. Equally
    fast peers with equal counts take turns (ReCycle, arXiv 2405.14009).

    Args:
        replicas: with micro-batches, one chunk per stage and the same layers each; some stages have no workers.
        health: speeds to plan with, of all workers in the replicas.
        cost: of the job.

    Raises:
        NoPlanError: a stage has no workers in any replica, memory cannot hold one more micro-batch, or the replicas'
            layers differ.
    """
    if all(all(replica.stages) for replica in replicas):
        return tuple(replicas), ()
    chunks = replicas[0].chunks
    if any(replica.chunks != chunks or len(chunks) != len(replica.stages) for replica in replicas):
        raise NoPlanError(
            "peers can't do a dead stage's work: replicas differ in layers, or stages hold several chunks"
        )
    migrations = tuple(_migrations(replicas, health, cost))
    runner = {(moved.micro_batch, moved.chunk): moved.replica for moved in migrations}
    owner = {m: number for number, replica in enumerate(replicas) for m in replica.micro_batches}
    together = sorted({number for moved in migrations for number in (owner[moved.micro_batch], moved.replica)})
    orders = _orders(replicas, together, runner, health, cost)
    changed = list(replicas)
    for number in together:
        of_stage = tuple(orders.get(Place(number, stage), ()) for stage in range(len(replicas[number].stages)))
        changed[number] = replace(replicas[number], schedule=Schedule(EXPLICIT, orders=of_stage))
    return tuple(changed), migrations


def _migrations(replicas: Sequence[Replica], health: Health, cost: JobCost) -> list[Migration]:
    migrations = []
    for stage in range(len(replicas[0].stages)):
        peers = [number for number, replica in enumerate(replicas) if replica.stages[stage]]
        if not peers:
            raise NoPlanError(f"stage {stage} lost all its data-parallel peers")
        pace = {number: _seconds(replicas[number], stage, health, cost).sum() for number in peers}
        busy = {number: len(replicas[number].micro_batches) * pace[number] for number in peers}
        homeless = sorted(
            m for number, replica in enumerate(replicas) if number not in pace for m in replica.micro_batches
        )
        for micro_batch in homeless:
            helper = min(peers, key=lambda number: (busy[number] + pace[number], number))
            busy[helper] += pace[helper]
            migrations.append(Migration(micro_batch, stage, helper))
    return migrations


def _seconds(replica: Replica, stage: int, health: Health, cost: JobCost) -> Array:
    """Seconds of F, B and W of one micro-batch, [3]."""
    members, chunk = replica.stages[stage], replica.chunks[stage]
    seconds: Array = cost.seconds(len(members))[:, chunk.first : chunk.end].sum(axis=1)
    return seconds / min(health.speed[worker] for worker in members)


def _orders(
    replicas: Sequence[Replica],
    together: Sequence[int],
    runner: Mapping[tuple[int, int], int],
    health: Health,
    cost: JobCost,
) -> dict[Place, tuple[PlannedOp, ...]]:
    """The ops of each stage of the replicas that take part."""
    stages = len(replicas[0].stages)
    places = [Place(r, s) for r in together for s in range(stages) if replicas[r].stages[s]]
    device_at = {place: number for number, place in enumerate(places)}
    indices = sorted(m for number in together for m in replicas[number].micro_batches)
    owner = {m: number for number in together for m in replicas[number].micro_batches}
    device = np.array(
        [[device_at[Place(runner.get((m, s), owner[m]), s)] for m in indices] for s in range(stages)], np.int64
    )
    copies = [sum(bool(replica.stages[stage]) for replica in replicas) for stage in range(stages)]
    ways = Ways(
        device=device,
        stage=np.array([place.stage for place in places], np.int64),
        seconds=np.array([_seconds(replicas[r], s, health, cost) for r, s in places]).T.copy(),
        transfers=_transfers(device, [replicas[r].stages[s] for r, s in places], health, cost),
        most_live=np.array([_most_live(replicas[r], s, copies[s], cost) for r, s in places], np.int64),
    )
    try:
        ordered, _ = order_ops(ways)
    except ProgramError as error:
        raise NoPlanError(str(error)) from None
    return {place: _planned(ops, indices) for place, ops in zip(places, ordered, strict=True)}


def _planned(ops: Sequence[Op], indices: Sequence[int]) -> tuple[PlannedOp, ...]:
    return tuple(PlannedOp(op.kind.name, op.stage, indices[op.micro_batch]) for op in ops)


def _transfers(device: NDArray[np.int64], members: Sequence[tuple[int, ...]], health: Health, cost: JobCost) -> Array:
    """Seconds between each micro-batch's stages, [stages − 1, micro-batches]."""
    stages, micro_batches = device.shape
    seconds = np.zeros((stages - 1, micro_batches))
    for stage in range(stages - 1):
        pairs, which = np.unique(device[stage : stage + 2], axis=1, return_inverse=True)
        each = [
            cost.transfer(len(members[sender]), len(members[receiver]))
            / health.between(members[sender], members[receiver])
            for sender, receiver in pairs.T
        ]
        seconds[stage] = np.array(each)[which.ravel()]
    return seconds


def _most_live(replica: Replica, stage: int, copies: int, cost: JobCost) -> int:
    """Micro-batches whose activations fit beside a stage's state; 0 if not even the state fits."""
    sizes = cost.bytes(len(replica.stages[stage]), copies)
    layers = slice(*replica.chunks[stage][1:])
    working = sizes.working[layers].max(initial=0.0)
    left = cost.device.memory - _ROUNDING - sizes.state[layers].sum() - working
    kept = sizes.kept[layers].sum()
    if left < kept:
        return 0
    return int(min(left // kept, cost.micro_batches)) if kept > 0 else cost.micro_batches
