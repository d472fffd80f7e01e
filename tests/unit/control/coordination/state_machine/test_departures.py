# SPDX-License-Identifier: Apache-2.0
"""Nodes and workers that leave a job, as `resihp drain` or a signal asks, in time or not; and `resihp stop`."""

from __future__ import annotations

import signal

import pytest
from test_membership import LIMITS, REPLICA_PER_NODE, Job, events, notices, only

from megatron_resihp.control.coordination.actions import Action, End, Notify, Phase, Reply
from megatron_resihp.protocol.answers import Accepted, Refused
from megatron_resihp.protocol.messages import (
    DrainRequest,
    EndRequest,
    LeaveRequest,
    NodeLost,
    ProcessExited,
    ScriptEnded,
    StopRequest,
    TrainingFinished,
)
from megatron_resihp.protocol.notices import (
    DrainOrder,
    EpochIsBroken,
    NodeReleased,
    PlanChange,
    StopTraining,
    WorkersGivenUp,
)
from megatron_resihp.protocol.published import EmergencyCheckpointOrder, EpochPlan


def three_nodes() -> Job:
    """Of a replica each, which has two workers."""
    return Job(workers=6, micro_batches=6).start_with(**REPLICA_PER_NODE)


def drain(job: Job, *, nodes: tuple[int, ...] = (), workers: tuple[int, ...] = (), deadline_s: float | None = None,
          ) -> list[Action]:  # fmt: skip
    return job.tell(DrainRequest(nodes, workers, deadline_s, "answer/1"))


def told(job: Job, node: int, ordered: bool = False) -> list[Action]:
    """A node's agent asks to leave."""
    return job.tell(LeaveRequest(node, 2 * node, 0.0, ordered))


def notice(kind: type, actions: list[Action]) -> object:
    [found] = [action.notice for action in actions if isinstance(action, Notify) and isinstance(action.notice, kind)]
    return found


class TestDrainedByCommand:
    def test_a_nodes_agent_is_told_to_ask(self) -> None:
        """It then starts no workers any more, and its name is known."""
        job = three_nodes()
        asked = drain(job, nodes=(1,))
        assert notice(DrainOrder, asked) == DrainOrder((2, 3))
        answer = only(Reply, asked).answer
        assert answer == Accepted("told to leave after an iteration: node 1; what has not left in 20 s counts as dead")
        assert notices(told(job, 1, ordered=True)) == [PlanChange]
        left = job.leave(*range(6))
        assert only(EpochPlan, left).leaving == (2, 3)
        assert notice(NodeReleased, left) == NodeReleased(2, (2, 3))

    def test_most_nodes_may_be_drained_if_there_is_a_plan(self) -> None:
        job = three_nodes()
        drain(job, nodes=(1, 2))
        for node in (1, 2):
            told(job, node, ordered=True)
        assert only(EpochPlan, job.leave(*range(6))).leaving == (2, 3, 4, 5)

    def test_workers_leave_and_their_node_stays(self) -> None:
        job = Job().start()
        asked = drain(job, workers=(3,))
        assert notices(asked) == [PlanChange] and isinstance(only(Reply, asked).answer, Accepted)
        left = job.leave(0, 1, 2, 3)
        published = only(EpochPlan, left)
        assert published.leaving == (3,) and published.plan.members == (0, 1, 2)
        assert [event.left for event in events(left, "workers_left")] == [(3,)] and not notices(left)
        assert not job.tell(ProcessExited(3, code=0, time=0.0)), "it ends, and nobody has died"
        job.ready(0, 1, 2)
        assert job.state.phase is Phase.RUNNING and not events(job.actions, "worker_dead")

    def test_a_worker_that_waits_for_a_plan_is_ended(self) -> None:
        told = {"strategy": "joint", **REPLICA_PER_NODE}  # whose plans take a while
        job = Job(workers=6, micro_batches=6).start_with(**told).recover([5])
        job.come_back(11, **told)
        assert notice(WorkersGivenUp, drain(job, workers=(11,))) == WorkersGivenUp((11,), "told to leave", True)
        assert not job.state.joining.waiting

    def test_where_no_plan_is_left_the_job_ends_and_the_answer_says_so(self) -> None:
        job = Job().start()
        asked = drain(job, workers=(2, 3))
        assert notices(asked) == [StopTraining]
        line = only(Reply, asked).answer.line
        assert line.startswith("told to leave: worker 2, worker 3; there is no plan for the others: ")
        assert line.endswith("; the job ends after an iteration")

    @pytest.mark.parametrize(
        ("nodes", "workers", "reason"),
        [
            ((0,), (), "node 0 has the coordinator and can't leave; end the job with resihp stop"),
            ((7,), (), "node 7 has no workers in the job"),
            ((), (9,), "worker 9 is not in the job"),
        ],
    )
    def test_what_can_not_leave(self, nodes: tuple[int, ...], workers: tuple[int, ...], reason: str) -> None:
        job = three_nodes()
        asked = drain(job, nodes=nodes, workers=workers)
        assert only(Reply, asked).answer.reason.startswith(reason) and not notices(asked)
        assert not job.wait(100.0), "and nothing is due"

    def test_not_before_training_nor_at_its_end(self) -> None:
        starting, ending = Job(), three_nodes()
        starting.describe(0)
        assert "has not begun to train" in only(Reply, drain(starting, nodes=(1,))).answer.reason
        ending.tell(TrainingFinished(0, 5))
        assert only(Reply, drain(ending, nodes=(1,))).answer == Refused("the job is about to end")

    def test_during_a_recovery_it_has_no_part_in_the_next_plan(self) -> None:
        job = three_nodes()
        job.kill(0)
        drain(job, workers=(4,))
        assert only(EpochPlan, job.report(1, 2, 3, 4, 5)).leaving == (4,)


class TestDeadline:
    @pytest.mark.parametrize("ordered", [True, False], ids=["by command", "by a signal"])
    def test_a_node_that_has_not_left_in_time_counts_as_dead(self, ordered: bool) -> None:
        job = three_nodes()
        if ordered:
            drain(job, nodes=(1,))
        told(job, 1, ordered)
        assert not job.wait(LIMITS.drain_s - 1.0)
        late = job.wait(2.0)
        assert notice(WorkersGivenUp, late) == WorkersGivenUp((2, 3), "did not leave in time", True)
        assert [event.dead for event in events(late, "worker_dead")] == [2, 3]
        assert notice(EpochIsBroken, late)
        survivors = job.report(0, 1, 4, 5)
        assert only(EpochPlan, survivors).plan.members == (0, 1, 4, 5)
        assert notice(NodeReleased, survivors) == NodeReleased(2, ()), "its agent ends what is left of it"

    def test_a_command_gives_another_time_and_a_signal_shortens_it(self) -> None:
        job = three_nodes()
        drain(job, nodes=(1,), deadline_s=300.0)
        told(job, 1, ordered=True)
        assert not job.wait(200.0)
        told(job, 1)
        assert events(job.wait(LIMITS.drain_s + 1.0), "worker_dead")

    def test_who_left_in_time_is_not_given_up(self) -> None:
        job = three_nodes()
        told(job, 1)
        job.leave(*range(6))
        assert not job.wait(LIMITS.drain_s + 1.0)
        job.ready(0, 1, 4, 5)
        assert not job.wait(LIMITS.drain_s + 1.0) and not events(job.actions, "worker_dead")

    def test_some_workers_of_a_change_have_not_left_in_time(self) -> None:
        """Those that have are not asked again."""
        job = three_nodes()
        told(job, 1)
        job.leave(0, 1, 3, 4, 5)
        assert job.state.phase is Phase.REPORTING
        published = only(EpochPlan, job.wait(LIMITS.drain_s + 1.0))
        assert published.plan.members == (0, 1, 4, 5)

    def test_a_job_that_ends_takes_its_time(self) -> None:
        """The others save, and so does this node, as long as it may."""
        job = Job().start()
        assert notices(told(job, 1)) == [StopTraining]
        assert not job.wait(LIMITS.drain_s + 1.0)

    def test_a_node_that_dies_on_the_way_was_not_late(self) -> None:
        job = three_nodes()
        told(job, 1)
        job.tell(NodeLost(node=1, cause="gone", time=0.0))
        job.report(0, 1, 4, 5)
        job.ready(0, 1, 4, 5)
        assert not job.wait(LIMITS.drain_s + 1.0)


class TestTogether:
    """More than half of the nodes are told to end by a signal: that is the end of the job."""

    def test_more_than_half_within_two_seconds(self) -> None:
        job = three_nodes()
        assert notices(told(job, 1)) == [PlanChange]
        job.wait(1.9)
        assert notices(told(job, 2)) == [StopTraining]
        ends = [action for w in range(6) for action in job.tell(ScriptEnded(w)) if isinstance(action, End)]
        assert [(end.code, end.reason) for end in ends] == [(143, "2 of 3 nodes were told to end at once")]

    def test_later_ones_leave_one_by_one(self) -> None:
        job = three_nodes()
        told(job, 1)
        job.wait(2.1)
        assert StopTraining not in notices(told(job, 2))

    def test_half_is_not_more_than_half(self) -> None:
        job = Job(workers=8, micro_batches=8).start_with(**REPLICA_PER_NODE)
        for node in (2, 3):
            assert StopTraining not in notices(told(job, node))
        assert notices(told(job, 1)) == [StopTraining]

    def test_one_node_told_twice_is_one(self) -> None:
        job = three_nodes()
        told(job, 1)
        assert StopTraining not in notices(told(job, 1))


class TestStop:
    def stop(self, job: Job, must_save: bool = False) -> tuple[object, list[Action]]:
        actions = job.tell(EndRequest(must_save, "answer/1"))
        return only(Reply, actions).answer, actions

    @pytest.mark.parametrize("must_save", [True, False])
    def test_a_job_that_saves(self, must_save: bool) -> None:
        job = Job().start_with(saves=True)
        answer, actions = self.stop(job, must_save)
        assert answer == Accepted("the job ends after an iteration, and is saved")
        assert notice(StopTraining, actions) == StopTraining(signal.SIGTERM)
        ends = [action for w in range(4) for action in job.tell(ScriptEnded(w)) if isinstance(action, End)]
        assert [(end.code, end.reason) for end in ends] == [(143, "stopped by resihp stop")]

    def test_a_job_that_does_not(self) -> None:
        job = Job().start()
        answer, actions = self.stop(job, must_save=True)
        assert isinstance(answer, Refused) and "was started without --save" in answer.reason and not notices(actions)
        answer, actions = self.stop(job)
        assert answer == Accepted("the job ends after an iteration, and nothing is saved")
        assert notices(actions) == [StopTraining]

    def test_before_training_it_is_answered_and_then_ends(self) -> None:
        job = Job()
        job.describe(0, saves=True)
        answer, _ = self.stop(job, must_save=True)
        assert isinstance(answer, Refused) and "has not begun to train" in answer.reason
        answer, actions = self.stop(job)
        assert isinstance(answer, Accepted) and isinstance(actions[0], Reply) and isinstance(actions[-1], End)

    def test_a_job_that_ends_already(self) -> None:
        ending, saving = Job().start(), Job().start()
        ending.tell(StopRequest(signal=signal.SIGINT, time=0.0))
        for worker in (0, 1):
            saving.kill(worker)
        only(EmergencyCheckpointOrder, saving.report(2, 3))
        for job in (ending, saving):
            answer, actions = self.stop(job)
            assert answer == Accepted("the job is ending already") and not notices(actions)
