# SPDX-License-Identifier: Apache-2.0
"""When a plan is changed by choice: slowness that lasts is acted on, what passes by itself or doesn't pay is not."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from made_up_events import made_up

from megatron_resihp.control.replanning.by_choice.policy import Action, AskPlanner, Policy, Recommend, Settings
from megatron_resihp.control.replanning.by_choice.trial import Outcome
from megatron_resihp.control.replanning.health import Speeds
from megatron_resihp.events.detection import Verdict
from megatron_resihp.plan import ParallelPlan, Replica
from megatron_resihp.protocol.planning import NoPlan, PlanFound, PlannerAnswer

PLAN = ParallelPlan((Replica(((0,), (2,)), (0, 2)), Replica(((1,), (3,)), (1, 3))))
OTHER = ParallelPlan((Replica(((0,), (2,)), (0, 2, 3)), Replica(((1,), (3,)), (1,))))
NEXT = ParallelPlan((Replica(((0,), (2,)), (0, 1, 2)), Replica(((1,), (3,)), (3,))))
ITERATION_S = 2.0


def found(iteration_s: float, current_s: float | None, sending_s: float = 0.0) -> PlanFound:
    return PlanFound(NEXT, 0.1, iteration_s, current_s, 2.0, 5.0 + sending_s, sending_s, bound_s=iteration_s)


class Run:
    """A job in which every iteration takes two seconds; changes cost five, and save a quarter where there is a gain."""

    def __init__(self, train_iters: int = 1000, **settings: Any) -> None:
        self.speeds = Speeds()
        self.policy = Policy(Settings(**{"act": "act", "seconds_between_changes": 60.0, **settings}), self.speeds)
        self.now, self.iteration = 1000.0, 10
        self.tell("job", train_iters=train_iters)
        self.began = self.tell("epoch_started", plan=PLAN.to_dict(), epoch=0)

    def tell(self, name: str, **fields: Any) -> list[Action]:
        event = made_up(name, **fields)
        if isinstance(event, Verdict):
            self.speeds.note(event)
        return self.policy.note(event, self.now)

    def verdict(self, change: str = "onset", speed: float = 0.5, late: int = 0) -> AskPlanner:
        """Worker 3's speed changed, which is known so many iterations later."""
        since = self.iteration + 1
        self.train(late)
        fields = {"kind": "compute", "change": change, "workers": [3], "speed": speed}
        [asked] = self.tell("verdict", since=since, iteration=self.iteration, **fields)
        assert isinstance(asked, AskPlanner)
        return asked

    def answer(self, asked: AskPlanner, gain: float = 0.25, sending_s: float = 0.0) -> list[Action]:
        return self.policy.answered(asked.number, found(2.0 * (1 - gain), 2.0, sending_s), self.now)

    def train(self, iterations: int, seconds: float = ITERATION_S) -> list[Action]:
        found: list[Action] = []
        for _ in range(iterations):
            self.now += seconds
            self.iteration += 1
            found += self.tell("iteration", iteration=self.iteration, duration_s=seconds)
        return found


def test_each_verdict_is_a_reason_to_ask_the_planner() -> None:
    run = Run()
    asked = run.verdict(speed=0.4)
    [again] = run.tell("verdict", kind="link", change="onset", workers=[2, 0], speed=0.3, since=11, iteration=11)
    assert isinstance(again, AskPlanner) and again.plan == asked.plan == PLAN and again.number > asked.number


def test_a_change_is_made_once_what_it_would_have_saved_is_what_it_costs() -> None:
    """Each iteration loses half a second; after ten, five seconds are lost."""
    run = Run()
    asked = run.verdict(late=3)
    assert not run.answer(asked)
    assert not run.train(6)
    [found] = run.train(1)
    assert isinstance(found, Recommend)
    assert (found.plan, found.act) == (NEXT, "act")
    assert (found.gain, found.lost_s, found.cost_s) == (pytest.approx(0.25), pytest.approx(5.0), 5.0)
    assert "worker 3 at 0.50" in found.why and "25 % shorter" in found.why
    assert not run.train(100), "said once"


def test_an_evaluation_or_a_save_is_no_time_lost_by_a_slow_worker() -> None:
    """The next iteration seems to take two minutes. Of that, no more than three iterations can be the worker's."""
    run = Run()
    run.train(5)
    run.answer(run.verdict())
    assert not run.train(1, seconds=120.0) and not run.train(6)
    [found] = run.train(1)
    assert isinstance(found, Recommend) and found.lost_s == pytest.approx(3 * 0.5 + 7 * 0.5)


def test_nor_does_it_tell_how_long_iterations_are() -> None:
    run = Run()
    run.train(5)
    asked = run.verdict()
    run.train(1, seconds=120.0)
    assert not run.answer(asked) and not run.train(8)
    [found] = run.train(1)
    assert isinstance(found, Recommend) and found.lost_s == pytest.approx(10 * 0.5)


def test_slowness_that_passes_is_waited_out() -> None:
    run = Run()
    run.answer(run.verdict())
    assert not run.train(8)
    asked = run.verdict("recovery", 1.0)
    assert not run.answer(asked, gain=0.0) and not run.train(50)


def test_what_can_not_pay_any_more_is_left() -> None:
    """Of 30 iterations ten pass until it would be done; the rest saves less than a change costs."""
    run = Run(train_iters=28)
    run.answer(run.verdict())
    assert not run.train(18)


def test_a_gain_within_the_error_of_planning_is_none() -> None:
    run = Run()
    assert not run.answer(run.verdict(), gain=0.005) and not run.train(900)


def test_an_answer_that_is_too_old() -> None:
    run = Run()
    old = run.verdict(speed=0.9)
    new = run.verdict("severity", speed=0.5)
    assert not run.answer(old) and not run.train(50)
    [found] = run.answer(new)
    assert isinstance(found, Recommend) and found.lost_s == pytest.approx(25.0), "since the verdict's first iteration"


def severity(run: Run, speed: float) -> list[Action]:
    """Worker 3 is slow still, but not as slow as before."""
    told = {"kind": "compute", "change": "severity", "workers": [3], "speed": speed}
    return run.tell("verdict", since=run.iteration, **told)


def test_verdicts_that_come_faster_than_plans_keep_nobody_from_planning() -> None:
    """A verdict each iteration, and ten iterations for a plan."""
    run = Run()
    asked, searches = run.verdict(speed=0.6), 1
    for number in range(30):
        actions = [*severity(run, (0.7, 0.6)[number % 2]), *run.train(1)]
        if number % 10 == 9:
            actions += run.answer(asked)
        for action in actions:
            if isinstance(action, Recommend):
                assert searches == 1
                return
            assert isinstance(action, AskPlanner)
            asked, searches = action, searches + 1
    raise AssertionError("never")


def test_what_was_heard_during_a_search_is_asked_about_next() -> None:
    """The search found nothing better for a worker that was hardly slow. By now it may."""
    run = Run()
    asked = run.verdict(speed=0.97)
    assert not severity(run, 0.9)
    [again] = run.answer(asked, gain=0.0)
    assert isinstance(again, AskPlanner) and not run.answer(again) and len(run.train(10)) == 1


def test_a_better_plan_is_not_given_up_for_a_search_for_a_better_one() -> None:
    run = Run()
    run.answer(run.verdict(speed=0.6))
    run.train(5)
    [asked] = severity(run, 0.55)
    [found] = run.train(5)
    assert isinstance(asked, AskPlanner) and isinstance(found, Recommend)


def test_but_it_is_where_a_speed_is_quite_different() -> None:
    run = Run()
    run.answer(run.verdict(speed=0.6))
    run.train(5)
    assert severity(run, 0.3) and not run.train(100)


def test_a_plan_for_another_epoch_is_worth_nothing() -> None:
    run = Run()
    run.answer(run.verdict())
    run.tell("epoch_started", plan=PLAN.to_dict(), epoch=1)
    assert not run.train(100)


def test_a_verdict_while_a_change_is_under_way_is_not_forgotten() -> None:
    """What is found for it then is a change of the plan that is being left."""
    run = Run(seconds_between_changes=0.0)
    run.answer(run.verdict())
    assert run.train(10)
    run.tell("plan_change", why="worker 3")
    assert not run.answer(run.verdict("recovery", 1.0)) and not run.train(10)
    run.tell("epoch_started", plan=PLAN.to_dict(), epoch=1)
    [asked] = run.tell("reconfiguration", stood_still_s=0.5)
    assert isinstance(asked, AskPlanner)
    run.answer(asked)
    assert run.train(1)
    run.tell("epoch_started", plan=PLAN.to_dict(), epoch=2)
    assert not run.tell("reconfiguration", stood_still_s=0.5), "nothing is new"


def test_what_is_lost_is_counted_once() -> None:
    """Of a worker that becomes slower still, only what was lost since the last count is new."""
    run = Run()
    run.answer(run.verdict())
    run.train(6)
    slower = {"kind": "compute", "change": "severity", "workers": [3], "speed": 0.4, "since": run.iteration - 3}
    [asked] = run.tell("verdict", iteration=run.iteration, **slower)
    assert isinstance(asked, AskPlanner) and not run.answer(asked) and not run.train(3)
    [found] = run.train(1)
    assert isinstance(found, Recommend) and found.lost_s == pytest.approx(5.0)


def changed(run: Run, why: str, after_s: float, number: int = 1) -> list[Action]:
    """A change is made, and iterations last so long then: what follows."""
    run.tell("plan_change", why=why)
    run.tell("epoch_started", plan=OTHER.to_dict(), epoch=number)
    run.tell("reconfiguration", stood_still_s=0.5, number=number)
    return run.train(18, after_s)


def test_a_change_that_does_not_pay_is_undone() -> None:
    run = Run(seconds_between_changes=30.0)
    run.answer(run.verdict())
    [found] = run.train(10)
    assert isinstance(found, Recommend)
    [told] = changed(run, found.why, after_s=2.2)
    assert told == Outcome(1, 2.0, 2.2)
    [back] = run.train(3, 2.2)
    assert isinstance(back, Recommend) and back.plan == PLAN and back.iteration_s == 2.0
    assert back.why == "change 1 has not paid: iterations 2 s → 2.2 s"
    assert changed(run, back.why, after_s=2.5, number=2) == [Outcome(2, 2.2, 2.5)], "back and forth it would go"
    run.answer(run.verdict("severity", 0.3))
    assert not run.train(1, 2.5) and run.train(1, 2.5), "a second has to be lost from now on, and not half of one"


@pytest.mark.parametrize(("why", "after_s"), [("asked for by hand", 3.0), (None, 2.05)])
def test_a_change_that_pays_or_was_asked_for_by_people_stays(why: str | None, after_s: float) -> None:
    run = Run(seconds_between_changes=0.0)
    run.answer(run.verdict())
    [found] = run.train(10)
    assert isinstance(found, Recommend)
    assert changed(run, why or found.why, after_s) == [Outcome(1, 2.0, after_s)]
    assert not run.train(50, after_s)


def test_iterations_of_other_speeds_say_nothing_of_a_change() -> None:
    run = Run(seconds_between_changes=0.0)
    run.answer(run.verdict())
    [found] = run.train(10)
    assert isinstance(found, Recommend)
    run.tell("plan_change", why=found.why)
    run.tell("epoch_started", plan=OTHER.to_dict(), epoch=1)
    run.tell("reconfiguration", stood_still_s=0.5, number=1)
    run.verdict("severity", 0.2)
    assert not run.train(50, 4.0)


def test_least_time_between_changes() -> None:
    run = Run()
    run.answer(run.verdict())
    assert run.train(10)
    run.tell("epoch_started", plan=PLAN.to_dict(), epoch=1)
    run.tell("reconfiguration", stood_still_s=0.5)
    run.answer(run.verdict("recovery", 1.0))
    assert not run.train(29), "58 seconds"
    [found] = run.train(1)
    assert isinstance(found, Recommend) and found.cost_s == 0.5, "what a change really cost"


@pytest.mark.parametrize(
    ("stood_still_s", "cost_s"),
    [(0.5, 60.0), (90.0, 90.0)],
    ids=["nothing had to move the last time", "it took longer than planners think"],
)
def test_a_change_that_moves_much_state_costs_as_much_as_that(stood_still_s: float, cost_s: float) -> None:
    run = Run()
    run.tell("epoch_started", plan=PLAN.to_dict(), epoch=1)
    [asked] = run.tell("recovery", broken_at=1.0, resumed_at=1.0 + stood_still_s)
    assert isinstance(asked, AskPlanner)
    run.answer(asked, sending_s=60.0)
    in_time = round(cost_s / 0.5)
    assert not run.train(in_time - 1)
    [found] = run.train(1)
    assert isinstance(found, Recommend) and found.cost_s == pytest.approx(cost_s)


def relapsed(run: Run, times: int | None) -> int:
    """Worker 3 is slow again and has no work; then it looks well. How many iterations pass until it has work again."""
    fields = {"kind": "compute", "change": "onset", "workers": [3], "speed": 0.5, "relapses": times}
    [asked] = run.tell("verdict", since=run.iteration + 1, **fields)
    assert isinstance(asked, AskPlanner)
    run.answer(asked, gain=0.0)
    run.answer(run.verdict("recovery", 1.0))
    for iterations in range(1, 1000):
        for found in run.train(1):
            assert isinstance(found, Recommend)
            run.tell("plan_change", why=found.why)
            run.tell("epoch_started", plan=PLAN.to_dict(), epoch=1)
            run.tell("reconfiguration", stood_still_s=5.0)
            run.train(100)
            return iterations
    raise AssertionError("never")


def test_who_has_only_looked_well_gets_work_again_later_and_later_until_that_is_forgiven() -> None:
    run = Run(train_iters=1_000_000)
    assert [relapsed(run, times) for times in (None, 1, 2, 20, None)] == [10, 20, 40, 160, 10]


def refused(run: Run) -> Run:
    """A run whose last recommendation can't be carried out, though the planner thinks so still."""
    run.answer(run.verdict())
    [found] = run.train(10)
    assert isinstance(found, Recommend)
    [asked] = run.tell("change_refused", why=found.why, reason="the plan exceeds memory")
    assert isinstance(asked, AskPlanner) and not run.answer(asked)
    return run


def test_a_plan_that_was_refused_is_not_asked_for_again() -> None:
    assert not refused(Run()).train(500)


def test_when_the_speeds_have_changed_it_may_be_asked_for_again_later() -> None:
    """Once the last refusal is a minute ago, and it would have saved twice what it costs."""
    run = refused(Run())
    run.train(20)
    run.answer(run.verdict("severity", 0.3))
    assert not run.train(19)
    [found] = run.train(1)
    assert isinstance(found, Recommend) and (found.lost_s, found.cost_s) == (pytest.approx(10.0), 5.0)


def test_likewise_in_another_epoch() -> None:
    run = refused(Run())
    run.tell("epoch_started", plan=PLAN.to_dict(), epoch=1)
    [asked] = run.tell("recovery", broken_at=1.0, resumed_at=3.0)
    assert isinstance(asked, AskPlanner)
    run.answer(asked)
    assert len(run.train(60)) == 1


def test_what_is_refused_to_a_user_is_none_of_the_policys() -> None:
    run = Run()
    run.answer(run.verdict())
    assert not run.train(5)
    assert not run.tell("change_refused", why="asked for by a user", reason="there is no worker 9")
    assert not run.train(4) and len(run.train(1)) == 1


def test_growing_back_after_a_recovery() -> None:
    """Also with everybody well: complete uniform replicas leave survivors idle."""
    run = Run()
    run.tell("epoch_started", plan=PLAN.to_dict(), epoch=1)
    [asked] = run.tell("recovery", broken_at=1.0, resumed_at=3.0)
    assert isinstance(asked, AskPlanner)
    run.answer(asked)
    [found] = run.train(4)
    assert isinstance(found, Recommend) and found.cost_s == 2.0 and "all workers are healthy" in found.why


def test_who_only_looks_on_need_not_plan_after_each_recovery() -> None:
    run = Run(act="observe")
    assert not run.tell("recovery", broken_at=1.0, resumed_at=3.0)
    run.answer(run.verdict())
    [found] = run.train(10)
    assert isinstance(found, Recommend) and found.act == "observe"
    assert run.tell("recovery", broken_at=1.0, resumed_at=3.0), "a worker is slow"


@pytest.mark.parametrize("answer", [NoPlan("too few"), found(1.0, None)], ids=["none", "the one before can't go on"])
def test_no_plan_is_no_change(answer: PlannerAnswer) -> None:
    run = Run()
    assert not run.policy.answered(run.verdict().number, answer, run.now) and not run.train(100)


UNANSWERED = NoPlan("no plan within 600 s", unanswered=True)


def test_a_question_that_found_no_answer_is_put_again() -> None:
    """The planner was killed for want of memory, say. What was lost meanwhile counts."""
    run = Run()
    assert not run.policy.answered(run.verdict().number, UNANSWERED, run.now)
    assert not run.train(29), "58 seconds"
    [again] = run.train(1)
    assert isinstance(again, AskPlanner)
    [found] = run.answer(again)
    assert isinstance(found, Recommend) and found.lost_s == pytest.approx(15.0)


def test_it_is_put_less_and_less_often() -> None:
    run = Run(train_iters=100_000)
    run.policy.answered(run.verdict().number, UNANSWERED, run.now)
    asked = []
    for _ in range(10_000):
        for action in run.train(1):
            assert isinstance(action, AskPlanner)
            asked.append(run.now)
            run.policy.answered(action.number, UNANSWERED, run.now)
    pauses = [after - before for before, after in pairwise(asked)]
    assert pauses == [120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0, 3600.0, 3600.0]


def test_after_an_answer_pauses_are_short_again() -> None:
    run = Run()
    for _ in range(3):
        run.policy.answered(run.verdict().number, UNANSWERED, run.now)
    run.answer(run.verdict(), gain=0.0)
    run.policy.answered(run.verdict().number, UNANSWERED, run.now)
    assert not run.train(29) and len(run.train(1)) == 1


def test_another_question_takes_the_place_of_one_without_an_answer() -> None:
    run = Run()
    run.policy.answered(run.verdict().number, UNANSWERED, run.now)
    run.answer(run.verdict("recovery", 1.0), gain=0.0)
    assert not run.train(500)


class TestBeginning:
    def test_the_planners_own_layout_is_taken_at_once(self) -> None:
        run = Run(begins_with_a_plan=True, act="observe")
        [asked] = run.began
        assert isinstance(asked, AskPlanner)
        [found] = run.answer(asked)
        assert isinstance(found, Recommend) and (found.act, found.plan) == ("act", NEXT)

    def test_only_at_the_beginning(self) -> None:
        run = Run(begins_with_a_plan=True, act="observe")
        run.answer(run.began[0])
        assert not run.tell("epoch_started", plan=PLAN.to_dict(), epoch=1)
        assert not run.answer(run.verdict()), "slowness is waited out as ever"

    @pytest.mark.parametrize("first", [found(1.0, 1.0), NoPlan("too little memory")], ids=["as good", "none"])
    def test_slowness_is_waited_out_where_there_was_no_better_layout(self, first: PlannerAnswer) -> None:
        run = Run(begins_with_a_plan=True, act="observe")
        [asked] = run.began
        assert isinstance(asked, AskPlanner) and not run.policy.answered(asked.number, first, run.now)
        run.train(50)
        assert not run.answer(run.verdict())

    def test_a_layout_that_is_hardly_better_is_left_alone(self) -> None:
        run = Run(begins_with_a_plan=True)
        assert not run.answer(run.began[0], gain=0.005)

    def test_nobody_asks_who_was_not_told_to(self) -> None:
        assert not Run().began


class TestAPlanThatTheRecoveryDidNotWaitFor:
    """Uniform plans train meanwhile."""

    def recover(self, **planned: Any) -> tuple[Run, list[Action]]:
        """A job that only observes, after a recovery that stood still for five seconds."""
        run = Run(act="observe")
        run.tell("planned", strategy="uniform", instead_of="joint", reason="no plan within 2 s", **planned)
        run.tell("epoch_started", plan=OTHER.to_dict(), epoch=1)
        return run, run.tell("recovery", resumed_at=1005.0, broken_at=1000.0)

    def test_it_is_taken_once_it_pays(self) -> None:
        run, [asked] = self.recover(overtaken=True)
        assert isinstance(asked, AskPlanner) and asked.plan == OTHER
        run.train(3)
        assert not run.answer(asked)
        assert not run.train(9)
        [found] = run.train(1)
        assert isinstance(found, Recommend)
        assert found.act == "act"
        assert found.why == "the plan that the recovery did not wait for: iterations 25 % shorter"

    def test_it_goes_again_where_it_has_not_paid(self) -> None:
        run, [asked] = self.recover(overtaken=True)
        assert isinstance(asked, AskPlanner)
        run.train(3)
        run.answer(asked)
        [found] = run.train(20)
        assert isinstance(found, Recommend)
        run.tell("plan_change", why=found.why, number=1)
        run.tell("epoch_started", plan=PLAN.to_dict(), epoch=2)
        run.tell("reconfiguration", number=1, stood_still_s=1.0)
        outcome, back = run.train(60, seconds=3.0)
        assert isinstance(outcome, Outcome)
        assert isinstance(back, Recommend) and back.act == "act" and "has not paid" in back.why

    def test_it_is_not_taken_where_it_is_no_better(self) -> None:
        run, [asked] = self.recover(overtaken=True)
        assert isinstance(asked, AskPlanner)
        assert not run.answer(asked, gain=0.005)
        again = run.verdict()
        run.answer(again)
        [found] = run.train(20)
        assert isinstance(found, Recommend) and found.act == "observe", "a job that only observes"

    def test_also_where_too_few_were_left_for_a_uniform_plan(self) -> None:
        run = Run(act="observe")
        run.tell("planned", strategy="uniform", instead_of="joint", reason="no plan within 30 s", overtaken=True)
        run.tell("planned", strategy="fallback", instead_of="uniform", reason="3 survivors are fewer than TP x PP = 4")
        run.tell("epoch_started", plan=OTHER.to_dict(), epoch=1)
        [asked] = run.tell("recovery", resumed_at=1005.0, broken_at=1000.0)
        assert isinstance(asked, AskPlanner)
        run.answer(asked)
        [found] = run.train(20)
        assert isinstance(found, Recommend) and found.act == "act"

    @pytest.mark.parametrize(("unanswered", "act"), [(False, "observe"), (True, "act")])
    def test_where_the_strategy_has_none_it_is_not_late(self, unanswered: bool, act: str) -> None:
        """What is found for a worker that is slow later is a change by choice. A planner that has ended has not said
        so."""
        run, [asked] = self.recover(overtaken=True)
        assert isinstance(asked, AskPlanner)
        assert not run.policy.answered(asked.number, NoPlan("too little memory", unanswered), run.now)
        run.train(50)
        run.answer(run.verdict())
        [found] = run.train(20)
        assert isinstance(found, Recommend) and found.act == act

    def test_where_there_was_none_nothing_is_asked(self) -> None:
        _, actions = self.recover()
        assert not actions


def test_a_plan_whose_first_step_has_failed_is_not_recommended_again() -> None:
    run = Run(seconds_between_changes=0.0)
    run.answer(run.verdict())
    [found] = run.train(10)
    assert isinstance(found, Recommend)
    run.tell("plan_change", why=found.why, number=3)
    run.tell("plan_failed", number=3, failed=1, error="CUDA out of memory")
    run.tell("epoch_started", plan=PLAN.to_dict(), epoch=2)
    [asked] = run.tell("recovery", resumed_at=5.0, broken_at=0.0)
    assert isinstance(asked, AskPlanner)
    run.answer(asked)
    assert run.train(100) == []
