# SPDX-License-Identifier: Apache-2.0
"""Complete replicas of the job's own TP × PP that share experts or sequences, with slow workers gathered.

Replicas that share wait for each other in every layer. So workers of like speed share, and those that share get
micro-batches by their speed. Imports the standard library, `plan`, `cost` and this package.
"""

from collections.abc import Callable, Iterator

from megatron_resihp.cost.exchange import nearest
from megatron_resihp.cost.job import JobCost
from megatron_resihp.plan import ParallelPlan, Replica, deal, even_counts
from megatron_resihp.plan.layers import interleaves
from megatron_resihp.plan.rules import Sharing
from megatron_resihp.planner.evaluation import evaluate, run_of
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.job_shape import NoPlanError
from megatron_resihp.planner.moves import seconds_to_get_there
from megatron_resihp.planner.shares import fastest_shares
from megatron_resihp.planner.strategies.common import has_room_to_change, next_plan, spelt_out
from megatron_resihp.planner.strategies.rows import Row, rows_of, speed_of_row, teams_of
from megatron_resihp.planner.strategies.uniform import uniform


def by_speed(plan: ParallelPlan, health: Health, cost: JobCost) -> ParallelPlan:
    """The fastest of several such plans, by simulation, the way there included.

    They are those in force, those that `uniform` makes, and for each number of replicas that may share one in which
    those stay together that share now, and one in which all part that differ in speed. Both of these are tried with and
    without their slowest workers. Of numbers that deal experts unevenly, which are many, they have that of `uniform`
    only.

    Raises:
        NoPlanError: too few survivors for one replica, or too little memory.
    """
    plan = spelt_out(plan, cost)
    candidates, reasons = list[ParallelPlan](), [""]
    optional = set(plan.working) <= health.speed.keys()
    if optional:
        same = plan
        if health.speed.keys() != set(plan.members):
            groups = plan.context_groups
            same = next_plan(plan.replicas, plan, health, cost, sharing=plan.sharing, context_groups=groups)
        candidates.append(same)
    tried = [sharing for sharing in cost.sharings if not sharing.uneven]
    try:
        plain = uniform(plan, health, cost)
        candidates.append(plain)
        tried += [plain.sharing] if plain.sharing.uneven else []
    except NoPlanError as error:
        reasons.append(str(error))
    for sharing in tried:
        try:
            candidates += _layouts(plan, health, cost, sharing)
        except NoPlanError as error:
            reasons.append(str(error))
    if optional:
        candidates = [each for each in candidates if has_room_to_change(plan, each, cost)]
    if not candidates:
        raise NoPlanError(reasons[-1] or "no layout leaves room for the state before it while the job changes")
    return min(candidates, key=lambda each: _seconds(plan, each, health, cost))


def _layouts(plan: ParallelPlan, health: Health, cost: JobCost, sharing: Sharing) -> Iterator[ParallelPlan]:
    teams, seen = teams_of(plan, health, cost), set[tuple[tuple[Row, ...], ...]]()
    seconds = _seconds_of_rows(max(plan.replicas[0].shape), cost, sharing)
    for kept in (lambda row: True, lambda row: len({team.speed for team in row}) == 1):
        rows = rows_of(teams, plan, sharing.together, kept, seconds)
        blocks = tuple(zip(*rows.values(), strict=True))
        slow = bool(blocks) and max(map(seconds, blocks[-1])) > min(map(seconds, blocks[0]))
        for found in (blocks, blocks[:-1])[: 1 + slow]:
            if found and found not in seen:
                yield _plan(found, plan, health, cost, sharing)
            seen.add(found)
    if not any(seen):
        raise NoPlanError(f"{len(health.live)} workers form no {sharing.together} replicas that share")


def _seconds_of_rows(degree: int, cost: JobCost, sharing: Sharing) -> Callable[[Row], float]:
    """How long a row would take for all layers: it waits for its slowest member, and for tokens from other nodes."""
    shared = cost.shared(sharing.context, sharing.experts)
    computed = float(shared.seconds(degree).sum())

    def seconds(row: Row) -> float:
        near = nearest([team.members for team in row], cost.workers_per_node)
        return computed / speed_of_row(row) + float(shared.exchange(degree, near).sum())

    return seconds


def _plan(
    blocks: tuple[tuple[Row, ...], ...], plan: ParallelPlan, health: Health, cost: JobCost, sharing: Sharing
) -> ParallelPlan:
    """Those in a block share; each gets micro-batches by its speed. In one block some get one fewer, if they don't go
    evenly into blocks."""
    rounds = -(-cost.micro_batches // sharing.in_step)
    lacking = rounds * sharing.in_step - cost.micro_batches
    chunks = plan.replicas[0].chunks
    # Megatron's interleaved schedule needs a micro-batch for each stage.
    more = len(plan.replicas[0].stages) - 1 if interleaves(chunks) else 0
    blocks = blocks[: (rounds - bool(lacking)) // (1 + more)]
    if (lacking and cost.equal_rounds) or not blocks:
        raise NoPlanError(f"{cost.micro_batches} micro-batches can't be run by {sharing.in_step} replicas at a time")

    def with_counts(counts: list[int]) -> tuple[Replica, ...]:
        each = [count for count in counts for _ in range(sharing.in_step)]
        end = (counts.index(max(counts)) + 1) * sharing.in_step
        each[end - lacking : end] = [count - 1 for count in each[end - lacking : end]]
        hands = deal(each)
        places = range(len(blocks) * sharing.together)
        return tuple(
            Replica(tuple(row[n % sharing.together].members for row in blocks[n // sharing.together]),
                    hands[n // sharing.context], chunks)
            for n in places
        )  # fmt: skip

    even = ParallelPlan(with_counts(list(even_counts(rounds, len(blocks)))), {}, (), False, *sharing)
    paces = [_pace(even, number, health, cost, sharing) for number in range(len(blocks))]
    after_those = [(first + more * further, further) for first, further in paces]
    counts = [more + count for count in fastest_shares(after_those, rounds - more * len(blocks))]
    return next_plan(with_counts(counts), plan, health, cost, sharing=sharing)


def _pace(
    plan: ParallelPlan, block: int, health: Health, cost: JobCost, sharing: Sharing
) -> tuple[float, float]:  # fmt: skip
    """Seconds of the first micro-batch of those that share, and of each further one; see `shares.pace_of`."""
    run = run_of(plan, block * sharing.together, health, cost)
    of_stages = run.seconds().sum(axis=0)
    return float(of_stages.sum() + run.transfers().sum()), float(of_stages.max())


def _seconds(before: ParallelPlan, after: ParallelPlan, health: Health, cost: JobCost) -> float:
    """Of an iteration, with its part of the time to get there until the next event."""
    moving_s = 0.0 if before.replicas == after.replicas else seconds_to_get_there(before, after, cost)
    left = 1 - moving_s / cost.until_next_event_s
    return evaluate(after, health, cost).iteration_s / left if left > 0 else float("inf")
