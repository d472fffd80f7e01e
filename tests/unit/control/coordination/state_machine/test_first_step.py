# SPDX-License-Identifier: Apache-2.0
"""An error in the first step of a plan that was chosen: answered once, by a plan that is known to run."""

from __future__ import annotations

from typing import Any

import pytest
from test_membership import LIMITS, OTHER_LAYERS, UNLIKE, Job, events, notices, only, plan_of

from megatron_resihp.control.coordination.actions import Action, Phase
from megatron_resihp.control.replanning.recovery.inventory import Survivors
from megatron_resihp.control.replanning.recovery.next_plan import uniform_or_less
from megatron_resihp.events.replanning import Planned
from megatron_resihp.plan import Chunk, ParallelPlan
from megatron_resihp.protocol.messages import CommunicationFailed, FirstStepFailed, PlanRequest, ScriptFailed
from megatron_resihp.protocol.notices import EpochIsBroken
from megatron_resihp.protocol.published import EmergencyCheckpointOrder, EpochPlan, Go

ERROR = "ValueError: shards (2) must be >= tensor_model_parallel_size (4)."


def failing(job: Job, worker: int = 1, error: str = ERROR) -> list[Action]:
    return job.tell(FirstStepFailed(worker, epoch=job.state.epoch, error=error))


def changed(plan: ParallelPlan = UNLIKE, **asked: Any) -> Job:
    """A job that has just begun with a plan by choice."""
    job = Job().start()
    job.apply(plan, **asked)
    published = only(EpochPlan, job.leave(*sorted(job.state.living)))
    assert published.on_trial
    return job


@pytest.mark.parametrize("running", [False, True], ids=["as it is built", "in its first step"])
def test_after_a_change_by_choice_the_plan_before_follows(running: bool) -> None:
    job = Job().start()
    before = job.state.plan
    job = changed()
    if running:
        only(Go, job.ready(*job.members))
    actions = failing(job)
    [failed] = events(actions, "plan_failed")
    assert (failed.failed, failed.error, failed.number) == (1, ERROR, 1)
    assert failed.digest == UNLIKE.digest
    assert notices(actions) == [EpochIsBroken]
    assert not events(failing(job, 2), "plan_failed"), "one word is enough"
    job.at = {}
    published = only(EpochPlan, job.report(0, 1, 2, 3))
    assert published.plan == before and not published.on_trial
    actions = job.ready(*job.members)
    only(Go, actions)
    assert events(actions, "recovery") and job.state.phase is Phase.RUNNING


def test_the_same_error_again_is_none_of_the_plans() -> None:
    """The worker raises it: its plan is not on trial. Should one blame it all the same, nothing changes."""
    job = changed()
    failing(job)
    job.at = {}
    job.report(0, 1, 2, 3)
    job.ready(*job.members)
    assert failing(job) == []
    job.tell(ScriptFailed(1, error=ERROR, code=1))
    assert job.state.phase is Phase.ENDED


def test_a_plan_that_has_failed_is_not_chosen_again_except_by_people() -> None:
    job = changed()
    failing(job)
    job.at = {}
    job.report(0, 1, 2, 3)
    job.ready(*job.members)
    [refused] = events(job.tell(PlanRequest(UNLIKE.to_dict(), "iterations 25 % shorter")), "change_refused")
    assert refused.reason == f"this plan has failed in the first step: {ERROR}"
    assert events(job.apply(UNLIKE), "plan_change")


def test_standbys_of_the_plan_before_keep_what_they_hold_now() -> None:
    """Under the plan that has failed they have given up what they had before, or got more."""
    one = plan_of((((0,), (2,)),), counts=(4,))
    job = changed(one)
    only(Go, job.ready(*job.members))
    job.apply(plan_of((((1,), (0,), (3,)), (Chunk(0, 0, 2), Chunk(1, 2, 4), Chunk(2, 4, 6))), counts=(4,)))
    job.leave(*job.members)
    job.ready(*job.members)
    failing(job, 3)
    job.at = {}
    published = only(EpochPlan, job.report(*sorted(job.state.living)))
    assert published.plan.working == (0, 2)
    for worker, kept in published.plan.standbys.items():
        assert kept is None or worker == 2 or published.held[worker], worker
    job.ready(*job.members)
    assert job.state.phase is Phase.RUNNING


def test_if_somebody_dies_meanwhile_uniform_plans_follow() -> None:
    job = changed()
    failing(job)
    job.kill(3)
    job.at = {}
    published = only(EpochPlan, job.report(0, 1, 2))
    assert published.plan.not_uniform is None and set(published.plan.members) == {0, 1, 2}
    assert not published.on_trial


CHOSEN = plan_of((((2,), (1,), (3,)), (Chunk(0, 0, 2), Chunk(1, 2, 4), Chunk(2, 4, 6))), counts=(4,))


def after_a_death(job: Job) -> list[Action]:
    """Worker 0 dies, and a planner has a plan for the others."""
    asked: list[Survivors] = []

    def choose(survivors: Survivors) -> Any:
        asked.append(survivors)
        if len(asked) > 1:
            pytest.fail("the planner is asked again")
        return CHOSEN, [Planned(strategy="joint")]

    job.next_plan = choose
    job.kill(0)
    actions = job.report(1, 2, 3)
    assert only(EpochPlan, actions).on_trial
    return actions


def test_after_a_loss_uniform_plans_follow() -> None:
    job = Job().start()
    after_a_death(job)
    only(Go, job.ready(1, 2, 3))
    assert events(failing(job), "plan_failed")[0].number is None
    published = only(EpochPlan, job.report(1, 2, 3))
    assert published.plan.not_uniform is None and not published.on_trial
    assert published.commit.iteration == 4, "the iteration is computed again"
    only(Go, job.ready(*job.members))
    assert job.state.phase is Phase.RUNNING


def test_uniform_plans_after_a_loss_are_not_on_trial() -> None:
    job = Job().start()
    job.next_plan = uniform_or_less
    job.kill(0)
    assert not only(EpochPlan, job.report(1, 2, 3)).on_trial
    job.ready(*job.members)
    assert failing(job) == []


def test_where_there_are_no_uniform_plans_state_is_saved() -> None:
    """One worker too few for the job's own layout, and a model of which too little is known for a smaller plan."""
    job = Job(workers=2).start()
    job.apply(plan_of((((0,),), (Chunk(0, 0, 6),)), counts=(4,)))
    job.leave(0, 1)
    job.ready(0, 1)
    job.next_plan = lambda _: (
        plan_of((((0,),), (Chunk(0, 0, 6),)), counts=(4,)), [Planned(strategy="joint")]
    )  # fmt: skip
    job.kill(1)
    job.at = {}
    only(EpochPlan, job.report(0))
    job.ready(0)
    failing(job, 0)
    order = only(EmergencyCheckpointOrder, job.report(0))
    assert order.writers == {0: job.held[0]}
    [ended] = [event for event in events(job.actions, "epoch_broken") if ERROR in event.cause]
    assert ended


def test_recoveries_of_an_iteration_stay_bounded() -> None:
    """Even where every plan of a planner fails, each in another way."""
    job = Job().start()
    after_a_death(job)
    made = iter(range(100))

    def choose(survivors: Survivors) -> Any:
        layers = (Chunk(0, 0, 1 + next(made) % 4), Chunk(1, 1, 6))
        chunks = (layers[0], Chunk(1, layers[0].end, 6))
        return plan_of((((2,), (1,)), chunks), counts=(4,)), [Planned(strategy="joint")]

    job.next_plan = choose
    for recovery in range(2 * LIMITS.recoveries_per_iteration):
        job.ready(*sorted(job.state.living))
        failing(job)
        job.tell(CommunicationFailed(1, epoch=job.state.epoch, error="connection reset"))
        actions = job.report(*sorted(job.state.living))
        if any(isinstance(action, EmergencyCheckpointOrder) for action in actions):
            assert recovery <= LIMITS.recoveries_per_iteration
            return
    pytest.fail("recovered for ever")


def test_other_layers_by_hand_are_on_trial_too() -> None:
    assert changed(plan_of((((0,), (2,)), OTHER_LAYERS), counts=(4,))).membership.state.phase is Phase.BUILDING
