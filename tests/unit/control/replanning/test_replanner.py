# SPDX-License-Identifier: Apache-2.0
"""The thread beside the coordinator that has plans made."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up_events import made_up

from megatron_resihp.control.coordination.actions import Log
from megatron_resihp.control.coordination.state_machine.membership import Membership
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.replanning.by_choice.proposals import PROPOSALS
from megatron_resihp.control.replanning.by_choice.replanner import Replanner
from megatron_resihp.control.replanning.processes import planners
from megatron_resihp.control.replanning.recovery.inventory import Survivors
from megatron_resihp.events import replanning as policy_events
from megatron_resihp.events.bus import EventBus
from megatron_resihp.events.event import Event, stamped
from megatron_resihp.events.replanning import Planned
from megatron_resihp.plan import Chunk, ParallelPlan, Replica, spelled_out
from megatron_resihp.planner import JobShape
from megatron_resihp.protocol.job import JobDescription
from megatron_resihp.protocol.messages import JobStarted, ModelBuilt, PlanRequest, ProcessExited, Ready, SurvivorReport
from megatron_resihp.protocol.planning import NoPlan, PlanFound, PlannerAnswer, PlannerRequest
from megatron_resihp.protocol.records import IterationPhase, Outcome, Record

PLAN = ParallelPlan((Replica(((0,),), (0, 1)), Replica(((1,),), (2, 3))))
NEXT = ParallelPlan((Replica(((0,), (1,)), (0, 1, 2, 3), (Chunk(0, 0, 1), Chunk(1, 1, 4))),))
WAIT_S = 30.0
OWN = (Chunk(0, 0, 4),)
SHAPE = JobShape(tensor_parallel=1, pipeline_parallel=1, micro_batches=4, workers_per_node=4)
SIZES: dict[str, Any] = {
    "tensor_parallel": 1, "pipeline_parallel": 1, "micro_batches": 4, "chunks": ((0, 0, 4),), "pipeline_last": True,
    "strategy": "joint", "train_iters": 100, "seq_length": 8, "sequence_parallel": False,
}  # fmt: skip
Answer = Callable[[PlannerRequest], PlannerAnswer]


def verdict(*workers: int) -> Event:
    return made_up("verdict", kind="compute", change="onset", workers=workers, speed=0.5, since=2, iteration=4)


def found(plan: ParallelPlan, iteration_s: float = 1.0) -> PlanFound:
    return PlanFound(
        plan, 0.1, iteration_s, current_s=1.0, healthy_s=1.0, moving_s=0.0, sending_s=0.0, bound_s=iteration_s
    )


def test_verdicts_that_come_together_lead_to_one_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one comes while a plan is made for the first."""
    orders: queue.Queue[PlanRequest] = queue.Queue()
    asked: list[dict[int, float]] = []

    class Planner:
        def __init__(self, low_priority: bool = False) -> None:
            pass

        def start(self) -> None:
            pass

        def ask(self, request: PlannerRequest, timeout_s: float) -> PlannerAnswer:
            asked.append(request.speeds)
            if len(asked) == 1:
                bus.publish(verdict(1))
            return found(NEXT, iteration_s=0.5)

        def rehearse(self, *requests: PlannerRequest) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(planners, "PlannerProcess", Planner)
    bus = EventBus()
    desk = Replanner(tmp_path, JobSize(1, 2), bus, orders.put)
    bus.publish(made_up("job", **SIZES, act="act", seconds_between_changes=0.0))
    bus.publish(made_up("epoch_started", epoch=0, plan=PLAN.to_dict()))
    bus.publish(made_up("iteration", iteration=3, duration_s=1.0))
    bus.publish(verdict(0))
    order = orders.get(timeout=30.0)
    desk.close(30.0)
    assert asked == [{0: 0.5, 1: 1.0}, {0: 0.5, 1: 0.5}]
    assert order.plan == NEXT.to_dict() and "worker 1 at 0.50" in order.why
    assert orders.empty()


def replicas(*workers: int) -> ParallelPlan:
    """One of each, of a job of four micro-batches."""
    return ParallelPlan(tuple(Replica(((w,),), share) for w, share in zip(workers, deal_even(workers), strict=True)))


def deal_even(workers: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(range(number, 4, len(workers))) for number in range(len(workers))]


def replicas_of_the_living(request: PlannerRequest) -> PlannerAnswer:
    return found(replicas(*request.speeds))


class Desk:
    """A replanner of a job of four workers on a node, whose planners are made up.

    Attributes:
        asked: what the planner for recoveries was asked.
        asked_ahead: the same of the other one, which has a low priority.
        rehearsed: what the former has practised, first of all nothing.
        answer, answer_ahead: what they say.
        orders: to the coordinator.
    """

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run_dir = run_dir
        self.asked: queue.Queue[PlannerRequest] = queue.Queue()
        self.asked_ahead: queue.Queue[PlannerRequest] = queue.Queue()
        self.rehearsed: queue.Queue[Sequence[PlannerRequest]] = queue.Queue()
        self.answer: Answer = replicas_of_the_living
        self.answer_ahead: Answer = replicas_of_the_living
        desk = self

        class Planner:
            def __init__(self, low_priority: bool = False) -> None:
                self._ahead = low_priority

            def start(self) -> None:
                if not self._ahead:
                    desk.rehearsed.put(())

            def ask(self, request: PlannerRequest, timeout_s: float) -> PlannerAnswer:
                (desk.asked_ahead if self._ahead else desk.asked).put(request)
                return (desk.answer_ahead if self._ahead else desk.answer)(request)

            def rehearse(self, *requests: PlannerRequest) -> None:
                if not self._ahead:
                    desk.rehearsed.put(requests)

            def close(self) -> None:
                pass

        monkeypatch.setattr(planners, "PlannerProcess", Planner)
        self.events: queue.Queue[Event] = queue.Queue()
        self.bus = EventBus()
        self.bus.subscribe(self.events.put, policy_events.NoPlan, policy_events.PolicyFailed)
        self.orders: queue.Queue[PlanRequest] = queue.Queue()
        self.replanner = Replanner(run_dir, JobSize(1, 4), self.bus, self.orders.put)

    def note(self, event: str, **fields: Any) -> None:
        self.bus.publish(made_up(event, epoch=0, **fields))

    def train(self, plan: ParallelPlan, **job: Any) -> None:
        """Tell of a job that has made a step."""
        self.note("job", **{**SIZES, **job})
        self.note("epoch_started", plan=plan.to_dict())
        self.note("iteration", iteration=1, duration_s=1.0)

    def speeds_ahead(self, number: int) -> list[dict[int, float]]:
        """Of whom plans were asked by choice or ahead, once there are so many questions."""
        return [self.asked_ahead.get(timeout=WAIT_S).speeds for _ in range(number)]

    def recover(self, running: ParallelPlan, *living: int, **job: Any) -> tuple[ParallelPlan, dict[str, Any]]:
        """The next plan of these workers, and what the event log gets of it."""
        full = spelled_out(running, OWN)
        held = {worker: full.shards_of(worker) for worker in living}
        told = JobDescription(**{**SIZES, "chunks": OWN, **job})
        plan, [planned] = self.replanner.next_plan(Survivors(SHAPE, OWN, held, running, running, told, None, 4))
        return plan, planned


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    found = Desk(tmp_path, monkeypatch)
    yield found
    found.replanner.close(WAIT_S)
    assert found.events.empty(), "it has given up"


def without(*lost: int) -> dict[int, float]:
    return {worker: 1.0 for worker in range(4) if worker not in lost}


def test_a_proposal_that_cant_be_written_is_told_nevertheless(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk, perhaps. Later plans are made."""
    told: queue.Queue[Event] = queue.Queue()
    desk.bus.subscribe(told.put, policy_events.WouldChange)
    (desk.run_dir / PROPOSALS).write_text("not a directory")
    desk.answer_ahead = desk.answer = lambda request: found(NEXT, iteration_s=0.5)
    desk.train(PLAN, act="ask", seconds_between_changes=0.0)
    desk.bus.publish(verdict(0))
    assert told.get(timeout=WAIT_S).plan == NEXT.to_dict()  # type: ignore[attr-defined]
    assert "a proposal can't be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "shared",
    [
        {}, {"expert_parallel": 2, "experts": 4, "equal_rounds": "they run in turns"},
        {"expert_parallel": 4, "experts": 4, "expert_copies": True},
        {"expert_parallel": 4, "experts": 4, "distributed_optimizer": True},
    ],
    ids=["no experts", "experts of two each", "experts of one each, copied", "experts in parts of an optimizer"],
)  # fmt: skip
def test_a_coordinators_question_was_asked_ahead(desk: Desk, shared: dict[str, Any]) -> None:
    """From the job's first message to the death of one of its workers."""
    membership = Membership(JobSize(1, 4), next_plan=desk.replanner.next_plan)
    told: list[Event] = []

    def tell(message: Any) -> None:
        for action in membership.handle(message, 0.0):
            if isinstance(action, Log):
                told.append(stamped(action.event, 0.0, membership.state.epoch))
                desk.bus.publish(told[-1])

    tell(JobStarted(0, JobDescription(**{**SIZES, "chunks": OWN, **shared})))
    assert membership.state.plan is not None
    held = spelled_out(membership.state.plan, OWN)
    tell(ModelBuilt(0, {"num_layers": 2}))
    for worker in range(4):
        tell(Ready(worker, 0, {"0/0": "same"}, (), 0, 0))
    desk.note("iteration", iteration=1, duration_s=1.0)
    assert desk.speeds_ahead(4) == [without(0), without(1), without(2), without(3)]
    tell(ProcessExited(1, -9, 0.0))
    outcomes, counters = {0: Outcome(0, 1.5, ((8.0, 4.0),), ("lm loss",))}, {0: {"iteration": 0}, 1: {"iteration": 1}}
    for worker in (3, 2, 0):
        record = Record(1, IterationPhase.COMPUTE, True, outcomes, counters)
        tell(SurvivorReport(worker, 0, record, held.shards_of(worker)))
    [planned] = [event for event in told if isinstance(event, Planned)]
    assert planned.made_ahead and planned.planning_s == 0.1
    assert desk.asked.empty()
    assert membership.state.plan is not None and membership.state.plan.working == (0, 2, 3)


@pytest.mark.parametrize(("shared", "sharers"), [({}, 1), ({"sharings": [[1, 2, 0], [1, 1, 0]]}, 2)])
def test_the_planner_of_recoveries_has_practised_this_jobs_plans_before_the_first_iteration(
    desk: Desk, shared: dict[str, Any], sharers: int
) -> None:
    desk.note("job", **SIZES, **shared)
    assert desk.rehearsed.get(timeout=WAIT_S) == (), "libraries are loaded while the workers start"
    desk.note("model", arguments={"num_layers": 4})
    slow, dead = desk.rehearsed.get(timeout=WAIT_S)
    assert slow.plan.expert_parallel == sharers
    assert slow.speeds == without() | {0: 0.7} and dead.speeds == without(3)
    for request in (slow, dead):
        assert request.plan.working == (0, 1, 2, 3)
        assert request.strategy == "joint" and request.job.arguments == {"num_layers": 4}


def test_no_planner_is_started_for_uniform_plans(desk: Desk) -> None:
    desk.note("job", **SIZES | {"strategy": "uniform"})
    desk.note("model", arguments={"num_layers": 4})
    desk.replanner.close(WAIT_S)
    assert desk.rehearsed.empty()


def test_who_has_come_back_is_known_by_its_place(desk: Desk) -> None:
    plan = replicas(0, 5, 2, 3)
    desk.train(plan)
    assert sorted(map(sorted, desk.speeds_ahead(4))) == [sorted(without(lost)) for lost in (3, 2, 1, 0)]
    found, planned = desk.recover(plan, 2, 3, 5)
    assert planned.made_ahead and sorted(found.working) == [2, 3, 5]


def test_a_slow_link_of_who_has_come_back_is_known_by_its_places(desk: Desk) -> None:
    """Worker 6 has the place of worker 2: the smaller id, 3, is the end with the larger place."""
    plan = replicas(0, 1, 6, 3)
    desk.bus.publish(replace(verdict(3, 6), kind="link"))
    desk.recover(plan, 1, 3, 6)
    assert desk.asked.get_nowait().links == ((2, 3, 0.5),)


def test_workers_that_come_together_are_taken_in_together(desk: Desk) -> None:
    """The second one comes while a plan is made for the first."""

    def answer_ahead(request: PlannerRequest) -> PlannerAnswer:
        if request.speeds.keys() == {0, 1, 2}:
            desk.note("worker_waiting", waiting=3)
        return replicas_of_the_living(request)

    desk.answer_ahead = answer_ahead
    desk.train(replicas(0, 1))
    desk.note("worker_waiting", waiting=2)
    order = desk.orders.get(timeout=WAIT_S)
    assert ParallelPlan.from_dict(order.plan).working == (0, 1, 2, 3) and "workers 2, 3" in order.why
    desk.replanner.close(WAIT_S)
    assert desk.orders.empty()


def test_who_joins_where_the_strategy_has_no_plan_is_left_to_the_coordinator(desk: Desk) -> None:
    """It can't tell what such a model costs, say. Complete replicas need no more than sizes."""
    desk.answer_ahead = lambda request: NoPlan("its costs are not known")
    desk.train(replicas(0, 1))
    desk.note("worker_waiting", waiting=2)
    order = desk.orders.get(timeout=WAIT_S)
    assert (order.plan, order.patient) == (None, True) and "worker 2" in order.why
    told = desk.events.get(timeout=WAIT_S)
    assert isinstance(told, policy_events.NoPlan) and told.reason == "its costs are not known"


@pytest.mark.parametrize(("name", "of"), [("workers_left", {}), ("node_left", {"node": 1})])
def test_who_was_told_to_leave_keeps_no_other_from_joining(desk: Desk, name: str, of: dict[str, Any]) -> None:
    """A worker that waits can be told so, too: it never dies."""
    desk.answer_ahead = lambda request: NoPlan("") if 3 not in request.speeds else replicas_of_the_living(request)
    desk.train(replicas(0, 1))
    desk.note("worker_waiting", waiting=2)
    desk.note(name, left=[2], **of)
    desk.note("worker_waiting", waiting=3)
    order = desk.orders.get(timeout=WAIT_S)
    assert ParallelPlan.from_dict(order.plan).working == (0, 1, 3)
    desk.replanner.close(WAIT_S)


def test_who_is_left_of_those_that_came_is_taken_in(desk: Desk) -> None:
    """The other one dies during the search, and nothing else happens."""

    def answer_ahead(request: PlannerRequest) -> PlannerAnswer:
        if {2, 3} <= request.speeds.keys():
            desk.note("worker_dead", dead=3)
        return replicas_of_the_living(request)

    desk.answer_ahead = answer_ahead
    desk.train(replicas(0, 1))
    desk.note("worker_waiting", waiting=2)
    desk.note("worker_waiting", waiting=3)
    order = desk.orders.get(timeout=WAIT_S)
    assert ParallelPlan.from_dict(order.plan).working == (0, 1, 2)
    desk.replanner.close(WAIT_S)
    assert desk.orders.empty()


def test_who_is_slow_by_now_is_asked_about_anew(desk: Desk) -> None:
    plan, said = replicas(0, 1, 2, 3), threading.Event()

    def answer_ahead(request: PlannerRequest) -> PlannerAnswer:
        if 0.5 in request.speeds.values():
            assert said.wait(WAIT_S)
        return replicas_of_the_living(request)

    desk.answer_ahead = answer_ahead
    desk.train(plan)
    desk.speeds_ahead(4)
    desk.bus.publish(verdict(2))
    found, planned = desk.recover(plan, 1, 2, 3)
    said.set()
    assert not planned.made_ahead and found.working == (1, 2, 3)
    assert desk.asked.get_nowait().speeds == {1: 1.0, 2: 0.5, 3: 1.0}


def test_where_there_was_no_plan_another_one_is_asked_for(desk: Desk) -> None:
    plan = replicas(0, 1, 2, 3)
    desk.answer_ahead = lambda request: NoPlan("too little memory")
    desk.train(plan)
    desk.speeds_ahead(4)
    _, planned = desk.recover(plan, 1, 2, 3)
    assert planned.strategy == "joint" and not planned.made_ahead
    assert desk.asked.get_nowait().speeds == without(0)


def test_news_is_followed_before_the_next_loss(desk: Desk) -> None:
    """A verdict comes during the first search; the policy's question comes next, then all losses with the new speed."""
    noted = iter([verdict(3)])

    def answer_ahead(request: PlannerRequest) -> PlannerAnswer:
        for event in noted:
            desk.bus.publish(event)
        return replicas_of_the_living(request)

    desk.answer_ahead = answer_ahead
    desk.train(replicas(0, 1, 2, 3))
    slow = {3: 0.5}
    first, *others = desk.speeds_ahead(6)
    assert first == without(0)
    assert others == [without() | slow, without(0) | slow, without(1) | slow, without(2) | slow, without(3)]


def test_a_planner_that_has_ended_is_left_alone_until_the_next_plan(desk: Desk) -> None:
    desk.answer_ahead = lambda request: NoPlan("no plan within 600 s", unanswered=True)
    desk.train(replicas(0, 1, 2, 3))
    assert desk.speeds_ahead(1) == [without(0)]
    told = desk.events.get(timeout=WAIT_S)
    assert isinstance(told, policy_events.NoPlan) and "made ahead" in told.reason
    desk.bus.publish(verdict(3))
    assert desk.speeds_ahead(1) == [without() | {3: 0.5}], "the policy asks"
    desk.events.get(timeout=WAIT_S)  # it has no plan
    desk.answer_ahead = replicas_of_the_living
    desk.train(replicas(0, 1, 2))
    assert desk.speeds_ahead(1)[0].keys() == {1, 2}, "what is planned for is the loss of worker 0"
    desk.replanner.close(WAIT_S)


def test_nothing_is_said_of_a_plan_that_the_jobs_end_cuts_off(desk: Desk) -> None:
    asked, ended = threading.Event(), threading.Event()

    def answer_ahead(request: PlannerRequest) -> PlannerAnswer:
        asked.set()
        assert ended.wait(WAIT_S)
        return NoPlan("the job is ending", unanswered=True)

    desk.answer_ahead = answer_ahead
    desk.train(replicas(0, 1, 2, 3))
    assert asked.wait(WAIT_S)
    desk.replanner.close(0.0)
    ended.set()
    desk.replanner.close(WAIT_S)
    assert desk.events.empty()


def test_nothing_is_made_ahead_for_uniform_plans(desk: Desk) -> None:
    desk.train(replicas(0, 1, 2, 3), strategy="uniform")
    desk.bus.publish(verdict(3))
    assert desk.speeds_ahead(1) == [without() | {3: 0.5}], "what a strategy would make of it"
    desk.replanner.close(WAIT_S)
    assert desk.asked_ahead.empty()
