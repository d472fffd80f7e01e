# SPDX-License-Identifier: Apache-2.0
"""What survivors hold in any layout: what is lost, who writes what, and uniform plans made of them."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.control.coordination.digests import differing, name_of, shards_of_key
from megatron_resihp.control.replanning.recovery.inventory import (
    copied_experts,
    lacking,
    plan_for_survivors,
    written_once,
)
from megatron_resihp.plan import Chunk, Coordinate, ParallelPlan, Replica, Shard, even_chunks, spelled_out
from megatron_resihp.plan.replica import shards_at
from megatron_resihp.planner import JobShape, NoPlanError, initial_plan
from megatron_resihp.planner.job_shape import sharings

LAYERS = 6
OWN = even_chunks(4, 2)
SHAPE = JobShape(tensor_parallel=2, pipeline_parallel=2, micro_batches=4, workers_per_node=4)
FIRST, SECOND, THIRD, FOURTH = (shards_at(OWN, coordinate, 2) for coordinate in SHAPE.coordinates())


@st.composite
def shards(draw: st.DrawFn) -> Shard:
    first = draw(st.integers(0, LAYERS - 1))
    degree = draw(st.integers(1, 4))
    return Shard(first, draw(st.integers(first + 1, LAYERS)), draw(st.integers(0, degree - 1)), degree)


HOLDINGS = st.dictionaries(st.integers(0, 9), st.lists(shards(), max_size=3).map(tuple), max_size=6)


def points(shards: tuple[Shard, ...]) -> set[tuple[int, int]]:
    """Sixtieths of layers; a sixtieth divides every share."""
    return {
        (layer, part)
        for first, end, rank, degree, *_ in shards
        for layer in range(first, end)
        for part in range(60 * rank // degree, 60 * (rank + 1) // degree)
    }


@given(held=HOLDINGS)
def test_what_is_lost_is_what_nobody_holds(held: dict[int, tuple[Shard, ...]]) -> None:
    everything = points((Shard(0, LAYERS, 0, 1),))
    assert points(lacking(held, LAYERS)) == everything - points(sum(held.values(), ()))


@given(held=HOLDINGS)
def test_all_that_is_held_is_written_once(held: dict[int, tuple[Shard, ...]]) -> None:
    written = written_once(held)
    parts = [points(shards) for shards in written.values()]
    assert sum(map(len, parts)) == len(set().union(*parts)), "nothing twice"
    assert set().union(*parts) == points(sum(held.values(), ()))
    for worker, shards in written.items():
        assert shards and points(shards) <= points(held[worker])


def previous(*replicas: Replica) -> ParallelPlan:
    return ParallelPlan(replicas)


MERGED = previous(
    Replica(((0, 1), (2, 3)), (0, 1), OWN), Replica(((4, 5, 6),), (2, 3), (Chunk(0, 0, 6),))
)  # fmt: skip


class TestUniformPlans:
    def test_who_holds_a_shard_of_the_job_as_it_is_works_on_it(self) -> None:
        held = {0: FIRST, 1: SECOND, 2: THIRD, 3: FOURTH, 4: (Shard(0, 6, 0, 3),), 5: (Shard(0, 6, 1, 3),)}
        plan = plan_for_survivors(SHAPE, OWN, held, MERGED)
        assert plan.not_uniform is None
        assert plan.replicas[0].stages == ((0, 1), (2, 3))
        assert plan.standbys == {4: None, 5: None}, "a standby keeps no shard of another layout"

    def test_state_that_is_there_in_other_shards_only(self) -> None:
        """Nobody holds stage 1 as the job has it, but three workers hold all layers between them."""
        held = {0: FIRST, 1: SECOND, 4: (Shard(0, 6, 0, 3),), 5: (Shard(0, 6, 1, 3),), 6: (Shard(0, 6, 2, 3),)}
        plan = plan_for_survivors(SHAPE, OWN, held, MERGED)
        assert plan.replicas[0].stages[0] == (0, 1)
        assert set(plan.replicas[0].stages[1]) < {4, 5, 6}
        assert set(plan.standbys.values()) == {None}

    def test_a_part_that_is_lost(self) -> None:
        held = {0: FIRST, 1: SECOND, 4: (Shard(0, 6, 0, 3),), 5: (Shard(0, 6, 1, 3),)}
        with pytest.raises(NoPlanError, match="stage 1 TP rank 1 is held by no survivor") as caught:
            plan_for_survivors(SHAPE, OWN, held, MERGED)
        assert caught.value.missing == (Coordinate(1, 1),)

    def test_too_few_survivors_that_hold_all(self) -> None:
        held = {0: (Shard(0, 3, 0, 1),), 1: (Shard(3, 6, 0, 1),)}
        with pytest.raises(NoPlanError, match="2 survivors are fewer than TP x PP = 4"):
            plan_for_survivors(SHAPE, OWN, held, previous(Replica(((0,), (1,)), (0, 1, 2, 3), OWN)))

    @given(held=HOLDINGS)
    def test_a_plan_needs_all_state_and_a_replica_of_workers(self, held: dict[int, tuple[Shard, ...]]) -> None:
        enough = len(held) >= SHAPE.replica_size and not lacking(held, LAYERS)
        before = previous(Replica(tuple((worker,) for worker in range(10)), (0, 1, 2, 3)))
        try:
            plan = plan_for_survivors(SHAPE, OWN, held, before)
        except NoPlanError:
            assert not enough
            return
        assert enough and plan.not_uniform is None and set(plan.members) == set(held)
        for worker, kept in plan.standbys.items():
            assert kept is None or shards_at(OWN, kept, 2) == held[worker]


class TestDigests:
    def test_equal_keys_are_compared(self) -> None:
        reports = [{"0/0": "a", "1/0": "b"}, {"0/0": "a"}, {"1/0": "c"}, {}]
        assert differing(reports) == ("1/0",)

    def test_keys_come_in_the_order_of_layers(self) -> None:
        reports = [{"10/0": "a", "9/1": "a", "9/-1": "a"}, {"10/0": "b", "9/1": "b", "9/-1": "b"}]
        assert differing(reports) == ("9/-1", "9/1", "10/0")

    def test_names_and_shards(self) -> None:
        assert name_of("1/0") == "stage 1 TP rank 0"
        assert shards_of_key("1/0", OWN, 2) == (Shard(3, 6, 0, 2),)
        assert name_of("4/5/6") == "layer 4, cut 5 of 6"
        assert shards_of_key("4/5/6", OWN, 2) == (Shard(4, 5, 5, 6),)
        assert name_of("4/-1/6") == "layer 4"
        assert shards_of_key("4/-1/6", OWN, 2) == (Shard(4, 5, 0, 1),)
        assert name_of("4/-2/1") == "layer 4's extra state"
        assert shards_of_key("4/-2/1", OWN, 2) == (Shard(4, 5, 0, 1),)
        assert name_of("-1/0/6") == "the word embeddings, cut 0 of 6"
        assert shards_of_key("-1/0/6", OWN, 2) == (Shard(0, 1, 0, 6),)


class TestSharedExperts:
    SHAPE: ClassVar = JobShape(1, 2, micro_batches=8, sharings=sharings((1,), (2, 1)))
    OWN: ClassVar = even_chunks(4, 2)

    def held(self, *workers: int) -> dict[int, tuple[Shard, ...]]:
        full = spelled_out(initial_plan(self.SHAPE, 8), self.OWN)
        return {worker: full.shards_of(worker) for worker in workers}

    def test_survivors_that_hold_all_experts_between_them_have_a_plan(self) -> None:
        plan = plan_for_survivors(self.SHAPE, self.OWN, self.held(0, 2, 3, 4, 5, 6, 7), initial_plan(self.SHAPE, 8))
        assert (plan.expert_parallel, len(plan.replicas), list(plan.standbys.values())) == (1, 3, [None])

    def test_lost_experts_are_named_though_others_hold_the_rest_of_their_layers(self) -> None:
        """Of the first stage's four workers both die that had the second half of the experts."""
        held = self.held(0, 2, 4, 5, 6, 7)
        assert lacking(held, 6) == (Shard(0, 3, 0, 1, 1, 2),)
        with pytest.raises(NoPlanError, match="share 1 of 2 of the experts of layer 0 is held") as caught:
            plan_for_survivors(self.SHAPE, self.OWN, held, initial_plan(self.SHAPE, 8))
        assert caught.value.missing == (Coordinate(0, 0),), "no smaller plan is looked for"

    def test_lost_experts_are_in_copies_of_parts(self) -> None:
        held = self.held(0, 2, 4, 5, 6, 7)
        plan = plan_for_survivors(self.SHAPE, self.OWN, held, initial_plan(self.SHAPE, 8), in_parts=True)
        assert (plan.expert_parallel, len(plan.replicas)) == (1, 3)

    def test_lost_experts_are_in_copies_as_long_as_their_keepers_live(self) -> None:
        """Four workers, two of each stage: each has the copy of the other one's experts."""
        start = initial_plan(self.SHAPE, 4)
        full = spelled_out(start, self.OWN)
        held = {worker: full.shards_of(worker) for worker in range(4)}
        assert copied_experts(start, self.OWN, {0, 2, 3}, self.SHAPE.node_of) == {
            0: held[1], 2: held[3], 3: held[2],
        }  # fmt: skip
        plan = plan_for_survivors(self.SHAPE, self.OWN, {each: held[each] for each in (0, 2, 3)}, start, copied=held[1])
        assert (plan.expert_parallel, len(plan.replicas)) == (1, 1)
        assert lacking({each: held[each] for each in (0, 2)}, 6, copied=held[1]) == (Shard(3, 6, 0, 1, 1, 2),)
        with pytest.raises(NoPlanError, match="share 1 of 2 of the experts of layer 0 is held by no survivor"):
            plan_for_survivors(self.SHAPE, self.OWN, {each: held[each] for each in (0, 2, 3)}, start)

    def test_a_copy_has_no_more_of_a_layer_than_its_experts(self) -> None:
        [shard] = spelled_out(initial_plan(self.SHAPE, 4), self.OWN).shards_of(1)
        assert lacking({2: (Shard(3, 6, 0, 1),)}, 6, copied=(shard,)) == (
            Shard(0, 3, 0, 1, 0, 2), Shard(0, 3, 0, 1, 1, 2),
        )  # fmt: skip

    def test_experts_that_members_of_a_stage_have_each_are_lost_with_one_member(self) -> None:
        shape = JobShape(2, 1, micro_batches=8, sharings=sharings((1,), (2, 1), 1))
        own, full = even_chunks(4, 1), spelled_out(initial_plan(shape, 8), even_chunks(4, 1))
        held = {worker: full.shards_of(worker) for worker in range(8)}
        plan = plan_for_survivors(shape, own, {each: held[each] for each in range(1, 8)}, initial_plan(shape, 8))
        assert (plan.expert_parallel, plan.expert_members, len(plan.replicas)) == (1, 1, 3)
        left = {worker: shards for worker, shards in held.items() if worker not in (3, 7)}
        assert lacking(left, 6) == (Shard(0, 6, 0, 1, 3, 4),)
        with pytest.raises(NoPlanError, match="share 3 of 4 of the experts of layer 0 is held by no survivor"):
            plan_for_survivors(shape, own, left, initial_plan(shape, 8))

    def test_experts_in_unequal_numbers_are_lost_by_number(self) -> None:
        """Three share eight; the third has the last two, of which another worker has one in an equal share."""
        dealt = {rank: (Shard(0, 2, 0, 1, rank, 3, 0, 8),) for rank in range(3)}
        assert lacking(dealt, 2) == ()
        first = {rank: dealt[rank] for rank in (0, 1)}
        assert lacking(first, 2) == (Shard(0, 2, 0, 1, 6, 8), Shard(0, 2, 0, 1, 7, 8))
        assert lacking(first | {3: (Shard(0, 2, 0, 1, 7, 8),)}, 2) == (Shard(0, 2, 0, 1, 6, 8),)
        shape = JobShape(1, 1, micro_batches=8, sharings=sharings((1,), (4, 2, 1)))
        with pytest.raises(NoPlanError, match="share 6 of 8 of the experts of layer 0 is held by no survivor"):
            plan_for_survivors(shape, (Chunk(0, 0, 2),), first, initial_plan(shape, 4))

    def test_what_is_held_under_plans_that_share_otherwise_counts_together(self) -> None:
        """The first worker has none of the second half of the experts, of which the last two have a quarter each."""
        held = {0: (Shard(0, 2, 0, 2, 0, 1, 1),), 2: (Shard(0, 2, 0, 2, 1, 2, 1),), 3: (Shard(0, 2, 1, 2, 1, 2, 1),)}
        assert lacking(held, 2) == ()
        assert lacking({each: held[each] for each in (0, 3)}, 2) == (Shard(0, 2, 0, 1, 2, 4),)

    def test_each_writes_all_that_it_holds(self) -> None:
        assert written_once(held := self.held(0, 1, 4, 5)) == held

    def test_keys_of_digests(self) -> None:
        assert name_of("4/5/6/1/2") == "layer 4, cut 5 of 6, share 1 of 2 of the experts"
        assert shards_of_key("4/-1/6/1/2", OWN, 2) == (Shard(4, 5, 0, 1, 1, 2),)
