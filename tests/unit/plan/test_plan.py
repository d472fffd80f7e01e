# SPDX-License-Identifier: Apache-2.0
"""Plans: what a valid one is, how micro-batches are dealt, and that ranks come out as Megatron lays them out."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.plan import (
    Coordinate,
    ParallelPlan,
    PlanError,
    Replica,
    Shard,
    data_parallel_of,
    deal,
    differences,
    even_chunks,
    even_counts,
    even_share,
    spelled_out,
)
from megatron_resihp.plan.parallel_plan import meeting_groups, rounds_of, shared_with
from megatron_resihp.plan.replica import Kept
from megatron_resihp.plan.spelling import coordinate_at

COUNTS = st.lists(st.integers(min_value=0, max_value=9), min_size=1, max_size=6)
DEGREE = st.integers(min_value=1, max_value=4)


def uniform(tensor_parallel: int, pipeline_parallel: int, replicas: int, micro_batches: int) -> ParallelPlan:
    """Worker ids that tell where they are: 100 * replica + 10 * stage + TP rank."""
    shares = deal(even_counts(micro_batches, replicas))
    return ParallelPlan(
        tuple(
            Replica(
                tuple(
                    tuple(100 * replica + 10 * stage + tp_rank for tp_rank in range(tensor_parallel))
                    for stage in range(pipeline_parallel)
                ),
                share,
            )
            for replica, share in enumerate(shares)
        )
    )


class TestDealing:
    @given(replicas=DEGREE, each=st.integers(min_value=1, max_value=8))
    def test_equal_counts_are_megatrons_round_robin(self, replicas: int, each: int) -> None:
        hands = deal([each] * replicas)
        assert hands == tuple(tuple(range(replica, replicas * each, replicas)) for replica in range(replicas))

    @given(counts=COUNTS)
    def test_every_micro_batch_goes_to_one_replica(self, counts: list[int]) -> None:
        hands = deal(counts)
        assert [len(hand) for hand in hands] == counts
        assert sorted(index for hand in hands for index in hand) == list(range(sum(counts)))
        assert all(list(hand) == sorted(hand) for hand in hands)

    @given(replicas=DEGREE, micro_batches=st.integers(min_value=1, max_value=40))
    def test_even_counts_differ_by_at_most_one(self, replicas: int, micro_batches: int) -> None:
        if micro_batches < replicas:
            with pytest.raises(ValueError, match=f"{micro_batches} micro-batches .* {replicas} replicas"):
                even_counts(micro_batches, replicas)
            return
        counts = even_counts(micro_batches, replicas)
        assert len(counts) == replicas and sum(counts) == micro_batches
        assert max(counts) - min(counts) <= 1 and min(counts) >= 1

    def test_an_uneven_share(self) -> None:
        assert even_counts(8, 3) == (3, 3, 2)
        assert deal((3, 3, 2)) == ((0, 3, 6), (1, 4, 7), (2, 5))

    def test_a_share_may_be_nothing(self) -> None:
        assert [even_share(5, 3, replica) for replica in range(3)] == [(0, 3), (1, 4), (2,)]
        assert [even_share(2, 3, replica) for replica in range(3)] == [(0,), (1,), ()]

    def test_no_replica_to_share_between(self) -> None:
        with pytest.raises(ValueError, match="0 replicas"):
            even_counts(4, 0)


class TestIsAValue:
    """Nothing of a plan can be changed, and equal plans are one and the same as keys."""

    held: ClassVar[dict[int, Kept]] = {2: Coordinate(0, 1), 3: None}
    plan = ParallelPlan((Replica(((0, 1),), (0,)),), held)

    def test_its_standbys_cannot_be_changed(self) -> None:
        before = self.plan.digest
        with pytest.raises(TypeError):
            self.plan.standbys[5] = None  # type: ignore[index]
        self.held[5] = None
        assert self.plan.digest == before and 5 not in self.plan.standbys
        del self.held[5]

    def test_equal_plans_have_equal_hashes(self) -> None:
        again = ParallelPlan.from_dict(self.plan.to_dict())
        assert again == self.plan and len({again, self.plan}) == 1
        other = replace(self.plan, standbys={2: None, 3: None})
        assert other != self.plan and len({other, self.plan}) == 2

    @pytest.mark.parametrize(
        "through", [lambda plan: pickle.loads(pickle.dumps(plan)), copy.copy, copy.deepcopy, replace]
    )
    def test_copies_are_equal_and_as_fixed(self, through: Callable[[ParallelPlan], ParallelPlan]) -> None:
        assert self.plan.members == (0, 1, 2, 3)
        again = through(self.plan)
        assert again == self.plan and again.digest == self.plan.digest and again.members == (0, 1, 2, 3)
        with pytest.raises(TypeError):
            again.standbys[5] = None  # type: ignore[index]


class TestValidation:
    @pytest.mark.parametrize(
        ("make", "rule"),
        [
            (lambda: ParallelPlan(()), "at least one replica"),
            (lambda: ParallelPlan((Replica(((0, 1),), (0,)), Replica(((2,), (3,)), (1,)))), "same stages"),
            (lambda: ParallelPlan((Replica((), (0,)),)), "at least one stage"),
            (lambda: ParallelPlan((Replica(((0,), ()), (0,)),)), "stage 1 of replica 0 has no worker"),
            (lambda: ParallelPlan((Replica(((0,),), (0,)),), {1: Coordinate(0, 1)}), "standby 1 keeps"),
            (lambda: ParallelPlan((Replica(((0,),), (0,)), Replica(((0,),), (1,)))), "worker 0 appears twice"),
            (lambda: ParallelPlan((Replica(((0, 0),), (0,)),)), "worker 0 appears twice"),
            (lambda: ParallelPlan((Replica(((5,),), (0,)),), {5: None}), "worker 5 appears twice"),
            (lambda: ParallelPlan((Replica(((-1,),), (0,)),)), "worker ids are whole numbers >= 0, got -1"),
            (lambda: ParallelPlan((Replica((("a",),), (0,)),)), "worker ids are whole numbers >= 0, got 'a'"),
            (lambda: ParallelPlan((Replica(((True,),), (0,)),)), "worker ids are whole numbers >= 0, got True"),
            (lambda: ParallelPlan((Replica(((0,),), (0,)),), {-2: None}), "worker ids are whole numbers >= 0, got -2"),
            (lambda: ParallelPlan((Replica([[0]], (0,)),)), r"stages and their members are tuples, got \[\[0\]\]"),
            (lambda: ParallelPlan((Replica(([0],), (0,)),)), r"stages and their members are tuples, got \(\[0\],\)"),
            (lambda: ParallelPlan.from_dict({}), "the plan lacks 'replicas'"),
            (lambda: ParallelPlan.from_dict({"replicas": [{"stages": [[0]]}]}), "lacks 'micro_batches'"),
            (lambda: ParallelPlan.from_dict({"replicas": 3, "standbys": {}}), "this is not a plan"),
            (lambda: ParallelPlan.from_dict([]), "this is not a plan"),
            (lambda: ParallelPlan((Replica(((0,),), (0, 2)),)), r"each in one replica, got \[0, 2\]"),
            (lambda: ParallelPlan((Replica(((0,),), (0,)), Replica(((1,),), (0,)))), r"got \[0, 0\]"),
            (lambda: ParallelPlan((Replica(((0,),), (0, 1)), Replica(((1,),), ()))), "at least one micro-batch"),
        ],
    )
    def test_broken_rules_are_named(self, make: Callable[[], ParallelPlan], rule: str) -> None:
        with pytest.raises(PlanError, match=rule):
            make()

    def test_a_valid_plan(self) -> None:
        uniform(2, 2, 2, 4)


class TestQuestions:
    plan = ParallelPlan(
        (Replica(((7, 3), (5, 1)), (0, 2, 4)), Replica(((0, 2), (4, 6)), (1, 3))),
        {9: Coordinate(1, 0), 8: Coordinate(1, 0), 10: None},
    )

    def test_sizes(self) -> None:
        assert (self.plan.grid.pipeline_parallel, self.plan.grid.tensor_parallel) == (2, 2)
        assert self.plan.micro_batch_count == 5
        assert self.plan.working == (7, 3, 5, 1, 0, 2, 4, 6)
        assert self.plan.members == tuple(range(11))

    def test_where_a_worker_is(self) -> None:
        assert self.plan.coordinate_of(1) == Coordinate(stage=1, tp_rank=1)
        assert self.plan.coordinate_of(8) == Coordinate(1, 0)
        assert self.plan.coordinate_of(10) is None and self.plan.coordinate_of(99) is None
        assert [self.plan.replica_of(worker) for worker in (7, 6, 8, 99)] == [0, 1, None, None]

    def test_who_holds_a_shard(self) -> None:
        assert self.plan.grid.workers_at(Coordinate(1, 0)) == (5, 4)
        assert self.plan.grid.standbys_at(Coordinate(1, 0)) == (8, 9)
        assert self.plan.grid.holders_of(Coordinate(1, 0)) == (5, 4, 8, 9)
        assert self.plan.grid.standbys_at(Coordinate(0, 0)) == ()

    def test_every_shard_is_listed_once(self) -> None:
        assert list(self.plan.grid.coordinates()) == [(0, 0), (0, 1), (1, 0), (1, 1)]


class TestRankOrder:
    @given(tp=DEGREE, pp=DEGREE, dp=DEGREE, pipeline_last=st.booleans())
    def test_ranks_have_megatrons_coordinates(self, tp: int, pp: int, dp: int, pipeline_last: bool) -> None:
        plan = uniform(tp, pp, dp, micro_batches=dp)
        order = plan.grid.rank_order(pipeline_last=pipeline_last)
        assert sorted(order) == sorted(plan.working)
        for replica in range(dp):
            for stage in range(pp):
                for tp_rank in range(tp):
                    # megatron.core.parallel_state: order 'tp-cp-ep-dp-pp', or 'tp-cp-ep-pp-dp' with the other flag.
                    slot = replica + dp * stage if pipeline_last else stage + pp * replica
                    assert order[tp_rank + tp * slot] == 100 * replica + 10 * stage + tp_rank

    def test_the_default_is_megatrons(self) -> None:
        plan = uniform(1, 2, 2, 2)
        assert plan.grid.rank_order() == (0, 100, 10, 110)
        assert plan.grid.rank_order(pipeline_last=False) == (0, 10, 100, 110)

    def test_standbys_have_no_rank(self) -> None:
        plan = ParallelPlan((Replica(((4,),), (0,)),), {0: Coordinate(0, 0)})
        assert plan.grid.rank_order() == (4,)


@st.composite
def plans(draw: st.DrawFn) -> ParallelPlan:
    tp, pp, dp = draw(DEGREE), draw(DEGREE), draw(st.integers(1, 3))
    shares = deal(even_counts(draw(st.integers(dp, 12)), dp))
    workers = draw(st.permutations(range(tp * pp * dp + 3)))
    rows = [workers[tp * number : tp * (number + 1)] for number in range(pp * dp)]
    replicas = tuple(
        Replica(tuple(tuple(row) for row in rows[pp * replica : pp * (replica + 1)]), share)
        for replica, share in enumerate(shares)
    )
    shards = st.none() | st.builds(Coordinate, st.integers(0, pp - 1), st.integers(0, tp - 1))
    return ParallelPlan(replicas, {worker: draw(shards) for worker in workers[tp * pp * dp :]})


class TestOnTheWire:
    @given(plan=plans())
    def test_json_and_back(self, plan: ParallelPlan) -> None:
        again = ParallelPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
        assert again == plan
        assert again.digest == plan.digest

    @given(plan=plans(), other=plans())
    def test_digests_tell_plans_apart(self, plan: ParallelPlan, other: ParallelPlan) -> None:
        assert (plan.digest == other.digest) == (plan == other)

    def test_every_part_counts_in_the_digest(self) -> None:
        base = ParallelPlan((Replica(((0, 1),), (0, 2)), Replica(((2, 3),), (1, 3))), {4: Coordinate(0, 0)})
        others = [
            ParallelPlan((Replica(((1, 0),), (0, 2)), Replica(((2, 3),), (1, 3))), {4: Coordinate(0, 0)}),
            ParallelPlan((Replica(((0, 1),), (0, 1)), Replica(((2, 3),), (2, 3))), {4: Coordinate(0, 0)}),
            ParallelPlan((Replica(((2, 3),), (1, 3)), Replica(((0, 1),), (0, 2))), {4: Coordinate(0, 0)}),
            ParallelPlan((Replica(((0, 1),), (0, 2)), Replica(((2, 3),), (1, 3))), {4: Coordinate(0, 1)}),
            ParallelPlan((Replica(((0, 1),), (0, 2)), Replica(((2, 3),), (1, 3))), {4: None}),
            ParallelPlan((Replica(((0, 1),), (0, 2)), Replica(((2, 3),), (1, 3)))),
        ]
        digests = [plan.digest for plan in [base, *others]]
        assert len(set(digests)) == len(digests)
        assert all(len(digest) == 16 and int(digest, 16) >= 0 for digest in digests)


class TestSharedSequences:
    PAIR: ClassVar = (Replica(((0,), (1,)), (0, 1)), Replica(((2,), (3,)), (0, 1)))
    PLAN: ClassVar = ParallelPlan(PAIR, {4: None}, context_parallel=2)

    def test_json_and_words(self) -> None:
        again = ParallelPlan.from_dict(json.loads(json.dumps(self.PLAN.to_dict())))
        alone = ParallelPlan((Replica(((0,), (1,)), (0,)), Replica(((2,), (3,)), (1,))), {4: None})
        assert again == self.PLAN and pickle.loads(pickle.dumps(again)) == self.PLAN
        assert "context_parallel" not in alone.to_dict(), "plans without it keep their digests"
        assert "context-parallel degree 1 → 2" in differences(alone, self.PLAN)
        assert self.PLAN.digest != alone.digest

    def test_micro_batches_count_once(self) -> None:
        assert (self.PLAN.micro_batch_count, data_parallel_of(self.PLAN), self.PLAN.not_uniform) == (2, 1, None)

    def test_those_that_share_come_before_stages_in_either_order_of_ranks(self) -> None:
        others = (Replica(((5,), (6,)), (2,)), Replica(((7,), (8,)), (2,)))
        grid = ParallelPlan((*self.PAIR, *others), {}, context_parallel=2).grid
        assert grid.rank_order() == (0, 2, 5, 7, 1, 3, 6, 8)
        assert grid.rank_order(pipeline_last=False) == (0, 2, 1, 3, 5, 7, 6, 8)

    @pytest.mark.parametrize(
        ("replicas", "degree", "reason"),
        [
            (PAIR, 0, "a context-parallel degree is a whole number >= 1, got 0"),
            (PAIR, 3, "2 replicas can't share sequences in groups of 3"),
            ((PAIR[0], Replica(((2,), (3,)), (0,))), 2, "replicas 0 to 1 share sequences and must have the same micro"),
            ((PAIR[0], Replica(((2, 3), (4,)), (0, 1))), 2, "must have the same stages, layers and order of ops"),
        ],
    )
    def test_what_they_must_have_in_common(self, replicas: tuple[Replica, ...], degree: int, reason: str) -> None:
        with pytest.raises(PlanError, match=reason):
            ParallelPlan(replicas, {}, context_parallel=degree)


class TestSequencesSharedByUnlikeNumbers:
    REPLICAS: ClassVar = tuple(Replica(((2 * r,), (2 * r + 1,)), hand) for r, hand in enumerate([(0, 1), (0, 1), (2,)]))
    PLAN: ClassVar = ParallelPlan(REPLICAS, {6: Coordinate(1, 0)}, context_parallel=2, context_groups=(2, 1))

    def test_json_and_words(self) -> None:
        again = ParallelPlan.from_dict(json.loads(json.dumps(self.PLAN.to_dict())))
        alone = ParallelPlan(tuple(Replica(each.stages, (r,)) for r, each in enumerate(self.REPLICAS)))
        assert again == self.PLAN and pickle.loads(pickle.dumps(again)) == self.PLAN
        assert "context_groups" not in alone.to_dict(), "plans without them keep their digests"
        assert "context-parallel degree 1 → 2+1" in differences(alone, self.PLAN)
        assert self.PLAN.digest != alone.digest

    def test_groups_in_order_of_replicas(self) -> None:
        assert self.PLAN.sharing_sequences == meeting_groups(self.PLAN) == (range(2), range(2, 3))
        assert [shared_with(self.PLAN, replica) for replica in range(3)] == [range(2), range(2), range(2, 3)]
        assert (self.PLAN.micro_batch_count, data_parallel_of(self.PLAN), self.PLAN.not_uniform) == (3, 2, None)

    def test_megatron_numbers_them_as_replicas_that_share_nothing(self) -> None:
        assert self.PLAN.grid.rank_order() == (0, 2, 4, 1, 3, 5)
        assert self.PLAN.grid.rank_order(pipeline_last=False) == (0, 1, 2, 3, 4, 5)

    @pytest.mark.parametrize(
        ("groups", "others", "reason"),
        [
            ((2, 2), {}, "context_groups are of 4 replicas, and the plan has 3"),
            ((3, 0), {}, "context_groups are whole numbers >= 1, got (3, 0)"),
            ((1, 1, 1), {}, "each sequence is shared by 1 replicas: leave context_groups out"),
            ((2, 1), {"context_parallel": 3}, "must be the largest of context_groups, 2, not 3"),
            ((1, 2), {}, "replicas 1 to 2 share sequences and must have the same micro-batches"),
            ((2, 1), {"expert_parallel": 3}, "that share experts must share sequences in groups of one size"),
        ],
    )  # fmt: skip
    def test_what_is_no_group(self, groups: tuple[int, ...], others: dict[str, int], reason: str) -> None:
        with pytest.raises(PlanError, match=re.escape(reason)):
            ParallelPlan(self.REPLICAS, **{"context_parallel": 2, "context_groups": groups, **others})


class TestSharedExperts:
    PAIR: ClassVar = (Replica(((0,), (1,)), (0, 2)), Replica(((2,), (3,)), (1, 3)))
    PLAN: ClassVar = ParallelPlan(PAIR, {4: None}, expert_parallel=2)

    def test_json_and_words(self) -> None:
        again = ParallelPlan.from_dict(json.loads(json.dumps(self.PLAN.to_dict())))
        alone = ParallelPlan(self.PAIR, {4: None})
        assert again == self.PLAN and pickle.loads(pickle.dumps(again)) == self.PLAN
        assert "expert_parallel" not in alone.to_dict(), "plans without it keep their digests"
        assert differences(alone, self.PLAN) == ("expert-parallel degree 1 → 2",)
        assert self.PLAN.digest != alone.digest and self.PLAN.not_uniform is None

    def test_each_has_its_own_micro_batches_and_its_share_of_the_experts(self) -> None:
        full = spelled_out(self.PLAN, even_chunks(2, 2))
        assert self.PLAN.micro_batch_count == 4
        assert full.shards_of(1) == (Shard(2, 4, 0, 1, 0, 2),) and full.shards_of(3) == (Shard(2, 4, 0, 1, 1, 2),)
        assert full.shards_of(4) == ()

    def test_all_that_share_run_as_many_rounds_as_the_one_with_most_micro_batches(self) -> None:
        replicas = tuple(Replica(((number,),), hand) for number, hand in enumerate([(0, 3), (1,), (2,), (4,)]))
        rounds = [
            [rounds_of(ParallelPlan(replicas, expert_parallel=degree), number) for number in range(4)]
            for degree in (1, 2, 4)
        ]
        assert rounds == [[2, 1, 1, 1], [2, 2, 1, 1], [2, 2, 2, 2]]

    def test_members_of_a_stage_may_have_other_experts_each(self) -> None:
        replicas = tuple(Replica(((2 * number, 2 * number + 1),), (number,)) for number in range(2))
        plan = ParallelPlan(replicas, {4: Coordinate(0, 1)}, expert_members=1)
        again = ParallelPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
        assert again == plan == pickle.loads(pickle.dumps(plan))
        assert plan.digest != replace(plan, expert_members=0).digest
        full = spelled_out(plan, even_chunks(2, 1))
        assert full.shards_of(1) == full.shards_of(3) == full.shards_of(4) == (Shard(0, 4, 1, 2, 0, 1, 1),)
        assert coordinate_at(even_chunks(2, 1), full.shards_of(3), 2) == Coordinate(0, 1)
        shared = ParallelPlan(replicas, {}, expert_parallel=2, expert_members=1)
        assert spelled_out(shared, even_chunks(2, 1)).shards_of(3) == (Shard(0, 4, 1, 2, 1, 2, 1),)

    def test_experts_may_be_dealt_in_unequal_numbers(self) -> None:
        replicas = tuple(Replica(((number,),), (number,)) for number in range(3))
        plan = ParallelPlan(replicas, {3: None}, expert_parallel=3, uneven_experts=8)
        again = ParallelPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
        assert again == plan == pickle.loads(pickle.dumps(plan)) and plan.not_uniform is None
        assert "uneven_experts" not in self.PLAN.to_dict(), "plans without them keep their digests"
        assert spelled_out(plan, even_chunks(2, 1)).shards_of(2) == (Shard(0, 4, 0, 1, 2, 3, 0, 8),)
        alone = replace(plan, expert_parallel=1, uneven_experts=0)
        assert differences(alone, plan) == ("expert-parallel degree 1 → 3", "experts dealt in equal numbers → as 3 3 2")
        many = tuple(Replica(((number,),), (number,)) for number in range(9))
        [*_, said] = differences(alone, ParallelPlan(many, expert_parallel=9, uneven_experts=128))
        assert said == "experts dealt in equal numbers → as 15 or 14 each"

    @pytest.mark.parametrize(
        ("replicas", "standbys", "degrees", "reason"),
        [
            (PAIR, {}, {"expert_parallel": 0}, "an expert-parallel degree is a whole number >= 1, got 0"),
            (PAIR, {}, {"expert_parallel": 3}, "2 replicas can't share experts in groups of 3"),
            (PAIR, {}, {"expert_parallel": 2, "context_parallel": 2}, "0 to 1 share sequences and must have the same"),
            (PAIR, {}, {"expert_members": -1}, "have the same experts is a whole number >= 0, got -1"),
            (PAIR, {}, {"expert_members": 2}, "1 members of a stage can't share its experts in groups of 2"),
            (PAIR, {4: Coordinate(0, 0)}, {"expert_parallel": 2}, "worker 4 has no work and can't keep a shard"),
            (PAIR, {}, {"uneven_experts": -1}, "dealt in unequal numbers is a whole number >= 0, got -1"),
            (PAIR, {}, {"uneven_experts": 3}, "1 replicas have equal numbers of 3 experts: leave uneven_experts out"),
            (PAIR, {}, {"expert_parallel": 2, "uneven_experts": 4}, "2 replicas have equal numbers of 4 experts"),
            (PAIR, {}, {"expert_parallel": 2, "uneven_experts": 1}, "2 replicas can't share 1 experts so that each"),
            (
                PAIR, {}, {"expert_parallel": 2, "uneven_experts": 3, "expert_members": 1},
                "unequal numbers where members of a stage have other experts each",
            ),
            (
                tuple(replace(each, micro_batches=(0,)) for each in PAIR), {},
                {"expert_parallel": 2, "uneven_experts": 3, "context_parallel": 2},
                "unequal numbers where replicas share sequences",
            ),
        ],
    )  # fmt: skip
    def test_what_they_must_have_in_common(
        self, replicas: tuple[Replica, ...], standbys: dict[int, Coordinate], degrees: dict[str, int], reason: str
    ) -> None:
        with pytest.raises(PlanError, match=reason):
            ParallelPlan(replicas, standbys, **degrees)  # type: ignore[arg-type]
