# SPDX-License-Identifier: Apache-2.0
"""The next plan from whatever survives: as many replicas as can be, nobody lost, nobody moved without need."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.plan import Coordinate, ParallelPlan, Replica
from megatron_resihp.plan.rules import Sharing
from megatron_resihp.planner import JobShape, NoPlanError, initial_plan, plan_uniform
from megatron_resihp.planner.job_shape import context_degrees, expert_degrees, sharings, uneven_sharings

Held = dict[int, Coordinate | None]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[JobShape, ParallelPlan]:
    """A job and its first plan."""
    replicas = draw(st.integers(1, 4))
    tp, pp = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    micro_batches = replicas * draw(st.integers(1, 3))
    shape = JobShape(tp, pp, micro_batches, workers_per_node=draw(st.integers(1, 4)))
    return shape, initial_plan(shape, replicas * shape.replica_size, draw(st.booleans()))


@st.composite
def disasters(draw: st.DrawFn) -> tuple[JobShape, ParallelPlan, Held]:
    """A job, its plan, and survivors that hold anything: their own shard, another's, or nothing."""
    shape, plan = draw(shapes())
    survivors = draw(st.sets(st.sampled_from(plan.members)))
    others = st.one_of(st.none(), st.sampled_from(shape.coordinates()))
    odd = draw(st.dictionaries(st.sampled_from(plan.members), others, max_size=4))
    return shape, plan, {worker: odd.get(worker, plan.coordinate_of(worker)) for worker in survivors}


@st.composite
def deaths(draw: st.DrawFn) -> tuple[JobShape, ParallelPlan, Held]:
    """A job in its first plan of which some workers died; the others hold what they work on."""
    shape, plan = draw(shapes())
    survivors = draw(st.sets(st.sampled_from(plan.members), min_size=len(plan.members) // 2))
    return shape, plan, {worker: plan.coordinate_of(worker) for worker in survivors}


def holders(shape: JobShape, held: Held) -> Counter[Coordinate]:
    return Counter({c: sum(shard == c for shard in held.values()) for c in shape.coordinates()})


def movers(plan: ParallelPlan, held: Held) -> list[int]:
    return [worker for worker in plan.working if plan.coordinate_of(worker) != held[worker]]


class TestFirstPlan:
    @given(tp=st.integers(1, 4), pp=st.integers(1, 4), dp=st.integers(1, 4), pipeline_last=st.booleans())
    def test_workers_are_megatrons_ranks(self, tp: int, pp: int, dp: int, pipeline_last: bool) -> None:
        plan = initial_plan(JobShape(tp, pp, micro_batches=dp), tp * pp * dp, pipeline_last)
        assert plan.grid.rank_order(pipeline_last) == tuple(range(tp * pp * dp))
        assert (plan.grid.tensor_parallel, plan.grid.pipeline_parallel, len(plan.replicas)) == (tp, pp, dp)

    def test_sizes_that_do_not_divide(self) -> None:
        with pytest.raises(NoPlanError, match="6 workers are not a multiple of TP x PP = 4"):
            initial_plan(JobShape(2, 2, 8), 6)
        with pytest.raises(NoPlanError, match="2 workers are not a multiple"):
            initial_plan(JobShape(2, 2, 8), 2)
        with pytest.raises(NoPlanError, match="8 micro-batches cannot be shared evenly by 3 replicas"):
            initial_plan(JobShape(1, 1, 8), 3)


class TestAnySurvivors:
    @given(disaster=disasters())
    def test_as_many_replicas_as_fit_or_the_missing_shards_by_name(
        self, disaster: tuple[JobShape, ParallelPlan, Held]
    ) -> None:
        shape, before, held = disaster
        missing = tuple(c for c, count in holders(shape, held).items() if not count)
        if missing:
            with pytest.raises(NoPlanError) as caught:
                plan_uniform(shape, held, before)
            assert caught.value.missing == missing
            assert all(f"stage {c.stage} TP rank {c.tp_rank}" in str(caught.value) for c in missing)
            return
        plan = plan_uniform(shape, held, before)
        assert len(plan.replicas) == min(len(held) // shape.replica_size, shape.micro_batches)
        degrees = (plan.grid.tensor_parallel, plan.grid.pipeline_parallel)
        assert degrees == (shape.tensor_parallel, shape.pipeline_parallel)
        assert plan.micro_batch_count == shape.micro_batches
        assert plan.members == tuple(sorted(held))
        sizes = [len(replica.micro_batches) for replica in plan.replicas]
        assert max(sizes) - min(sizes) <= 1

    @given(disaster=disasters())
    def test_only_surplus_moves_and_no_more_than_is_lacking(
        self, disaster: tuple[JobShape, ParallelPlan, Held]
    ) -> None:
        shape, before, held = disaster
        there = holders(shape, held)
        if not all(there.values()):
            return
        plan = plan_uniform(shape, held, before)
        replicas = len(plan.replicas)
        moved = movers(plan, held)
        assert len(moved) == sum(max(0, replicas - count) for count in there.values())
        for worker in moved:
            shard = held[worker]
            assert shard is None or there[shard] > replicas
            wanted = plan.coordinate_of(worker)
            assert wanted is not None and there[wanted] < replicas
        for coordinate in shape.coordinates():
            # Whoever has to fetch a shard finds somebody that works on it and holds it.
            assert any(held[worker] == coordinate for worker in plan.grid.workers_at(coordinate))

    @given(disaster=disasters())
    def test_standbys_keep_what_they_hold(self, disaster: tuple[JobShape, ParallelPlan, Held]) -> None:
        shape, before, held = disaster
        if not all(holders(shape, held).values()):
            return
        plan = plan_uniform(shape, held, before)
        assert dict(plan.standbys) == {worker: held[worker] for worker in held if worker not in plan.working}

    @given(disaster=disasters())
    def test_the_same_survivors_give_the_same_plan(self, disaster: tuple[JobShape, ParallelPlan, Held]) -> None:
        shape, before, held = disaster
        if not all(holders(shape, held).values()):
            return
        shuffled = dict(reversed(list(held.items())))
        assert plan_uniform(shape, held, before).digest == plan_uniform(shape, shuffled, before).digest


class TestAfterDeaths:
    @given(disaster=deaths())
    def test_who_still_works_stays_in_its_replica(self, disaster: tuple[JobShape, ParallelPlan, Held]) -> None:
        shape, before, held = disaster
        if not all(holders(shape, held).values()):
            return
        plan = plan_uniform(shape, held, before)
        for worker in set(plan.working) - set(movers(plan, held)):
            replica = before.replica_of(worker)
            if replica is not None and replica < len(plan.replicas):
                assert plan.replica_of(worker) == replica

    @given(disaster=deaths())
    def test_who_works_goes_on_before_who_stands_by(self, disaster: tuple[JobShape, ParallelPlan, Held]) -> None:
        """A communication error without a loss: the plan stays as it is."""
        shape, before, held = disaster
        if not all(holders(shape, held).values()):
            return
        plan = plan_uniform(shape, held, before)
        current: Held = {worker: plan.coordinate_of(worker) for worker in plan.members}
        assert plan_uniform(shape, current, plan) == plan

    @given(job=shapes())
    def test_without_a_death_nothing_changes(self, job: tuple[JobShape, ParallelPlan]) -> None:
        shape, plan = job
        assert plan_uniform(shape, {w: plan.coordinate_of(w) for w in plan.members}, plan) == plan

    def test_one_of_two_replicas_loses_a_worker(self) -> None:
        """TP 2 x PP 2 x DP 2: the whole replica goes on with all micro-batches, three workers keep their shard."""
        shape = JobShape(2, 2, micro_batches=8, workers_per_node=4)
        before = initial_plan(shape, 8)
        held = {worker: before.coordinate_of(worker) for worker in range(8) if worker != 3}
        plan = plan_uniform(shape, held, before)
        assert len(plan.replicas) == 1 and plan.replicas[0].micro_batches == tuple(range(8))
        assert plan.replicas[0].stages == ((0, 1), (4, 5))
        assert plan.standbys == {2: Coordinate(0, 0), 6: Coordinate(1, 0), 7: Coordinate(1, 1)}

    def test_tp_groups_stay_whole(self) -> None:
        """The survivor of a torn TP group stands by, though its replica comes first: its peers are on one node."""
        shape = JobShape(2, 1, micro_batches=4, workers_per_node=2)
        before = initial_plan(shape, 4)
        plan = plan_uniform(shape, {w: before.coordinate_of(w) for w in (1, 2, 3)}, before)
        assert plan.replicas[0].stages == ((2, 3),)
        assert plan.standbys == {1: Coordinate(0, 1)}

    def test_survivors_of_unlike_replicas_form_one(self) -> None:
        shape = JobShape(1, 2, micro_batches=4)
        before = initial_plan(shape, 4)
        plan = plan_uniform(shape, {1: Coordinate(0, 0), 2: Coordinate(1, 0)}, before)
        assert plan.replicas[0].stages == ((1,), (2,)) and not plan.standbys

    def test_a_surplus_worker_moves_where_holders_lack(self) -> None:
        """DP 3 x PP 2: two stage-1 workers die, so a third stage-0 worker moves and two replicas go on."""
        shape = JobShape(1, 2, micro_batches=6)
        before = initial_plan(shape, 6)
        held = {worker: before.coordinate_of(worker) for worker in (0, 1, 2, 3)}
        plan = plan_uniform(shape, held, before)
        assert len(plan.replicas) == 2 and not plan.standbys
        assert plan.replicas[0].stages == ((0,), (3,))
        assert movers(plan, held) == [2] and plan.coordinate_of(2) == Coordinate(1, 0)

    def test_a_mover_is_taken_from_the_node_of_its_new_tp_peers(self) -> None:
        shape = JobShape(2, 1, micro_batches=4, workers_per_node=2)
        before = initial_plan(shape, 8)
        held = {0: None, 4: Coordinate(0, 0), 5: None, 6: Coordinate(0, 0), 7: Coordinate(0, 1)}
        plan = plan_uniform(shape, held, before)
        assert {replica.stages for replica in plan.replicas} == {((4, 5),), ((6, 7),)}
        assert plan.standbys == {0: None}

    def test_each_replica_gets_as_many_micro_batches_as_it_must_run(self) -> None:
        """An interleaved pipeline of two stages can't run one alone."""
        shape = JobShape(1, 2, micro_batches=5, micro_batch_group=2)
        before = initial_plan(replace(shape, micro_batches=6), 6)
        plan = plan_uniform(shape, {worker: before.coordinate_of(worker) for worker in before.members}, before)
        assert [len(replica.micro_batches) for replica in plan.replicas] == [3, 2]
        assert len(plan.standbys) == 2

    def test_an_interleaved_job_keeps_its_groups_of_micro_batches(self) -> None:
        """With other groups each worker would have more micro-batches' activations at a time than before."""
        shape = JobShape(1, 2, micro_batches=16, micro_batch_group=2)
        before = initial_plan(shape, 8)
        held = {worker: before.coordinate_of(worker) for worker in before.members if worker != 5}
        plan = plan_uniform(shape, held, before)
        assert [len(replica.micro_batches) for replica in plan.replicas] == [6, 6, 4]

    def test_more_survivors_than_micro_batches(self) -> None:
        shape = JobShape(1, 1, micro_batches=2)
        before = initial_plan(shape, 2)
        plan = plan_uniform(shape, {worker: Coordinate(0, 0) for worker in range(4)}, before)
        assert len(plan.replicas) == 2 and set(plan.standbys) == {2, 3}


class TestSharedSequences:
    @given(sizes=st.tuples(*[st.integers(1, 3)] * 4), pipeline_last=st.booleans())
    def test_workers_are_megatrons_ranks(self, sizes: tuple[int, int, int, int], pipeline_last: bool) -> None:
        tp, cp, dp, pp = sizes
        plan = initial_plan(JobShape(tp, pp, dp, sharings=sharings((cp,), (1,))), tp * cp * dp * pp, pipeline_last)
        assert plan.grid.rank_order(pipeline_last) == tuple(range(tp * cp * dp * pp))
        for number, replica in enumerate(plan.replicas):
            group, place = divmod(number, cp)
            assert replica.micro_batches == (group,)
            for worker, (stage, tp_rank) in replica.workers():
                # megatron.core.parallel_state: order 'tp-cp-ep-dp-pp', or 'tp-cp-ep-pp-dp' with the other flag.
                slot = group + dp * stage if pipeline_last else stage + pp * group
                assert worker == tp_rank + tp * (place + cp * slot)

    @pytest.mark.parametrize(
        ("own", "workers", "micro_batches", "lost", "expected"),
        [
            (2, 4, 6, 1, (1, 3)), (2, 4, 4, 1, (2, 2)), (2, 4, 6, 2, (2, 2)), (4, 8, 8, 1, (2, 6)),
            (4, 4, 1, 1, (2, 2)), (2, 2, 4, 1, (1, 1)), (2, 4, 6, 0, (2, 4)),
        ],
    )  # fmt: skip
    def test_survivors_share_in_the_number_that_takes_least_time(
        self, own: int, workers: int, micro_batches: int, lost: int, expected: tuple[int, int]
    ) -> None:
        """Of two that take as long the larger one, whose members hold less of a sequence."""
        shape = JobShape(1, 1, micro_batches, sharings=sharings(context_degrees(own, 32, 1), (1,)))
        before = initial_plan(shape, workers)
        held = dict.fromkeys(range(workers - lost), Coordinate(0, 0))
        plan = plan_uniform(shape, held, before)
        assert (plan.context_parallel, len(plan.replicas)) == expected
        assert set(plan.members) == set(held) and plan.micro_batch_count == micro_batches

    def test_degrees_that_cut_sequences_evenly(self) -> None:
        assert context_degrees(1, 10, 1) == (1,)
        assert context_degrees(4, 24, 1) == (4, 3, 2, 1)
        assert context_degrees(4, 16, 1) == (4, 2, 1)
        assert context_degrees(4, 24, 8) == (4, 3, 1), "three have 8 tokens each, which 8 members share; two have 12"

    def test_sizes_that_do_not_divide(self) -> None:
        with pytest.raises(NoPlanError, match="6 workers are not a multiple of TP x CP x PP = 4"):
            initial_plan(JobShape(2, 1, 4, sharings=sharings((2, 1), (1,))), 6)


class TestSharedExperts:
    @pytest.mark.parametrize(
        ("own", "experts", "micro_batches", "lost", "expected"),
        [
            (2, 4, 8, 0, (2, 4)), (2, 4, 8, 1, (1, 3)), (2, 4, 8, 2, (2, 2)), (2, 4, 8, 3, (1, 1)),
            (4, 4, 8, 1, (1, 3)), (4, 4, 4, 1, (2, 2)), (3, 6, 9, 1, (3, 3)), (4, 4, 4, 0, (4, 4)),
        ],
    )  # fmt: skip
    def test_survivors_share_in_the_number_that_takes_least_time(
        self, own: int, experts: int, micro_batches: int, lost: int, expected: tuple[int, int]
    ) -> None:
        """Of two that take as long the larger one, whose members hold fewer experts."""
        shape = JobShape(1, 1, micro_batches, sharings=sharings((1,), expert_degrees(own, experts)))
        before = ParallelPlan(tuple(Replica(((w,),), (w,)) for w in range(4)))
        held = dict.fromkeys(range(4 - lost), Coordinate(0, 0))
        plan = plan_uniform(shape, held, before)
        assert (plan.expert_parallel, len(plan.replicas)) == expected
        assert set(plan.members) == set(held) and plan.micro_batch_count == micro_batches
        assert all(kept is None for kept in plan.standbys.values()) or plan.expert_parallel == 1

    @pytest.mark.parametrize(
        ("micro_batches", "group", "equal", "expected"),
        [
            (8, None, False, (3, [3, 3, 2])), (8, None, True, (1, [3, 3, 2])), (9, None, True, (3, [3, 3, 3])),
            (5, None, False, (3, [2, 2, 1])), (3, None, False, (3, [1, 1, 1])), (7, 2, False, (3, [3, 2, 2])),
            (16, 4, False, (3, [6, 5, 5])),
        ],
    )  # fmt: skip
    def test_three_that_share_have_unequal_numbers_of_micro_batches_if_they_may(
        self, micro_batches: int, group: int | None, equal: bool, expected: tuple[int, list[int]]
    ) -> None:
        stages = 1 if group is None else 2
        shape = JobShape(1, stages, micro_batches, micro_batch_group=group, equal_rounds=equal,
                         sharings=sharings((1,), expert_degrees(4, 12)))  # fmt: skip
        places = shape.coordinates()
        before = ParallelPlan(
            tuple(Replica(tuple((len(places) * r + s,) for s in range(stages)), (r,)) for r in range(3))
        )
        held = {len(places) * r + place.stage: place for r in range(3) for place in places}
        plan = plan_uniform(shape, held, before)
        assert plan.expert_parallel == expected[0] and not plan.standbys
        assert [len(replica.micro_batches) for replica in plan.replicas] == expected[1]

    @pytest.mark.parametrize(
        ("own", "survivors", "micro_batches", "even", "expected"),
        [
            (4, 3, 8, (4, 2), (3, 3)), (4, 3, 8, (4, 2, 1), (1, 3)), (4, 3, 6, (4, 2), (3, 3)),
            (4, 3, 4, (4, 2), (2, 2)), (8, 7, 56, (8, 4, 2), (2, 6)), (8, 3, 8, (8, 4), (3, 3)),
            (8, 5, 20, (8, 4), (4, 4)),
        ],
    )  # fmt: skip
    def test_experts_are_dealt_in_unequal_numbers_where_that_is_faster(
        self, own: int, survivors: int, micro_batches: int, even: tuple[int, ...], expected: tuple[int, int]
    ) -> None:
        """Of eight experts. Each worker waits for the one with most of them: seven that share have two at most, so each
        of their rounds takes 7/4 of its time, and three pairs are faster. What takes as long is dealt in equal numbers.
        """
        shape = JobShape(1, 1, micro_batches, sharings=sharings((1,), even) + uneven_sharings(own, 8))
        before = ParallelPlan(tuple(Replica(((w,),), (w,)) for w in range(own)))
        plan = plan_uniform(shape, dict.fromkeys(range(survivors), Coordinate(0, 0)), before)
        assert (plan.expert_parallel, len(plan.replicas)) == expected
        assert plan.uneven_experts == (8 if 8 % plan.expert_parallel else 0)

    def test_the_time_of_those_that_share_is_that_of_the_one_with_most_micro_batches(self) -> None:
        """Four with 2, 2, 2 and 1 take as long as two pairs, and hold fewer experts each."""
        shape = JobShape(1, 1, 7, sharings=sharings((1,), (4, 2, 1)))
        before = ParallelPlan(tuple(Replica(((w,),), (w,)) for w in range(4)))
        plan = plan_uniform(shape, dict.fromkeys(range(4), Coordinate(0, 0)), before)
        assert (plan.expert_parallel, [len(each.micro_batches) for each in plan.replicas]) == (4, [2, 2, 2, 1])

    def test_the_first_plan_is_megatrons(self) -> None:
        plan = initial_plan(JobShape(2, 1, 8, sharings=sharings((1,), (2, 1))), 8)
        assert plan.grid.rank_order() == tuple(range(8)) and plan.expert_parallel == 2
        assert [replica.micro_batches for replica in plan.replicas] == [(0, 4), (1, 5), (2, 6), (3, 7)]
        with pytest.raises(NoPlanError, match="3 replicas can't share experts in groups of 2"):
            initial_plan(JobShape(1, 1, 6, sharings=sharings((1,), (2, 1))), 3)

    @pytest.mark.parametrize(("context", "experts"), [(2, 3), (4, 6), (8, 12)])
    def test_numbers_of_which_neither_divides_the_other(self, context: int, experts: int) -> None:
        """The first is taken for the job's own, so none may stand for it."""
        with pytest.raises(ValueError, match=f"{context} replicas share a sequence, and {experts} experts"):
            sharings(context_degrees(context, 96, 1), expert_degrees(experts, 12 * experts))

    def test_degrees_that_divide_the_experts(self) -> None:
        assert expert_degrees(8, 8) == (8, 4, 2, 1)
        assert expert_degrees(4, 12) == (4, 3, 2, 1)
        assert expert_degrees(1, 0) == (1,)


class TestSharedSequencesAndExperts:
    @pytest.mark.parametrize(
        ("own", "workers", "micro_batches", "lost", "expected"),
        [
            ((2, 2), 4, 6, 0, (2, 2, 4)), ((2, 2), 4, 6, 1, (1, 1, 3)), ((2, 2), 4, 4, 1, (2, 2, 2)),
            ((2, 4), 4, 8, 1, (1, 1, 3)), ((2, 4), 8, 8, 1, (2, 2, 6)), ((4, 2), 8, 8, 1, (2, 2, 6)),
            ((2, 4), 8, 8, 0, (2, 4, 8)),
        ],
    )  # fmt: skip
    def test_survivors_share_in_the_numbers_that_take_least_time(
        self, own: tuple[int, int], workers: int, micro_batches: int, lost: int, expected: tuple[int, int, int]
    ) -> None:
        context, experts = own
        possible = sharings(context_degrees(context, 32, 1), expert_degrees(experts, 4))
        shape = JobShape(1, 1, micro_batches, sharings=possible)
        before = initial_plan(shape, workers)
        assert (before.context_parallel, before.expert_parallel) == own
        plan = plan_uniform(shape, dict.fromkeys(range(workers - lost), Coordinate(0, 0)), before)
        assert (plan.context_parallel, plan.expert_parallel, len(plan.replicas)) == expected
        assert plan.micro_batch_count == micro_batches

    def test_groups_of_one_kind_are_made_of_whole_groups_of_the_other(self) -> None:
        assert [each[:2] for each in sharings((4, 3), (4, 2, 1))] == [(4, 4), (4, 2), (4, 1), (3, 1)]

    def test_both_numbers_become_smaller_alike_where_pipelines_are_counted_first(self) -> None:
        assert sharings((4, 2, 1), (4, 2, 1), alike=True) == (Sharing(4, 4), Sharing(2, 2), Sharing(1, 1))
        assert sharings((2,), (2, 1), alike=True) == (Sharing(2, 2),)

    def test_groups_that_share_experts_run_as_many_micro_batches(self) -> None:
        """Of three groups that share sequences two share experts, and the third doesn't work."""
        shape = JobShape(1, 1, 8, sharings=sharings((2,), (4,)))
        plan = plan_uniform(shape, dict.fromkeys(range(6), Coordinate(0, 0)), initial_plan(shape, 8))
        assert [len(replica.micro_batches) for replica in plan.replicas] == [4, 4, 4, 4] and len(plan.standbys) == 2
        with pytest.raises(NoPlanError, match="can't share sequences in groups of 2 and experts in groups of 4"):
            plan_uniform(shape, dict.fromkeys(range(3), Coordinate(0, 0)), initial_plan(shape, 8))
