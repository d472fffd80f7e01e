# SPDX-License-Identifier: Apache-2.0
"""Replicas that share sequences in groups of unlike sizes: which sizes need the least time, and how plans use them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_resihp.cost.device import Device
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.memory import memory_of
from megatron_resihp.cost.model.layers import model_from_arguments
from megatron_resihp.cost.model.presets import PRESETS
from megatron_resihp.cost.training import Training
from megatron_resihp.plan import Coordinate, ParallelPlan, PlanError, Replica, even_chunks
from megatron_resihp.plan.microbatches import counts_by_size
from megatron_resihp.plan.rules import Sharing
from megatron_resihp.planner.context_groups import fastest_groups
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.job_shape import JobShape
from megatron_resihp.planner.strategies.by_speed import by_speed
from megatron_resihp.planner.strategies.uniform import uniform
from megatron_resihp.planner.uniform import initial_plan, plan_uniform, plan_with_room

CONTEXTS = (Sharing(4), Sharing(2), Sharing())
LONG = model_from_arguments({**PRESETS["llama3-405b"], "num_layers": 4})
DEVICE = Device(312e12, 0.5, latency=1e-5, bandwidth=25e9, node_bandwidth=300e9, memory=1 << 50)
COST = JobCost(LONG, Training(131072), DEVICE, 8, 8, sharings=CONTEXTS)
WHOLE = even_chunks(4, 1)


def seconds(sizes: tuple[int, ...], micro_batches: int, stages: int) -> Fraction:
    """Of the slowest group, by definition."""
    counts = counts_by_size(micro_batches, sizes, stages)
    assert sum(counts) == micro_batches and min(counts) >= 1
    return max(Fraction(count + stages - 1, size) for count, size in zip(counts, sizes, strict=True))


def all_groups(replicas: int, micro_batches: int, degrees: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for counts in product(*(range(replicas // degree + 1) for degree in degrees)):
        sizes = tuple(degree for degree, count in zip(degrees, counts, strict=True) for _ in range(count))
        if sizes and sum(sizes) <= replicas and len(sizes) <= micro_batches:
            yield sizes


@settings(max_examples=150, deadline=None)
@given(
    replicas=st.integers(1, 12), micro_batches=st.integers(1, 16), stages=st.sampled_from([1, 2, 4]),
    degrees=st.sampled_from([(2, 1), (4, 2, 1), (4, 2), (8, 4, 2, 1), (3, 1), (6, 3, 2, 1)]),
)  # fmt: skip
def test_no_other_sizes_need_less_time(
    replicas: int, micro_batches: int, stages: int, degrees: tuple[int, ...]
) -> None:
    found = fastest_groups(replicas, micro_batches, stages, degrees)
    possible = list(all_groups(replicas, micro_batches, degrees))
    assert bool(found) == bool(possible)
    if found:
        best = min(seconds(sizes, micro_batches, stages) for sizes in possible)
        assert seconds(found, micro_batches, stages) == best


@pytest.mark.parametrize(
    ("replicas", "micro_batches", "stages", "degrees", "sizes"),
    [
        (7, 8, 1, (4, 2, 1), (4, 2, 1)), (7, 4, 1, (4, 2), (4, 2)), (3, 4, 1, (2, 1), (2, 1)),
        (3, 6, 1, (2, 1), (1, 1, 1)), (8, 4, 1, (4, 2, 1), (4, 4)), (3, 2, 1, (2, 1), (2,)), (1, 4, 1, (4, 2), ()),
    ],
)  # fmt: skip
def test_sizes_differ_only_where_that_is_faster(
    replicas: int, micro_batches: int, stages: int, degrees: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    assert fastest_groups(replicas, micro_batches, stages, degrees) == sizes


class TestSurvivors:
    SHAPE = JobShape(1, 1, 8, sharings=CONTEXTS, unlike_context=True)

    def survive(self, shape: JobShape, lost: int = 1) -> ParallelPlan:
        """The plan of those that are left of eight."""
        return plan_uniform(shape, dict.fromkeys(range(8 - lost), Coordinate(0, 0)), initial_plan(shape, 8))

    def test_seven_share_among_four_two_and_one(self) -> None:
        plan = self.survive(self.SHAPE)
        assert (plan.context_groups, plan.context_parallel, plan.standbys) == ((4, 2, 1), 4, {})
        assert [len(plan.replicas[group.start].micro_batches) for group in plan.sharing_sequences] == [5, 2, 1]

    def test_pipelines_of_few_micro_batches_are_shared_by_many(self) -> None:
        """A short pipeline is mostly filled and drained, and that takes the longer the fewer share a sequence."""
        shape = JobShape(1, 8, 8, sharings=CONTEXTS, unlike_context=True)
        held = {worker: Coordinate(worker // 8, 0) for worker in range(63)}
        plan = plan_uniform(shape, held, initial_plan(shape, 64))
        assert (plan.context_parallel, plan.context_groups, len(plan.replicas)) == (4, (), 4)

    def test_six_share_among_two_each(self) -> None:
        """With three micro-batches they finish together, and nothing else is faster."""
        plan = self.survive(replace(self.SHAPE, micro_batches=6), lost=2)
        assert (plan.context_groups, plan.context_parallel) == ((), 2)

    @pytest.mark.parametrize("shape", [replace(SHAPE, unlike_context=False), replace(SHAPE, micro_batch_group=1)])
    def test_groups_of_one_size_where_others_are_not_possible(self, shape: JobShape) -> None:
        assert self.survive(shape).context_groups == ()

    def test_what_has_no_room_for_a_sequence_shares_it(self) -> None:
        """Only groups of two at least fit into memory, so one of seven replicas waits."""

        def check(plan: ParallelPlan) -> None:
            if min(plan.context_groups, default=plan.context_parallel) == 1:
                raise PlanError("memory exceeded")

        plan = plan_with_room(replace(self.SHAPE, micro_batches=4), self.survive, check)
        assert plan.context_groups == (4, 2) and len(plan.standbys) == 1


def unlike_plan() -> ParallelPlan:
    """Seven replicas of one stage."""
    hands = [tuple(range(5))] * 4 + [(5, 6)] * 2 + [(7,)]
    replicas = tuple(Replica(((r,),), hands[r], WHOLE) for r in range(7))
    return ParallelPlan(replicas, context_parallel=4, context_groups=(4, 2, 1))


class TestCosts:
    WELL = Health(dict.fromkeys(range(7), 1.0))

    def test_each_group_takes_its_own_time(self) -> None:
        found = evaluate(unlike_plan(), self.WELL, COST).replica_s
        four, two, one = (
            evaluate(ParallelPlan(tuple(Replica(((r,),), hand, WHOLE) for r in range(size)), context_parallel=size),
                     self.WELL, COST).replica_s[0]
            for size, hand in ((4, (0, 1, 2, 3, 4)), (2, (0, 1)), (1, (0,)))
        )  # fmt: skip
        assert found == pytest.approx((four, two, one))

    def test_a_whole_sequence_takes_more_memory_than_a_part(self) -> None:
        used = memory_of(unlike_plan(), LONG, COST.training)
        assert used[6].activations > used[4].activations > used[0].activations
        assert used[4].activations == used[5].activations

    def test_strategies_of_jobs_that_share_find_them(self) -> None:
        """They know what a plan takes, and take groups of unlike sizes where these take the least."""
        before = initial_plan(JobShape(1, 1, 8, sharings=CONTEXTS), 8)
        found = uniform(before, self.WELL, COST)
        assert found.context_groups == (4, 2, 1)
        chosen = by_speed(before, self.WELL, COST)
        seconds = [evaluate(plan, self.WELL, COST).iteration_s for plan in (chosen, found)]
        assert seconds[0] <= seconds[1]
        assert by_speed(found, self.WELL, COST).micro_batch_count == 8
