# SPDX-License-Identifier: Apache-2.0
"""Which losses are planned for before they happen, and when what was answered is still an answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from made_up_events import made_up

from megatron_resihp.control.replanning import precomputed
from megatron_resihp.control.replanning.precomputed import PrecomputedPlans, likely_losses
from megatron_resihp.events.event import Event
from megatron_resihp.plan import Chunk, Coordinate, ParallelPlan, Replica
from megatron_resihp.protocol.planning import KnownJob, NoPlan, PlanFound, PlannerRequest

OWN = (Chunk(0, 0, 4),)
STAGES = (Chunk(0, 0, 2), Chunk(1, 2, 4))
PLAN = ParallelPlan(tuple(Replica(((worker,),), (worker,)) for worker in range(4)))
JOB = made_up("job", strategy="joint", chunks=((0, 0, 4),))
STARTED = made_up("epoch_started", epoch=3, plan=PLAN.to_dict())
ITERATION = made_up("iteration", epoch=3)
VERDICT = made_up("verdict")
LOADS = made_up("expert_loads")
ALONE = [{0}, {1}, {2}, {3}]


def request(worker: int = 0, **changed: Any) -> PlannerRequest:
    alive = {each: 1.0 for each in range(4) if each != worker}
    return replace(PlannerRequest("joint", KnownJob(1, 4), OWN, 4, 2, PLAN, alive), **changed)


def found_after(seconds: float) -> PlanFound:
    """An answer that is unlike others."""
    return PlanFound(
        PLAN, seconds, iteration_s=1.0, current_s=None, healthy_s=1.0, moving_s=1.0, sending_s=0.0, bound_s=1.0
    )


def told(*events: Event, learned: float | None = None) -> PrecomputedPlans:
    found = PrecomputedPlans(4, 2)
    for event in events:
        found.note(event, learned)
    return found


def asked(found: PrecomputedPlans) -> list[set[int]]:
    return [set(lost) for lost in iter(found.next_loss, None)]


class TestLosses:
    def test_each_worker_and_then_each_node(self) -> None:
        assert list(likely_losses(PLAN, OWN, 4, 2)) == [*ALONE, {0, 1}, {2, 3}]

    def test_a_node_that_is_all_there_is_leaves_nobody(self) -> None:
        assert list(likely_losses(PLAN, OWN, 4, 4)) == ALONE

    def test_a_node_of_one_is_asked_about_once(self) -> None:
        assert list(likely_losses(PLAN, OWN, 4, 1)) == ALONE

    def test_who_came_back_is_on_its_places_node(self) -> None:
        plan = ParallelPlan(tuple(Replica(((worker,),), (n,)) for n, worker in enumerate((0, 5, 2, 3))))
        assert list(likely_losses(plan, OWN, 4, 2))[4:] == [{0, 5}, {2, 3}]

    def test_a_standby_works_for_nobody_and_dies_with_its_node(self) -> None:
        replicas = tuple(Replica(((worker,),), (worker,)) for worker in range(3))
        plan = ParallelPlan(replicas, {3: Coordinate(0, 0)})
        assert list(likely_losses(plan, OWN, 4, 2)) == [*ALONE[:3], {0, 1}, {2, 3}]

    def test_a_loss_of_state_is_not_planned_for(self) -> None:
        """Each node has one stage of both replicas."""
        plan = ParallelPlan((Replica(((0,), (2,)), (0,)), Replica(((1,), (3,)), (1,))))
        assert sorted(map(sorted, likely_losses(plan, STAGES, 4, 2))) == [[0], [1], [2], [3]]

    @pytest.mark.parametrize("kept", [{"copies_experts": True}, {"distributed": True}])
    def test_experts_that_one_worker_has_outlive_it_as_copies(self, kept: dict[str, bool]) -> None:
        """Neighbours in the ring of copies are on different nodes, and a node is half of it."""
        plan = replace(PLAN, expert_parallel=4)
        assert not list(likely_losses(plan, OWN, 4, 2))
        assert list(likely_losses(plan, OWN, 4, 2, **kept)) == [*ALONE, {0, 1}, {2, 3}]

    @pytest.mark.parametrize("kept", [{"copies_experts": True}, {"distributed": True}])
    def test_a_loss_of_experts_and_their_copies_is_not_planned_for(self, kept: dict[str, bool]) -> None:
        """Of three workers, two are on one node. One of these has a copy of the other's experts."""
        plan = ParallelPlan(tuple(Replica(((worker,),), (worker,)) for worker in range(3)), expert_parallel=3)
        assert list(likely_losses(plan, OWN, 4, 2, **kept)) == [{0}, {1}, {2}]

    def test_parts_of_an_optimizer_that_die_with_their_copies_are_not_planned_for(self) -> None:
        """Neighbours are on one node, which has a part and its copy. All layers are left."""
        assert list(likely_losses(PLAN, OWN, 4, 2, distributed=True)) == ALONE


class TestWhen:
    def test_the_job_trains(self) -> None:
        found = told(JOB, STARTED)
        assert not asked(found)
        found.note(replace(ITERATION, epoch=2), None)
        assert not asked(found), "an iteration of the plan before"
        found.note(ITERATION, None)
        assert asked(found)[:4] == ALONE
        found.note(ITERATION, None)
        assert not asked(found), "all is said"

    @pytest.mark.parametrize("changed", [{"strategy": "uniform"}, {"strategy": None}])
    def test_not_for_uniform_plans(self, changed: dict[str, Any]) -> None:
        assert not asked(told(replace(JOB, **changed), STARTED, ITERATION, VERDICT))

    @pytest.mark.parametrize("kept", [False, True])
    def test_experts_of_one_worker_each_have_copies_in_this_epoch(self, kept: bool) -> None:
        """A worker with too little memory keeps none, and then nobody does."""
        shared = replace(STARTED, plan=replace(PLAN, expert_parallel=4).to_dict(), copies_experts=kept)
        assert asked(told(JOB, shared, ITERATION))[:4] == (ALONE if kept else [])

    @pytest.mark.parametrize("kind", ["epoch_broken", "plan_change"])
    def test_not_while_another_plan_is_on_its_way(self, kind: str) -> None:
        found = told(JOB, STARTED, ITERATION, made_up(kind))
        assert not asked(found)
        found.note(VERDICT, None)
        found.note(ITERATION, 1.0)
        assert not asked(found), "iterations may be told late"
        found.note(replace(STARTED, epoch=4), None)
        found.note(replace(ITERATION, epoch=4), None)
        assert asked(found)

    def test_again_when_somebody_is_slow(self) -> None:
        found = told(JOB, STARTED, ITERATION)
        assert asked(found)
        found.note(VERDICT, None)
        assert asked(found)

    def test_again_when_costs_are_learned(self) -> None:
        """What was answered before is still a plan."""
        found = told(JOB, STARTED, ITERATION)
        assert asked(found)
        found.keep(request(), found_after(0.0))
        found.note(ITERATION, 1.0)
        assert asked(found) and found.answer(request()) == found_after(0.0)
        found.note(ITERATION, 1.0)
        assert not asked(found)

    def test_again_when_experts_are_used_otherwise(self) -> None:
        found = told(JOB, STARTED)
        found.note(LOADS, None)
        assert not asked(found), "before the job trains"
        found.note(ITERATION, None)
        asked(found)
        found.note(LOADS, None)
        assert asked(found)[:4] == ALONE

    def test_no_more_about_a_plan_once_given_up(self) -> None:
        found = told(JOB, STARTED, ITERATION)
        found.give_up()
        for event in (VERDICT, ITERATION, VERDICT):
            found.note(event, 1.0)
            assert not asked(found)
        found.note(STARTED, 1.0)
        found.note(ITERATION, 1.0)
        assert asked(found)

    def test_no_more_than_so_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(precomputed, "MOST_SEARCHES", 3)
        assert asked(told(JOB, STARTED, ITERATION)) == ALONE[:3]


class TestAnswers:
    @pytest.mark.parametrize(
        "changed",
        [
            {"strategy": "malleus"}, {"job": KnownJob(2, 4)}, {"workers": 8}, {"workers_per_node": 4},
            {"plan": replace(PLAN, replicas=PLAN.replicas[::-1])}, {"own": STAGES}, {"links": ((1, 2, 0.5),)},
            {"speeds": {1: 1.0, 2: 1.0, 3: 0.9}}, {"speeds": {1: 1.0, 2: 1.0}},
        ],
    )  # fmt: skip
    def test_to_the_very_same_question(self, changed: dict[str, Any]) -> None:
        found = told(JOB, STARTED, ITERATION)
        found.keep(request(), found_after(0.0))
        found.keep(request(1), found_after(1.0))
        assert found.answer(request()) == found_after(0.0)
        assert found.answer(request(**changed)) is None

    def test_wherever_costs_are_and_in_whatever_order_workers(self) -> None:
        found = told(JOB, STARTED, ITERATION)
        found.keep(request(), found_after(0.0))
        same = request(speeds={3: 1.0, 2: 1.0, 1: 1.0}, cost_model="elsewhere")
        assert found.answer(same) == found_after(0.0)

    def test_having_no_plan_is_none(self) -> None:
        found = told(JOB, STARTED, ITERATION)
        found.keep(request(), NoPlan("too little memory"))
        assert found.answer(request()) is None

    def test_a_recovery_finds_what_was_answered_before(self) -> None:
        found = told(JOB, STARTED, ITERATION)
        found.keep(request(), found_after(0.0))
        found.note(made_up("epoch_broken"), None)
        assert found.answer(request()) == found_after(0.0)

    @pytest.mark.parametrize("event", [VERDICT, STARTED])
    def test_what_was_said_of_another_situation_is_forgotten(self, event: dict[str, Any]) -> None:
        found = told(JOB, STARTED, ITERATION)
        found.keep(request(), found_after(0.0))
        found.note(event, None)
        assert found.answer(request()) is None
