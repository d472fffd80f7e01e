# SPDX-License-Identifier: Apache-2.0
"""Plans of jobs whose replicas share experts or sequences: who works, who shares, and how much each does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.memory import check_plan, memory_of
from megatron_resihp.cost.model.layers import model_from_arguments
from megatron_resihp.cost.model.presets import PRESETS
from megatron_resihp.cost.training import Training
from megatron_resihp.lab.baselines.lazarus import DISPATCHED
from megatron_resihp.lab.strategies import FOR_SHARERS as BASELINES
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.plan.layers import chunks_from
from megatron_resihp.plan.rules import Sharing
from megatron_resihp.planner import NoPlanError
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.moves import bytes_to_move, seconds_to_get_there
from megatron_resihp.planner.strategies.registry import FOR_SHARERS
from megatron_resihp.simulator.sizes import Sizes, a100, sharers_of_experts

EXPERTS = model_from_arguments({**PRESETS["mixtral-8x7b"], "num_layers": 4})
LONG = model_from_arguments({**PRESETS["llama3-405b"], "num_layers": 4})
ALL = {**FOR_SHARERS, **BASELINES}
NAMES = ("by-speed", "uniform", "restart", "rectangles", "lazarus")
BY_SPEED, UNIFORM, RESTART, RECTANGLES, LAZARUS = (ALL[name].strategy for name in NAMES)


def sizes(tensor: int, pipeline: int, data: int, context: int = 1, expert: int = 1, rounds: int = 4) -> Sizes:
    model = EXPERTS if expert > 1 else LONG
    training = Training(8192, sequence_parallel=True, distributed_optimizer=True)
    experts, members = sharers_of_experts(expert, None, tensor)
    device = a100(memory_gib=1000, gbps=400)
    return Sizes(model, training, device, tensor, pipeline, data, rounds * data, 4, context, experts, members)


def of(job: Sizes) -> tuple[ParallelPlan, JobCost]:
    return job.plan(), replace(job.cost(), until_next_event_s=3600.0)


def well(plan: ParallelPlan, *dead: int, **slow: float) -> Health:
    speeds = {worker: slow.get(f"w{worker}", 1.0) for worker in plan.members if worker not in dead}
    return Health(speeds)


@st.composite
def instances(draw: st.DrawFn) -> tuple[ParallelPlan, JobCost, Health]:
    tensor, pipeline = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    context, expert = draw(st.sampled_from([(1, 2), (1, 4), (2, 1), (4, 1), (2, 4), (4, 2)]))
    together = max(context, expert)
    plan, cost = of(sizes(tensor, pipeline, together * draw(st.integers(1, 3)), context, expert))
    dead = draw(st.sets(st.sampled_from(plan.members), max_size=3))
    speeds = st.sampled_from([1.0, 1.0, 1.0, 0.8, 0.5])
    return plan, cost, Health({worker: draw(speeds) for worker in plan.members if worker not in dead})


@settings(max_examples=40, deadline=None)
@given(instances(), st.sampled_from(sorted(ALL)))
def test_plans_are_of_living_workers_within_memory_and_run_the_whole_batch(
    instance: tuple[ParallelPlan, JobCost, Health], name: str
) -> None:
    plan, cost, health = instance
    try:
        found = ALL[name].strategy(plan, health, cost)
    except NoPlanError as error:
        assert str(error)
        return
    assert set(found.members) == set(health.live)
    assert found.micro_batch_count == cost.micro_batches
    check_plan(found, cost.model, cost.training, cost.device.memory)
    assert ALL[name].running.evaluate(found, health, cost).share_of_bound <= 1 + 1e-9
    again = ALL[name].strategy(plan, health, cost)
    assert again == found


@settings(max_examples=25, deadline=None)
@given(instances())
def test_by_speed_is_never_slower_than_what_running_jobs_do(instance: tuple[ParallelPlan, JobCost, Health]) -> None:
    plan, cost, health = instance
    try:
        other = UNIFORM(plan, health, cost)
    except NoPlanError:
        return
    found = BY_SPEED(plan, health, cost)

    def seconds(after: ParallelPlan) -> float:
        moving_s = 0.0 if after.replicas == plan.replicas else seconds_to_get_there(plan, after, cost)
        return evaluate(after, health, cost).iteration_s / (1 - moving_s / 3600)

    assert seconds(found) <= seconds(other) * (1 + 1e-9)


@pytest.mark.parametrize("name", [name for name in ALL if name != "lazarus"])
def test_with_all_well_nothing_changes(name: str) -> None:
    plan, cost = of(sizes(2, 2, 8, expert=4))
    cost = replace(cost, sharings=cost.sharings[:1])
    assert ALL[name].strategy(plan, well(plan), cost).replicas == plan.replicas


def test_by_speed_deals_experts_unevenly_where_uniform_plans_do() -> None:
    """Three are left of four with two experts each, and none has room for four."""
    plan, cost = of(sizes(1, 1, 4, expert=4))
    uneven = Sharing(1, 3, 0, 8)
    fewer = tuple(replace(each, micro_batches=(number,)) for number, each in enumerate(plan.replicas[:3]))
    used = memory_of(ParallelPlan(fewer, expert_parallel=3, uneven_experts=8), cost.model, cost.training)
    memory = max(use.total for use in used.values())
    cost = replace(cost, sharings=(*cost.sharings, uneven), device=replace(cost.device, memory=memory))
    for slow in (1.0, 0.9):
        health = well(plan, 3, w1=slow)
        found, plain = (strategy(plan, health, cost) for strategy in (BY_SPEED, UNIFORM))
        assert found.sharing == plain.sharing == uneven
        assert evaluate(found, health, cost).iteration_s <= evaluate(plain, health, cost).iteration_s


class TestUniform:
    def test_the_rest_of_a_group_goes_on_with_fewer_sharers(self) -> None:
        plan, cost = of(sizes(1, 2, 4, expert=4))
        found = UNIFORM(plan, well(plan, 5), cost)
        assert (len(found.replicas), found.expert_parallel) == (3, 1)

    def test_memory_keeps_as_many_sharers_as_it_needs(self) -> None:
        plan, cost = of(sizes(1, 1, 8, expert=4))
        replicas = (replace(replica, micro_batches=(number,)) for number, replica in enumerate(plan.replicas[:6]))
        pairs = ParallelPlan(tuple(replicas), expert_parallel=2)
        enough = max(use.total for use in memory_of(pairs, cost.model, cost.training).values())
        tight = replace(cost, device=replace(cost.device, memory=enough))
        found = UNIFORM(plan, well(plan, 5), tight)
        assert (len(found.replicas), found.expert_parallel) == (6, 2)

    def test_so_do_sequences(self) -> None:
        plan, cost = of(sizes(1, 2, 4, context=4))
        found = UNIFORM(plan, well(plan, 5), cost)
        assert (len(found.replicas), found.context_groups) == (3, (2, 1))

    def test_of_an_interleaved_job_as_many_work_as_get_a_micro_batch_for_each_stage(self) -> None:
        plan, cost = interleaved(rounds=1)
        found = UNIFORM(plan, well(plan, 1), cost)
        assert [len(replica.micro_batches) for replica in found.replicas] == [2, 2, 2, 2]


def interleaved(rounds: int) -> tuple[ParallelPlan, JobCost]:
    """A job of eight replicas, of two stages with two chunks each."""
    plan, cost = of(sizes(1, 2, 8, expert=2, rounds=rounds))
    turns = chunks_from([2, 1, 1, 2], stages=2)
    return replace(plan, replicas=tuple(replace(each, chunks=turns) for each in plan.replicas)), cost


class TestBySpeed:
    def test_slow_workers_share_with_each_other_and_get_less(self) -> None:
        job = sizes(1, 1, 8, expert=2, rounds=8)
        plan, cost = of(replace(job, device=a100(memory_gib=1000, gbps=2400)))
        cost = replace(cost, sharings=cost.sharings[:1])
        found = BY_SPEED(plan, well(plan, w0=0.5, w5=0.5), cost)
        pairs = [{replica.stages[0][0] for replica in found.replicas[first : first + 2]} for first in range(0, 8, 2)]
        assert {0, 5} in pairs
        counts = [len(replica.micro_batches) for replica in found.replicas]
        assert counts[2 * pairs.index({0, 5})] == min(counts) < max(counts)

    def test_those_of_one_node_stay_together_where_links_between_nodes_are_slow(self) -> None:
        job = sizes(1, 1, 8, expert=4, rounds=8)
        plan, cost = of(replace(job, device=a100(memory_gib=1000, gbps=1)))
        cost = replace(cost, sharings=cost.sharings[:1])
        found = BY_SPEED(plan, well(plan, w0=0.7, w5=0.7), cost)
        assert {replica.stages[0][0] for replica in found.replicas[:4]} in ({0, 1, 2, 3}, {4, 5, 6, 7})

    def test_those_that_send_between_nodes_share_in_all_stages(self) -> None:
        job = sizes(1, 2, 8, expert=2, rounds=8)
        plan, cost = of(replace(job, device=a100(memory_gib=1000, gbps=50)))
        cost = replace(cost, sharings=cost.sharings[:1])
        found = BY_SPEED(plan, well(plan, 0, 4, 10, 14), cost)
        pairs = [[{r.stages[stage][0] for r in found.replicas[first : first + 2]} for stage in (0, 1)]
                 for first in range(0, len(found.replicas), 2)]  # fmt: skip
        assert [{1, 5}, {11, 15}] in pairs

    def test_where_some_are_to_spare_the_slow_ones_are(self) -> None:
        plan, cost = of(sizes(1, 2, 8, expert=2, rounds=8))
        cost = replace(cost, sharings=cost.sharings[:1])
        found = BY_SPEED(plan, well(plan, 0, 4, w8=0.5), cost)
        assert len(found.replicas) == 6 and 8 in found.standbys

    def test_workers_stay_with_their_layers(self) -> None:
        plan, cost = of(sizes(1, 4, 8, expert=2))
        cost = replace(cost, sharings=cost.sharings[:1])
        found = BY_SPEED(plan, well(plan, 0, w9=0.5), cost)
        assert not set(bytes_to_move(plan, found, cost)) - set(range(8)), "only those of the first stage have to fetch"

    @pytest.mark.parametrize("rounds", [8, 5, 2])
    def test_each_of_an_interleaved_job_gets_a_micro_batch_for_each_stage_at_least(self, rounds: int) -> None:
        plan, cost = interleaved(rounds)
        for health in (well(plan, w1=0.1), well(plan, 1)):
            found = BY_SPEED(plan, health, replace(cost, sharings=cost.sharings[:1]))
            counts = [len(replica.micro_batches) for replica in found.replicas]
            assert min(counts) >= 2 and sum(counts) == 8 * rounds

    def test_some_get_one_fewer_where_micro_batches_dont_go_evenly_into_those_that_share(self) -> None:
        plan, cost = of(sizes(1, 1, 8, expert=4))
        cost = replace(cost, sharings=(Sharing(1, 4), Sharing(1, 3)))
        found = BY_SPEED(plan, well(plan, 3, 7, w4=0.5, w5=0.5, w6=0.5), cost)
        assert [len(replica.micro_batches) for replica in found.replicas] == [7, 7, 6, 4, 4, 4]
        with pytest.raises(NoPlanError, match="can't be run by 3 replicas at a time"):
            BY_SPEED(plan, well(plan, 3, 4, 5, 6, 7), replace(cost, equal_rounds=True))

    def test_a_change_that_does_not_pay_is_left(self) -> None:
        plan, cost = of(sizes(1, 1, 8, expert=2))
        slow = well(plan, w0=0.5, w5=0.5)
        assert BY_SPEED(plan, slow, cost) != plan
        assert BY_SPEED(plan, slow, replace(cost, until_next_event_s=1.0)) == plan


class TestRectangles:
    def test_one_death_costs_all_that_share(self) -> None:
        plan, cost = of(sizes(1, 2, 8, expert=4))
        found = RECTANGLES(plan, well(plan, 5), cost)
        assert len(found.replicas) == 4 and len(found.standbys) == 7
        with pytest.raises(NoPlanError, match="each of the 2 rectangles of 4 replicas lost a worker"):
            RECTANGLES(plan, well(plan, 0, 5), cost)

    def test_those_who_come_back_complete_it(self) -> None:
        plan, cost = of(sizes(1, 2, 8, expert=4))
        less = RECTANGLES(plan, well(plan, 5), cost)
        found = RECTANGLES(less, well(plan, 5), cost)
        assert found == less, "the dead one is still missing"
        again = RECTANGLES(less, well(plan), cost)
        assert len(again.replicas) == 8 and evaluate(again, well(plan), cost).iteration_s == pytest.approx(
            evaluate(plan, well(plan), cost).iteration_s
        )

    def test_a_batch_that_does_not_divide_leaves_some_one_fewer(self) -> None:
        plan, cost = of(sizes(1, 2, 8, expert=4))
        uneven = replace(cost, micro_batches=30)
        found = RECTANGLES(plan, well(plan, 5), uneven)
        assert [len(each.micro_batches) for each in found.replicas] == [8, 8, 7, 7]
        with pytest.raises(NoPlanError, match="30 micro-batches can't be run by 4 replicas at a time"):
            RECTANGLES(plan, well(plan, 5), replace(uneven, equal_rounds=True))


class TestRestart:
    def test_what_is_left_of_a_group_waits_for_more(self) -> None:
        """Another group of four takes workers of any stage and replica; the batch divides by both."""
        plan, cost = of(sizes(1, 2, 8, expert=4))
        found = RESTART(plan, well(plan, 0, 5), cost)
        assert len(found.replicas) == 4 and len(found.standbys) == 6
        assert found.sharing == plan.sharing
        with pytest.raises(NoPlanError, match="7 groups of 1 workers are left; 4 replicas that share take 8"):
            RESTART(plan, well(plan, *range(9)), cost)


class TestLazarus:
    def test_all_survivors_go_on_whatever_their_number(self) -> None:
        plan, cost = of(sizes(1, 2, 8, expert=4))
        found = LAZARUS(plan, well(plan, 5), cost)
        assert len(found.replicas) == 7 and len(found.standbys) == 1

    def test_who_has_room_for_all_experts_waits_for_nobody(self) -> None:
        plan, cost = of(sizes(1, 2, 8, expert=4))
        found, health = LAZARUS(plan, well(plan, 5), cost), well(plan, 5)
        assert DISPATCHED.evaluate(found, health, cost).iteration_s == evaluate(found, health, cost).iteration_s
        small, slow = room_for(2, plan, cost), well(plan, 5, w3=0.5)
        tight = LAZARUS(plan, slow, small)
        waits = (
            DISPATCHED.evaluate(tight, slow, small).iteration_s / DISPATCHED.evaluate(tight, health, small).iteration_s
        )
        assert waits > 1.5

    def test_experts_that_a_worker_lacks_are_charged(self) -> None:
        plan, cost = of(sizes(1, 2, 8, expert=4))
        small = room_for(2, plan, cost)
        first = LAZARUS(plan, well(plan), small)
        assert LAZARUS(first, well(plan), small) == first
        assert not DISPATCHED.bytes_to_move(first, first, small)
        after = LAZARUS(first, well(plan, 5), small)
        moved = DISPATCHED.bytes_to_move(first, after, small)
        one = 3 * 4096 * 14336 * (2 + 12 / 1)  # weights and optimizer of an expert
        assert 0 < max(moved.values()) <= 2 * 2 * one
        assert len(moved) < len(after.working), "some keep theirs"

    def test_an_expert_that_lives_nowhere_is_missed(self) -> None:
        plan, cost = of(sizes(1, 1, 8, expert=8))
        DISPATCHED.require_state(plan, well(plan), cost)
        with pytest.raises(NoPlanError, match="experts of stage 0 TP rank 0 are not held by the survivors"):
            DISPATCHED.require_state(plan, well(plan, 5), cost)
        twice = LAZARUS(plan, well(plan), room_for(2, plan, cost))
        DISPATCHED.require_state(twice, well(plan, 5), room_for(2, plan, cost))

    def test_each_member_of_a_stage_has_its_part_of_an_expert(self) -> None:
        plan, cost = of(sizes(2, 1, 4, expert=4))
        DISPATCHED.require_state(replace(plan, expert_parallel=2), well(plan, 1), cost)
        with pytest.raises(NoPlanError, match="experts of stage 0 TP rank 1 are not held by the survivors"):
            DISPATCHED.require_state(plan, well(plan, 1), cost)

    def test_too_little_memory_is_told(self) -> None:
        plan, cost = of(sizes(1, 1, 8, expert=8))
        with pytest.raises(NoPlanError, match="memory is too small"):
            LAZARUS(plan, well(plan, 5), room_for(1, plan, cost))

    def test_it_plans_no_shared_sequences(self) -> None:
        plan, cost = of(sizes(1, 2, 8, context=4))
        with pytest.raises(NoPlanError, match="lazarus plans jobs that share experts, and no sequences"):
            LAZARUS(plan, well(plan, 5), cost)


def room_for(experts: int, plan: ParallelPlan, cost: JobCost) -> JobCost:
    """The job on devices with memory for so many of its 8 experts, and all else, in each of the eight replicas."""
    alone = replace(plan, expert_parallel=1)
    of_layer = 3 * 4096 * 14336 * 8 * 6
    layers = 4 // len(plan.replicas[0].stages)
    used = max(use.total for use in memory_of(alone, cost.model, cost.training).values())
    # The middle of the way to one more: fewer replicas have larger shares of the optimizer's state.
    memory = used - int((8 - experts - 0.5) / 8 * of_layer * layers)
    return replace(cost, device=replace(cost.device, memory=memory))
