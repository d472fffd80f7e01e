# SPDX-License-Identifier: Apache-2.0
"""What a job's planner makes of a strategy's plan before it is proposed."""

from contextlib import suppress
from dataclasses import replace

import pytest
from planner_instances import first_plan, healthy, job

from megatron_resihp.cost.host_sums import HostSums
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.memory import memory_of
from megatron_resihp.cost.room import check_change
from megatron_resihp.plan import Chunk, OwnSplit, ParallelPlan, PlanError, Replica, Schedule, shortened, spelled_out
from megatron_resihp.plan.layers import chunks_from
from megatron_resihp.planner import NoPlanError, bridge
from megatron_resihp.planner.bridge import plainly_ordered, propose, strategy_named
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.moves import bytes_to_move
from megatron_resihp.planner.strategies import joint as search
from megatron_resihp.planner.strategies.by_speed import by_speed
from megatron_resihp.planner.strategies.joint import joint
from megatron_resihp.planner.strategies.registry import STRATEGIES, Change
from megatron_resihp.protocol.planning import PlanFound

ZERO_BUBBLE = Schedule("zero-bubble-h1")


def test_one_stage_needs_no_special_order() -> None:
    whole, halves = (Chunk(0, 0, 6),), (Chunk(0, 0, 3), Chunk(1, 3, 6))
    alone = [Replica(((worker,),), (worker,), whole, ZERO_BUBBLE) for worker in range(2)]
    assert shortened(plainly_ordered(ParallelPlan(tuple(alone))), whole).not_uniform is None
    pipeline = Replica(((1,), (2,)), (1,), halves, ZERO_BUBBLE)
    plan = plainly_ordered(ParallelPlan((alone[0], pipeline)))
    assert [replica.schedule for replica in plan.replicas] == [None, ZERO_BUBBLE]


@pytest.mark.parametrize("splits", [True, False])
def test_layers_that_cannot_split_their_backward_get_no_zero_bubble(
    monkeypatch: pytest.MonkeyPatch, splits: bool
) -> None:
    asked: list[search.Settings] = []
    monkeypatch.setattr(search, "joint", lambda plan, health, cost, settings: asked.append(settings))
    cost = job()
    cost = replace(cost, training=replace(cost.training, splits_backward=splits))
    plan = first_plan(cost, 2, 2, 2)
    strategy_named("joint")(plan, healthy(plan), cost)
    assert [(each.zero_bubble, each.uneven) for each in asked] == [(splits, False)]


def test_where_replicas_share_joint_plans_by_speed_and_others_do_not_plan() -> None:
    assert strategy_named("joint", shares=True) is by_speed
    with pytest.raises(NoPlanError, match="recycle doesn't know of sequences or experts that replicas share"):
        strategy_named("recycle", shares=True)


IN_TURNS = chunks_from([3, 2, 2, 3], stages=2)
IN_PLACE = [name for name, each in STRATEGIES.items() if each.change is Change.IN_PLACE]


def interleaved_job() -> tuple[JobCost, ParallelPlan]:
    """Whose own layout is two chunks for each of two stages; two replicas of four micro-batches."""
    cost = job(layers=8, micro_batches=8)
    plan = first_plan(cost, tensor=1, replicas=2, pipeline=2)
    return cost, replace(plan, replicas=tuple(replace(each, chunks=()) for each in plan.replicas))


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_job_may_be_interleaved_itself(name: str) -> None:
    """Some strategies have no plan for some losses; all others give one that a job can run."""
    cost, plan = interleaved_job()
    for dead in ((3,), (1, 3)):
        with suppress(NoPlanError):
            proposal = propose(name, plan, IN_TURNS, healthy(plan, dead=dead), cost, lambda: 0.0)
            assert set(proposal.plan.working).isdisjoint(dead)
            assert proposal.plan.micro_batch_count == 8 and proposal.iteration_s > 0


def test_an_interleaved_job_is_expected_to_wait_less() -> None:
    cost, plan = interleaved_job()
    plain, turns = (spelled_out(plan, chunks) for chunks in (chunks_from([5, 5], stages=2), IN_TURNS))
    assert evaluate(turns, healthy(plan), cost).iteration_s < evaluate(plain, healthy(plan), cost).iteration_s


def test_no_recovery_puts_a_distributed_optimizer_together_where_the_host_lacks_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The job goes on in whole replicas of its own layout, whose parts stay parts."""
    cost = job(layers=8, micro_batches=4)
    before = first_plan(cost, tensor=1, replicas=2, pipeline=2)
    own = before.replicas[0].chunks
    cost = replace(cost, training=replace(cost.training, distributed_optimizer=True, shared_by=OwnSplit(own, 1)))
    others = (Chunk(0, 0, 3), Chunk(1, 3, cost.layers))
    after = ParallelPlan((replace(before.replicas[0], chunks=others, micro_batches=(0, 1, 2, 3)),))
    monkeypatch.setattr(bridge, "strategy_named", lambda name, shares: lambda plan, health, cost: after)

    def asked(host: int) -> ParallelPlan:
        known = replace(cost, device=replace(cost.device, host=host))
        return propose("any", before, own, healthy(before, dead=(1,)), known, lambda: 0.0).plan

    assert asked(0) == asked(1 << 40) == after, "0: nothing is known of the host"
    with pytest.raises(NoPlanError, match="host memory on worker"):
        asked(1 << 20)


class TestRoomOnTheWay:
    """Devices that the plan in force almost fills: old and new state are too much for them together."""

    def tight(self) -> tuple[JobCost, ParallelPlan]:
        cost = job(layers=8, micro_batches=4)
        plan = first_plan(cost, tensor=1, replicas=2, pipeline=2)
        most = max(use.total for use in memory_of(plan, cost.model, cost.training).values())
        return replace(cost, device=replace(cost.device, memory=most * 21 // 20)), plan

    def test_nobody_changes_by_choice_into_too_little_memory(self) -> None:
        cost, plan = self.tight()
        health = healthy(plan, slow={1: 0.3})
        assert joint(plan, health, cost) == plan
        with pytest.raises(NoPlanError, match="old and new state together take"):
            propose("resihp-paper", plan, plan.replicas[0].chunks, health, cost, lambda: 0.0)
        roomy = replace(cost, device=replace(cost.device, memory=10 * cost.device.memory))
        assert joint(plan, health, roomy) != plan

    def test_after_a_death_what_fits_once_it_runs_is_tried(self) -> None:
        cost, plan = self.tight()
        proposal = propose("joint", plan, plan.replicas[0].chunks, healthy(plan, dead=(3,)), cost, lambda: 1.5)
        with pytest.raises(PlanError):
            check_change(plan, proposal.plan, cost.model, cost.training, cost.device.memory)


def test_gains_are_shares_of_whole_iterations() -> None:
    """With as much time outside of the pipelines as in them, half as large."""
    cost = job(layers=8, micro_batches=4)
    plan = first_plan(cost, tensor=1, replicas=2, pipeline=2)

    def proposed(own_sums_s: float, rest_s: float) -> PlanFound:
        known = replace(cost, own_sums_s=own_sums_s, rest_s=rest_s)
        health = healthy(plan, slow={1: 0.3})
        return propose("joint", plan, plan.replicas[0].chunks, health, known, lambda: 0.0)

    alone = proposed(0.0, 0.0)
    assert alone.current_s
    half = alone.current_s / 2
    whole = proposed(half, half)
    assert whole.plan == alone.plan and whole.current_s
    assert 1 - whole.iteration_s / whole.current_s == pytest.approx((1 - alone.iteration_s / alone.current_s) / 2)
    assert whole.healthy_s == pytest.approx(alone.healthy_s + 2 * half)


def test_a_plan_that_sums_through_the_hosts_does_not_sum_in_megatrons_groups_too() -> None:
    cost = job(layers=8, micro_batches=4)
    plan = first_plan(cost, tensor=1, replicas=2, pipeline=2)
    own = plan.replicas[0].chunks
    cost = replace(cost, host_sums=HostSums(own, 1e9), own_sums_s=0.5, rest_s=0.25)
    others = (Chunk(0, 0, 3), Chunk(1, 3, cost.layers))
    unlike = replace(plan, replicas=tuple(replace(each, chunks=others) for each in plan.replicas))
    assert cost.sums(unlike) > 0 == cost.sums(plan)
    assert (cost.outside(plan), cost.outside(unlike)) == (0.75, 0.25)


def test_sending_state_is_a_part_of_the_change() -> None:
    cost = job(layers=8, micro_batches=4)
    plan = first_plan(cost, tensor=1, replicas=2, pipeline=2)
    proposal = propose("joint", plan, plan.replicas[0].chunks, healthy(plan, dead=(3,)), cost, lambda: 0.0)
    lacking = max(bytes_to_move(plan, proposal.plan, cost).values())
    assert proposal.sending_s == pytest.approx(lacking / cost.device.bandwidth)
    assert proposal.moving_s == pytest.approx(cost.rebuild_s + proposal.sending_s)
