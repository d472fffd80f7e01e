# SPDX-License-Identifier: Apache-2.0
"""Batches that grow: all workers leave the epoch by themselves, and what follows is planned for the larger ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_membership import UNLIKE, Job, events, notices, only

from megatron_resihp.control.coordination.actions import Phase
from megatron_resihp.plan.batch_steps import Steps, consumed_after
from megatron_resihp.protocol.messages import FirstStepFailed, GroupsPrepared
from megatron_resihp.protocol.notices import EpochIsBroken, PlanChange
from megatron_resihp.protocol.published import EpochPlan
from megatron_resihp.protocol.records import IterationPhase, Record

STEPS = ((0, 4), (20, 8))
"""Five iterations have batches of 4 samples, and those after them of 8."""
LARGER = 6


class Growing(Job):
    def record(self, worker: int) -> Record:
        record = super().record(worker)
        consumed = {
            n: {**known, "consumed_train_samples": consumed_after(STEPS, n - 1)} for n, known in record.counters.items()
        }
        return replace(record, counters=consumed)


@pytest.fixture
def job() -> Growing:
    job = Growing()
    job.start_with(micro_batch_size=1, global_batch_size=4, batch_steps=STEPS)
    return job


def at_larger(job: Growing) -> None:
    """Workers stand before the first larger batch."""
    job.at = {worker: (LARGER, IterationPhase.COMPUTE) for worker in job.state.living}


def test_all_leave_together_and_nobody_is_told_to(job: Growing) -> None:
    at_larger(job)
    assert not job.report(0) and job.state.phase is Phase.REPORTING
    actions = job.report(1, 2, 3)
    published = only(EpochPlan, actions)
    assert published.plan.micro_batch_count == 8 and published.commit is not None
    assert published.commit.iteration == LARGER - 1 and not published.commit.replay and not published.on_trial
    [grown] = events(actions, "batch_grown")
    assert (grown.global_batch_size, grown.micro_batches) == (8, 8)
    done = job.ready(0, 1, 2, 3)
    [change] = events(done, "reconfiguration")
    assert change.why == "global batches of 8 samples" and not events(done, "recovery")
    assert EpochIsBroken not in notices(job.actions)


def test_they_grow_once(job: Growing) -> None:
    at_larger(job)
    job.report(0, 1, 2, 3)
    job.ready(0, 1, 2, 3)
    job.iteration = LARGER + 2
    job.at = {}
    job.recover([3])
    assert job.state.plan is not None and job.state.plan.micro_batch_count == 8
    assert len(events(job.actions, "batch_grown")) == 1


def test_one_dies_while_they_leave(job: Growing) -> None:
    at_larger(job)
    job.report(0)
    assert EpochIsBroken in notices(job.kill(3))
    plan = only(EpochPlan, job.report(1, 2)).plan
    assert plan.micro_batch_count == 8 and 3 not in plan.members
    assert events(job.ready(*job.members), "recovery")


@pytest.mark.parametrize("stage", [IterationPhase.AGREED, IterationPhase.STEPPED])
def test_one_dies_before_all_have_taken_the_last_smaller_step(job: Growing, stage: IterationPhase) -> None:
    """That one counts; what follows is larger."""
    job.at = {0: (LARGER - 1, stage), 1: (LARGER - 1, IterationPhase.REDUCED), 2: (LARGER - 1, IterationPhase.REDUCED)}
    job.kill(3)
    published = only(EpochPlan, job.report(0, 1, 2))
    assert published.commit is not None and published.commit.replay
    assert published.plan.micro_batch_count == 8


def test_one_dies_in_a_smaller_one(job: Growing) -> None:
    job.iteration = LARGER - 1
    job.kill(3)
    assert only(EpochPlan, job.report(0, 1, 2)).plan.micro_batch_count == 4


def test_a_change_to_a_plan_for_smaller_ones_is_not_made(job: Growing) -> None:
    """It was asked for just before, and all have made its groups."""
    assert PlanChange in notices(job.apply(UNLIKE))
    for worker in range(4):
        job.tell(GroupsPrepared(worker, 1))
    at_larger(job)
    actions = job.report(0, 1, 2, 3)
    published = only(EpochPlan, actions)
    assert published.plan.micro_batch_count == 8 and published.plan != UNLIKE
    assert published.groups_of_change is None
    [refused] = events(actions, "change_refused")
    assert refused.why == "asked for by hand" and "smaller batches" in refused.reason
    [made] = events(job.ready(0, 1, 2, 3), "reconfiguration")
    assert (made.number, made.why) == (2, "global batches of 8 samples")
    assert not events(job.apply(UNLIKE), "plan_change"), "it is for smaller ones"


def test_there_is_no_way_back_to_smaller_ones(job: Growing) -> None:
    at_larger(job)
    job.report(0, 1, 2, 3)
    job.ready(0, 1, 2, 3)
    assert job.tell(FirstStepFailed(0, job.state.epoch, "out of memory")) == []


@pytest.mark.parametrize("steps", [((0, 4), (40, 8)), ()])
def test_who_is_started_with_another_schedule_is_not_taken_in(job: Growing, steps: Steps) -> None:
    job.recover([3])
    job.come_back(7, micro_batch_size=1, global_batch_size=4, batch_steps=steps)
    assert 7 in job.state.dead


def test_who_is_started_anew_knows_the_first_size_only(job: Growing) -> None:
    at_larger(job)
    job.report(0, 1, 2, 3)
    job.ready(0, 1, 2, 3)
    job.iteration, job.at = LARGER + 1, {}
    job.recover([3])
    actions = job.come_back(7, micro_batch_size=1, global_batch_size=4, batch_steps=STEPS)
    assert events(actions, "worker_waiting") and 7 not in job.state.dead
