# SPDX-License-Identifier: Apache-2.0
"""Plans that no planner would make, with an order of ops for each stage."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise
from typing import NamedTuple

from megatron_resihp.plan import Chunk, Migration, ParallelPlan, PlannedOp, Replica, Schedule

Place = tuple[int, int]


class Case(NamedTuple):
    """A plan and, for each replica and stage, the order of ops."""

    plan: ParallelPlan
    orders: tuple[tuple[tuple[PlannedOp, ...], ...], ...]


def draw_case(source: random.Random) -> Case:
    """Unlike replicas, chunks anywhere, some of them migrated, ops drawn one by one from those that can be run."""
    replicas = source.randint(1, 3)
    bounds = [0, *accumulate(source.randint(1, 2) for _ in range(source.randint(1, 4)))]
    homes = [_homes(source, len(bounds) - 1) for _ in range(replicas)]
    owner = dict(enumerate(source.randrange(replicas) for _ in range(source.randint(0, 4))))
    owner |= {len(owner) + number: number for number in range(replicas)}
    runner = {
        (m, chunk): source.randrange(replicas) if source.random() < 0.3 else owner[m]
        for m in owner
        for chunk in range(len(bounds) - 1)
    }
    orders = _orders(source, homes, runner)
    plan = ParallelPlan(
        tuple(
            Replica(
                members,
                tuple(m for m in owner if owner[m] == number),
                tuple(Chunk(home, *pair) for home, pair in zip(homes[number], pairwise(bounds), strict=True)),
                Schedule("explicit", orders=orders[number]),
            )
            for number, members in enumerate(_members(source, orders))
        ),
        migrations=tuple(Migration(m, chunk, runs) for (m, chunk), runs in runner.items() if runs != owner[m]),
    )
    return Case(plan, orders)


def _homes(source: random.Random, chunks: int) -> list[int]:
    """A stage for each chunk, and a chunk for each stage."""
    stages = source.randint(1, min(3, chunks))
    homes = [*range(stages), *(source.randrange(stages) for _ in range(chunks - stages))]
    source.shuffle(homes)
    return homes


def _orders(
    source: random.Random, homes: list[list[int]], runner: dict[tuple[int, int], int]
) -> tuple[tuple[tuple[PlannedOp, ...], ...], ...]:
    splits = [source.random() < 0.5 for _ in homes]
    left = [
        PlannedOp(kind, chunk, m) for (m, chunk), runs in runner.items() for kind in ("FBW" if splits[runs] else "FB")
    ]
    last = len(homes[0]) - 1
    done: set[PlannedOp] = set()
    orders: list[list[list[PlannedOp]]] = [[[] for _ in range(max(stages) + 1)] for stages in homes]
    while left:
        op = source.choice([op for op in left if done.issuperset(_needs(op, last))])
        left.remove(op)
        done.add(op)
        runs = runner[op.micro_batch, op.chunk]
        orders[runs][homes[runs][op.chunk]].append(op)
    return tuple(tuple(map(tuple, replica)) for replica in orders)


def _needs(op: PlannedOp, last_chunk: int) -> list[PlannedOp]:
    if op.kind == "F":
        return [op._replace(chunk=op.chunk - 1)] if op.chunk else []
    if op.kind == "W":
        return [op._replace(kind="B")]
    above = [op._replace(chunk=op.chunk + 1)] if op.chunk < last_chunk else []
    return [op._replace(kind="F"), *above]


def _members(
    source: random.Random, orders: tuple[tuple[tuple[PlannedOp, ...], ...], ...]
) -> list[tuple[tuple[int, ...], ...]]:
    """Members of each stage; a stage without work may have none."""
    workers = iter(range(100))
    return [
        tuple(tuple(next(workers) for _ in range(source.randint(1 if order else 0, 4))) for order in replica)
        for replica in orders
    ]
