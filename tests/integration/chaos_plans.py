"""Random plans, and random sequences of what may happen to a job of eight workers, by seed. Starts no processes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from random import Random

from test_plans import explicit

from megatron_resihp.config import DRILL_POINTS
from megatron_resihp.plan import Chunk, ParallelPlan, PlanError, Replica, Schedule
from megatron_resihp.plan.schedule import ZERO_BUBBLE

WORKERS = 8
LAYERS = 6
"""Embedding and head included."""
MICRO_BATCHES = 8
ITERATIONS = 14
POINTS = tuple(point for point in DRILL_POINTS if point not in ("evaluate", "save"))
MOST_DEATHS = 3


@dataclass(frozen=True)
class Sequence:
    """What happens to a job: plans asked for at iterations, and drills."""

    plans: tuple[tuple[int, ParallelPlan], ...]
    drills: tuple[str, ...]


def random_sequence(seed: int) -> Sequence:
    random = Random(seed)
    living = list(range(WORKERS))
    plans, drills, deaths = [], [], 0
    for iteration in range(1, ITERATIONS + 1):
        if random.random() < 0.35:
            plans.append((iteration, random_plan(random, living)))
        if random.random() < 0.25:
            action = random.choices(("rebuild", "kill", "stop"), (5, 4, 1))[0]
            victim = random.choice(living)
            if action != "rebuild":
                if deaths == MOST_DEATHS:
                    continue
                deaths += 1
                living.remove(victim)
            drills.append(f"{action}:{victim}@{iteration}:{random.choice(POINTS)}")
    return Sequence(tuple(plans), tuple(drills))


def random_plan(random: Random, living: list[int]) -> ParallelPlan:
    """Any valid plan for these workers; who is left over is a standby."""
    while True:
        workers = random.sample(living, len(living))
        micro_batches = random.sample(range(MICRO_BATCHES), MICRO_BATCHES)
        count = random.choice((1, 1, 2, 2, 3))
        cuts = [0, *sorted(random.sample(range(1, MICRO_BATCHES), count - 1)), MICRO_BATCHES]
        shares = [tuple(sorted(micro_batches[a:b])) for a, b in pairwise(cuts)]
        try:
            replicas = tuple(_replica(random, workers, share) for share in shares)
            return ParallelPlan(replicas, dict.fromkeys(workers))
        except (PlanError, IndexError):
            continue  # the workers were too few, or the order of ops doesn't go with the sizes


def _replica(random: Random, workers: list[int], micro_batches: tuple[int, ...]) -> Replica:
    """Takes its members off the list."""
    count = random.choice((1, 2, 2, 3, 4))
    stages = tuple(
        tuple(workers.pop() for _ in range(random.choice((1, 1, 2, 2, 4)))) for _ in range(count)
    )  # fmt: skip
    chunk_count = random.choice((count, count, min(count + 2, LAYERS)))
    homes = [*range(count), *(random.randrange(count) for _ in range(chunk_count - count))]
    if chunk_count > count:
        random.shuffle(homes)
    ends = [*sorted(random.sample(range(1, LAYERS), chunk_count - 1)), LAYERS]
    chunks = tuple(Chunk(*each) for each in zip(homes, [0, *ends], ends, strict=False))
    schedule = random.choice((None, Schedule(ZERO_BUBBLE)))
    if chunk_count > count:
        schedule = explicit(homes, count, micro_batches)
    return Replica(stages, micro_batches, chunks, schedule)
