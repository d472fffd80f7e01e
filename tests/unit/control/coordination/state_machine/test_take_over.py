# SPDX-License-Identifier: Apache-2.0
"""What a coordinator decides that goes on in the place of one that was lost."""

from __future__ import annotations

from test_log_pages import LOGGER, commit_after, logging, page
from test_membership import REPLICA_PER_NODE, UNLIKE, Job, events, notices, only

from megatron_resihp.control import exit_codes
from megatron_resihp.control.coordination.actions import Action, AskDown, End, Notify, Phase, Reopen
from megatron_resihp.control.coordination.state_machine.membership import RETURN_S
from megatron_resihp.protocol.messages import (
    EmergencyCheckpointWritten,
    LeaveRequest,
    NodeLost,
    ScriptFailed,
    StopRequest,
)
from megatron_resihp.protocol.notices import EpochIsBroken, WorkersGivenUp
from megatron_resihp.protocol.published import EpochPlan, Go


def take_over(job: Job) -> list[Action]:
    actions = job.membership.take_over("process 7 on login", job.now)
    assert [event.by for event in events(actions, "coordinator_replaced")] == ["process 7 on login"]
    return actions[1:]


def test_training_goes_on() -> None:
    job = Job().start()
    assert take_over(job) == [] and job.state.phase is Phase.RUNNING
    job.recover([1])


def test_an_epoch_that_was_being_built_is_broken() -> None:
    job = Job().start()
    job.kill(1)
    job.report(0, 2, 3)
    job.ready(0)
    assert job.state.phase is Phase.BUILDING
    actions = take_over(job)
    assert notices(actions) == [EpochIsBroken]
    assert not job.state.dead.keys() - {1}, "nobody is given up"
    job.report(*job.members)
    assert job.ready(*job.members) and job.state.phase is Phase.RUNNING and job.state.epoch == 2


def test_pages_of_the_log_are_taken_again() -> None:
    """They may have waited in the coordinator that was lost. What writes them knows which are there."""
    job = logging(page(3), page(4))
    take_over(job)
    assert job.tell(page(3)) == [page(3)] and job.tell(page(4)) == [page(4)]
    assert not job.tell(page(4)), "but once"


def test_what_is_logged_is_logged_again_if_its_worker_is_lost_too() -> None:
    """Its page may have come, and not be written."""
    job = logging(page(3), page(4))
    take_over(job)
    assert commit_after(job, LOGGER, (0, 1, 2)).replay


def test_survivors_have_longer_to_report() -> None:
    job = Job().start()
    job.kill(1)
    job.report(0)
    job.wait(9.0)
    assert take_over(job) == []
    assert not notices(job.wait(10.0 + RETURN_S - 1.0))
    assert notices(job.wait(1.0)) == [WorkersGivenUp]


def test_reports_that_have_come_count() -> None:
    job = Job().start()
    job.kill(1)
    job.report(0)
    take_over(job)
    only(EpochPlan, job.report(2, 3))
    only(Go, job.ready(*job.members))


def test_workers_that_leave_by_choice_have_longer_too() -> None:
    job = Job().start()
    job.apply(UNLIKE)
    job.leave(0)
    assert job.state.phase is Phase.REPORTING
    take_over(job)
    assert not notices(job.wait(job.state.limits.leave_s + RETURN_S - 1.0))
    assert notices(job.wait(1.0)) == [EpochIsBroken]


def test_what_was_asked_about_lost_nodes_is_asked_again() -> None:
    """The answer has gone to the coordinator that was lost."""
    job = Job(workers=6, per_node=1, pipeline=1, micro_batches=6).start()
    for node in range(2, 6):
        job.tell(NodeLost(node, "silent", 0.0))
    asked = only(AskDown, job.report(0, 1))
    assert only(AskDown, take_over(job)) == asked
    assert job.state.left_s == job.state.limits.word_s + RETURN_S


def test_a_job_that_has_not_begun_to_train_ends_as_after_a_death() -> None:
    """Groups that workers make in their start-up meet in the store that is lost."""
    job = Job()
    job.describe(0)
    job.ready(0)
    [ended, _, end] = take_over(job)
    assert isinstance(ended, Notify) and isinstance(end, End) and job.state.phase is Phase.ENDED
    assert (end.code, end.reason) == (exit_codes.RETRY, "the coordinator was lost before the first iteration")
    assert not end.at_once, "workers hear of it"


def test_workers_that_have_told_nothing_are_ended_by_a_signal() -> None:
    job = Job()
    end = take_over(job)[-1]
    assert isinstance(end, End) and end.at_once and end.reason == "the coordinator was lost while workers set up"


def test_survivors_have_longer_to_save() -> None:
    job = saving()
    job.wait(job.state.limits.save_s - 1.0)
    assert take_over(job) == []
    assert not job.wait(job.state.limits.save_s + RETURN_S - 1.0)
    assert job.state.phase is Phase.SAVING
    assert only(End, job.wait(1.0)).code == exit_codes.NO_PLAN


def test_the_job_ends_once_survivors_have_saved() -> None:
    job = saving()
    job.tell(EmergencyCheckpointWritten(0))
    take_over(job)
    assert only(End, job.tell(EmergencyCheckpointWritten(1))).code == exit_codes.NO_PLAN


def test_survivors_that_are_lost_with_the_coordinator_are_not_waited_for() -> None:
    job = saving()
    job.tell(EmergencyCheckpointWritten(0))
    take_over(job)
    assert only(End, job.kill(1)).code == exit_codes.NO_PLAN


def test_nothing_is_left_to_decide_once_the_job_has_ended() -> None:
    job = Job().start()
    job.tell(ScriptFailed(0, "a bug", 1))
    assert job.state.phase is Phase.ENDED
    assert job.membership.take_over("process 7 on login", job.now) == []


class TestPlaces:
    """Of nodes that are not there: the lost coordinator may not have offered them any more. Two nodes of two workers
    begin the job."""

    def test_a_lost_node_may_come_back(self) -> None:
        """With ids that nobody has had: the place that was offered before may have been taken."""
        job = Job().start_with(**REPLICA_PER_NODE)
        assert only(Reopen, job.tell(NodeLost(1, "silent", 0.0))) == Reopen(1, (6, 7))
        assert opened(take_over(job)) == [Reopen(1, (10, 11))]
        job.report(0, 1)
        job.ready(*job.members)
        assert opened(take_over(job)) == [Reopen(1, (14, 15))]
        job.come_back(14)
        assert opened(take_over(job)) == [], "its other worker is on the way"

    def test_nodes_that_were_never_there_may_join(self) -> None:
        job = Job(late_nodes=2).start()
        job.come_back(4)
        assert opened(take_over(job)) == [Reopen(3, (14, 15))]

    def test_a_node_that_has_left_may_come_back(self) -> None:
        job = Job().start_with(**REPLICA_PER_NODE)
        job.tell(LeaveRequest(1, 2, 0.0, ordered=True))
        assert not opened(take_over(job)), "it is still there"
        job.leave(0, 1, 2, 3)
        job.ready(*job.members)
        assert job.members == (0, 1)
        assert opened(take_over(job)) == [Reopen(1, (6, 7))]

    def test_a_node_whose_workers_are_dead_is_still_there(self) -> None:
        """Its launcher waits for the job's end, so nobody else may have its place."""
        job = Job().start_with(**REPLICA_PER_NODE)
        job.kill(2)
        job.kill(3)
        job.report(0, 1)
        job.ready(*job.members)
        assert job.members == (0, 1)
        assert opened(take_over(job)) == []
        job.tell(NodeLost(1, "silent", 0.0))
        assert opened(take_over(job)) == [Reopen(1, (10, 11))]

    def test_the_node_of_the_coordinator_is_there(self) -> None:
        job = Job(tensor=1, pipeline=1).start()
        job.kill(0)
        job.kill(1)
        assert opened(take_over(job)) == []

    def test_nobody_may_join_a_job_that_ends(self) -> None:
        job = Job().start_with(**REPLICA_PER_NODE)
        job.tell(NodeLost(1, "silent", 0.0))
        job.tell(StopRequest(15, 0.0))
        assert opened(take_over(job)) == []


def opened(actions: list[Action]) -> list[Action]:
    return [action for action in actions if isinstance(action, Reopen)]


def saving() -> Job:
    """A job whose workers 0 and 1 are to save what they hold."""
    job = Job(tensor=2).start()
    job.kill(2)
    job.kill(3)
    job.report(0, 1)
    assert job.state.phase is Phase.SAVING and job.state.ending.saving == {0, 1}
    return job
