# SPDX-License-Identifier: Apache-2.0
"""Plans that no planner would make, with an order of ops for each stage."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from megatron_resihp.plan import Chunk, Migration, ParallelPlan, PlannedOp, Replica, Schedule

Place = tuple[int, int]
LAYERS: Final = 4


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


def draw_alike(source: random.Random) -> Case:
    """Replicas of few kinds. Ops of some are in an order in which they wait for ever, are missing, or another's."""
    kinds = [_drawn_kind(source) for _ in range(source.randint(1, 3))]
    drawn = [source.choice(kinds) for _ in range(source.randint(2, 6))]
    workers, hands = iter(source.sample(range(100), 100)), iter(range(100))
    replicas, orders = [], []
    for shape, homes, count, ops in drawn:
        own = tuple(next(hands) for _ in range(count))
        stages = tuple(tuple(next(workers) for _ in range(degree)) for degree in shape)
        bounds = [*range(len(homes)), LAYERS]
        chunks = tuple(Chunk(home, *pair) for home, pair in zip(homes, pairwise(bounds), strict=True))
        replicas.append(Replica(stages, own, chunks))
        orders.append([[op._replace(micro_batch=own[op.micro_batch]) for op in order] for order in ops])
    if source.random() < 0.3:  # an op that another replica runs, with or without being left out here
        one, other = source.choice(orders), source.choice(orders)
        order = source.choice(one)
        op = order.pop(source.randrange(len(order))) if source.random() < 0.7 else source.choice(order)
        moved = source.choice(other)
        moved.insert(source.randint(0, len(moved)), op)
    return Case(ParallelPlan(tuple(replicas)), tuple(tuple(map(tuple, replica)) for replica in orders))


Kind = tuple[list[int], list[int], int, list[list[PlannedOp]]]
"""The degree of each stage, the stage of each chunk, the number of micro-batches, and the ops of each stage."""


def _drawn_kind(source: random.Random) -> Kind:
    stages, count = source.randint(1, 3), source.randint(1, 3)
    homes = [*range(stages)] * source.randint(1, LAYERS // stages)
    runner = {(m, chunk): 0 for m in range(count) for chunk in range(len(homes))}
    ops = [list(order) for order in _orders(source, [homes], runner)[0]]
    if source.random() < 0.4:
        order = source.choice(ops)
        source.shuffle(order)
    elif source.random() < 0.2:
        order = source.choice(ops)
        order.pop(source.randrange(len(order)))
    return [source.randint(1, 3) for _ in ops], homes, count, ops


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
