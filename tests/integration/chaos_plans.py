# SPDX-License-Identifier: Apache-2.0
"""Random plans for the jobs of test_chaos.py. Starts no processes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

from chaos_casts import LAYERS, Cast
from test_plans import explicit

from megatron_resihp.plan import Chunk, Migration, ParallelPlan, PlanError, PlannedOp, Replica, Schedule
from megatron_resihp.plan.schedule import EXPLICIT, ZERO_BUBBLE

DEGREES = (1, 1, 2, 2, 4)
"""Of tensor parallelism, to choose from."""


def random_plan(random: Random, living: Sequence[int], micro_batches: int) -> ParallelPlan:
    """Any valid plan for these workers; who is left over is a standby.

    Args:
        micro_batches: in a global batch.
    """
    while True:
        workers = random.sample(living, len(living))
        try:
            if random.random() < 0.15:
                replicas, migrations = _with_migrations(random, workers, micro_batches)
            else:
                shares = _shares(random, micro_batches, random.choice((1, 2, 2, 2, 3)))
                replicas = tuple(_replica(random, workers, share) for share in shares)
                migrations = ()
            return ParallelPlan(replicas, dict.fromkeys(workers), migrations)
        except (PlanError, IndexError):
            continue  # the workers were too few, or the order of ops doesn't go with the sizes


def random_sharing_plan(random: Random, living: Sequence[int], cast: Cast) -> ParallelPlan:
    """A plan for a job whose workers share experts or sequences: a uniform one, as only these can be run, but now and
    then another one, to be refused."""
    while True:
        sharing = cast.sharing
        context = random.choice(_divisors(sharing.context))
        experts = random.choice(range(1, sharing.experts + 1) if cast.uneven else _divisors(sharing.experts))
        most = len(living) // (cast.replica_size * max(context, experts))
        if not most or random.random() < 0.1:
            return random_plan(random, living, cast.micro_batches)
        if max(context, experts) % min(context, experts):
            continue
        workers = random.sample(living, len(living))
        groups = [context] * (random.randint(1, most) * max(context, experts) // context)
        may_differ = sharing.context > 1 and not cast.model.get("num_experts") and cast.dealt == 1
        if may_differ and random.random() < 0.7:
            others = random.choices(_divisors(sharing.context), k=random.randint(0, 2))
            groups = random.sample([sharing.context, 1, *others], k=2 + len(others))
            if sum(groups) * cast.replica_size > len(living):
                continue
        shares = _shares(random, cast.micro_batches, len(groups), cast.dealt)
        replicas = [
            Replica(tuple(tuple(workers.pop() for _ in range(cast.tensor)) for _ in range(cast.pipeline)), share)
            for share, size in zip(shares, groups, strict=True)
            for _ in range(size)
        ]
        uneven = cast.uneven if cast.uneven % experts else 0
        how = max(groups), experts, sharing.members, uneven, tuple(groups) if len(set(groups)) > 1 else ()
        return ParallelPlan(tuple(replicas), dict.fromkeys(workers), (), False, *how)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _shares(random: Random, micro_batches: int, count: int, dealt: int = 1) -> list[tuple[int, ...]]:
    """The global batch in so many uneven parts. `dealt`: each of a multiple of so many."""
    shuffled = random.sample(range(micro_batches), micro_batches)
    cuts = [0, *sorted(random.sample(range(dealt, micro_batches, dealt), count - 1)), micro_batches]
    return [tuple(sorted(shuffled[first:end])) for first, end in pairwise(cuts)]


def _ends(random: Random, count: int) -> list[int]:
    """Where so many chunks end."""
    return [*sorted(random.sample(range(1, LAYERS), count - 1)), LAYERS]


def _stages(random: Random, workers: list[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Takes their members off the list."""
    return tuple(tuple(workers.pop() for _ in range(random.choice(DEGREES))) for _ in range(count))


def _replica(random: Random, workers: list[int], micro_batches: tuple[int, ...]) -> Replica:
    """Takes its members off the list."""
    count = random.choice((1, 1, 2, 2, 3, 4))
    stages = _stages(random, workers, count)
    chunk_count = random.choice((count, count, min(count + 2, LAYERS)))
    homes = [*range(count), *(random.randrange(count) for _ in range(chunk_count - count))]
    if chunk_count > count:
        random.shuffle(homes)
    ends = _ends(random, chunk_count)
    chunks = tuple(Chunk(*each) for each in zip(homes, [0, *ends], ends, strict=False))
    schedule = random.choice((None, Schedule(ZERO_BUBBLE)))
    if chunk_count > count:
        schedule = explicit(homes, count, micro_batches)
    return Replica(stages, micro_batches, chunks, schedule)


def _with_migrations(
    random: Random, workers: list[int], micro_batches: int
) -> tuple[tuple[Replica, ...], tuple[Migration, ...]]:
    """Two replicas of the same layers, one of which does some of the other's work; takes members off the list."""
    shares = _shares(random, micro_batches, 2)
    count = random.choice((1, 2, 2, 3))
    ends = _ends(random, count)
    chunks = tuple(Chunk(stage, first, end) for stage, (first, end) in enumerate(zip([0, *ends], ends, strict=False)))
    moved = {(random.choice(shares[0]), random.randrange(count)) for _ in range(random.choice((1, 2)))}
    work = {(number, stage): set(shares[number]) for number in range(2) for stage in range(count)}
    for micro_batch, stage in moved:
        work[0, stage].remove(micro_batch)
        work[1, stage].add(micro_batch)

    def order(number: int, stage: int) -> tuple[PlannedOp, ...]:
        forwards = [PlannedOp("F", stage, micro_batch) for micro_batch in sorted(work[number, stage])]
        return (*forwards, *(op._replace(kind="B") for op in forwards))

    replicas = tuple(
        Replica(
            _stages(random, workers, count), shares[number], chunks,
            Schedule(EXPLICIT, orders=tuple(order(number, stage) for stage in range(count))),
        )
        for number in range(2)
    )  # fmt: skip
    return replicas, tuple(Migration(micro_batch, stage, 1) for micro_batch, stage in sorted(moved))
