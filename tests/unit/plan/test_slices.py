# SPDX-License-Identifier: Apache-2.0
"""Slices: what workers whose shards are cut unlike each other have in common."""

from typing import ClassVar

from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.plan import Chunk, ParallelPlan, Replica, Shard, even_counts
from megatron_resihp.plan.microbatches import deal
from megatron_resihp.plan.replica import experts_of
from megatron_resihp.plan.slices import (
    NO_EXPERT,
    TIED,
    WHOLE,
    Move,
    Slice,
    all_shards,
    contributors_of,
    cuts_of,
    holders_of,
    in_buckets,
    plan_moves,
    shares_of,
    slices_of,
)

HEAD = 9


@st.composite
def plans(draw: st.DrawFn) -> ParallelPlan:
    """Replicas that differ in stages, layers and tensor-parallel degrees."""
    replicas, worker = [], 0
    count = draw(st.integers(1, 3))
    shares = deal(even_counts(6, count))
    for number in range(count):
        stages = draw(st.integers(1, 4))
        ends = sorted(draw(st.lists(st.integers(1, HEAD), min_size=stages - 1, max_size=stages - 1, unique=True)))
        bounds = [0, *ends, HEAD + 1]
        chunks = tuple(Chunk(stage, bounds[stage], bounds[stage + 1]) for stage in range(stages))
        members = []
        for _ in range(stages):
            degree = draw(st.sampled_from((1, 2, 4)))
            members.append(tuple(range(worker, worker + degree)))
            worker += degree
        replicas.append(Replica(tuple(members), shares[number], chunks))
    return ParallelPlan(tuple(replicas), {})


@given(plans(), st.booleans())
def test_every_replica_holds_each_slice_once(plan: ParallelPlan, tied: bool) -> None:
    """Whatever its degrees: summed over replicas, each slice counts once for each of them."""
    head = HEAD if tied else None
    cuts = cuts_of(shard for shards in all_shards(plan).values() for shard in shards)
    contributors = contributors_of(plan, cuts, head)
    whole = [Shard(0, HEAD + 1, rank, cuts) for rank in range(cuts)]
    assert contributors.keys() == slices_of(whole, cuts, head)
    for piece, workers in contributors.items():
        replicas = [plan.replica_of(worker) for worker in workers]
        if piece.layer != TIED:
            assert replicas == list(range(len(plan.replicas)))
        else:
            # The embedding's gradient and the head's both count.
            assert set(replicas) == set(range(len(plan.replicas)))


@given(plans(), st.booleans())
def test_who_contributes_holds(plan: ParallelPlan, tied: bool) -> None:
    head = HEAD if tied else None
    shards = all_shards(plan)
    cuts = cuts_of(shard for each in shards.values() for shard in each)
    holders = holders_of(shards, cuts, head)
    for piece, workers in contributors_of(plan, cuts, head).items():
        assert set(workers) <= set(holders[piece])


@given(plans(), st.booleans())
def test_each_slice_is_in_one_bucket(plan: ParallelPlan, tied: bool) -> None:
    shards = all_shards(plan)
    cuts = cuts_of(shard for each in shards.values() for shard in each)
    holders = holders_of(shards, cuts, HEAD if tied else None)
    found = [piece for _, slices in in_buckets(holders) for piece in slices]
    assert sorted(found) == sorted(holders)


@given(plans(), plans(), st.booleans())
def test_moves_bring_just_what_is_missing(before: ParallelPlan, after: ParallelPlan, tied: bool) -> None:
    """From any plan to any other: afterwards everybody holds what the new plan wants, and nothing came twice."""
    head = HEAD if tied else None
    both = [all_shards(before), all_shards(after)]
    cuts = cuts_of(shard for table in both for shards in table.values() for shard in shards)
    held, wanted = ({worker: slices_of(shards, cuts, head) for worker, shards in table.items()} for table in both)
    moves, missing = plan_moves(held, wanted)
    assert not missing
    for worker, needs in wanted.items():
        came = [piece for move in moves if move.target == worker for piece in move.slices]
        assert len(came) == len(set(came))
        assert set(came) == needs - held.get(worker, frozenset())
    for move in moves:
        assert set(move.slices) <= held[move.source]


def test_what_nobody_holds_is_named() -> None:
    wanted = slices_of([Shard(0, 2, 0, 1)], 2, None)
    moves, missing = plan_moves({1: slices_of([Shard(0, 2, 0, 2)], 2, None)}, {0: wanted})
    assert missing == {Slice(0, 1), Slice(1, 1)}
    assert sum(len(move.slices) for move in moves) == len(wanted) - 2


def test_sources_take_turns() -> None:
    """Two holders of the same shard send half of it each."""
    held = {worker: slices_of([Shard(0, 4, 0, 1)], 1, None) for worker in (0, 1)}
    moves, _ = plan_moves(held, {2: held[0]})
    assert [len(move.slices) for move in moves] == [4, 4]


def test_tied_embeddings_are_held_at_both_ends() -> None:
    first, last = slices_of([Shard(0, 3, 1, 2)], 4, 5), slices_of([Shard(3, 6, 0, 1)], 4, 5)
    assert {piece for piece in first if piece.layer == TIED} == {Slice(TIED, 2), Slice(TIED, 3)}
    assert {piece.cut for piece in last if piece.layer == TIED} == {0, 1, 2, 3}
    assert Slice(0, 2) not in first
    assert {Slice(5, WHOLE), Slice(5, 0), Slice(5, 1)} < last  # a head may have weights beside the word embeddings


class TestSharesOfExperts:
    HALVES: ClassVar = [Shard(1, 2, 0, 1, rank, 2) for rank in range(2)]
    WHOLE: ClassVar = Shard(1, 2, 0, 1)

    def test_what_is_no_experts_is_with_every_share(self) -> None:
        first, second = (slices_of([half], 1, None, shares_of(self.HALVES)) for half in self.HALVES)
        assert first & second == {Slice(1, WHOLE), Slice(1, 0)}
        assert first | second == slices_of([self.WHOLE], 1, None, 2)

    def test_a_worker_that_gets_all_experts_is_sent_just_those_that_it_lacks(self) -> None:
        held = {worker: slices_of([half], 1, None, 2) for worker, half in enumerate(self.HALVES)}
        moves, missing = plan_moves(held, {0: slices_of([self.WHOLE], 1, None, 2)})
        assert moves == [Move(1, 0, (Slice(1, WHOLE, 1), Slice(1, 0, 1)))] and not missing

    def test_degrees_that_do_not_divide_each_other(self) -> None:
        thirds = [Shard(1, 2, 0, 1, rank, 3) for rank in range(3)]
        assert shares_of([*self.HALVES, *thirds]) == 6
        assert {piece.share for piece in slices_of([thirds[1]], 1, None, 6)} == {NO_EXPERT, 2, 3}

    def test_without_shares_experts_are_no_slices_of_their_own(self) -> None:
        assert slices_of([self.WHOLE], 1, None) == {Slice(1, WHOLE), Slice(1, 0)}


class TestMembersWithOtherExperts:
    """Of a stage of two members, each of which has other experts of its replica's share."""

    TWO: ClassVar = [Shard(1, 2, rank, 2, 0, 1, 1) for rank in range(2)]
    FOUR: ClassVar = [Shard(1, 2, number % 2, 2, number // 2, 2, 1) for number in range(4)]

    def test_experts_are_counted_on_from_one_replica_to_the_next(self) -> None:
        assert [experts_of(shard) for shard in self.FOUR] == [(number, 4, 0, 1) for number in range(4)]
        assert shares_of(self.TWO) == 2 and shares_of(self.FOUR) == 4

    def test_each_has_all_of_its_experts_and_its_cut_of_the_rest(self) -> None:
        held = slices_of([self.TWO[1]], 2, None, 2)
        assert {piece for piece in held if piece.share == NO_EXPERT} == {Slice(1, WHOLE), Slice(1, 1)}
        assert {piece for piece in held if piece.share != NO_EXPERT} == {Slice(1, cut, 1) for cut in (WHOLE, 0, 1)}

    def test_an_expert_moves_to_another_member_where_fewer_replicas_share(self) -> None:
        held = {number: slices_of([shard], 2, None, 4) for number, shard in enumerate(self.FOUR)}
        moves, missing = plan_moves(held, {rank: slices_of([shard], 2, None, 4) for rank, shard in enumerate(self.TWO)})
        assert not missing and {(move.source, move.target) for move in moves} == {(1, 0), (2, 1), (3, 1)}
        assert {piece.share for move in moves for piece in move.slices} == {1, 2, 3}

    def test_pairs_of_four_members_have_cuts_of_the_same_experts(self) -> None:
        found = [experts_of(Shard(1, 2, rank, 4, 0, 1, 2)) for rank in range(4)]
        assert found == [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]


@given(st.integers(2, 24).flatmap(lambda experts: st.tuples(st.just(experts), st.integers(1, experts))))
def test_unequal_shares_of_experts_are_slices_of_equal_ones(sizes: tuple[int, int]) -> None:
    """Each expert is a slice of its own, of one sharer, beside shards with all of them or an equal part."""
    experts, sharers = sizes
    uneven = experts if experts % sharers else 0
    shards = [Shard(1, 2, 0, 1, rank, sharers, 0, uneven) for rank in range(sharers)]
    equal = [Shard(1, 2, 0, 1, 0, degree) for degree in range(1, experts + 1) if experts % degree == 0]
    shares = shares_of([*shards, *equal])
    assert shares == experts
    found = [piece.share for shard in shards for piece in slices_of([shard], 1, None, shares) if piece.share >= 0]
    assert sorted(found) == sorted(2 * [*range(experts)]), "once as what members cut, and once as what they hold whole"
    assert uneven == 0 or shares_of(shards) == experts
