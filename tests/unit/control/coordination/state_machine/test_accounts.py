# SPDX-License-Identifier: Apache-2.0
"""Who may go on after a partition: the rule by itself, and what the coordinator makes of lost nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_membership import LIMITS, REPLICA_PER_NODE, Job, events, only

from megatron_resihp.control import exit_codes
from megatron_resihp.control.coordination.actions import Action, AskDown, End, Phase
from megatron_resihp.control.coordination.state_machine.accounts import Accounts, may_go_on
from megatron_resihp.protocol.messages import (
    EmergencyCheckpointWritten,
    HeartbeatsMissing,
    NodeLost,
    NodesDown,
    ProcessExited,
)
from megatron_resihp.protocol.published import EmergencyCheckpointOrder, EpochPlan

SILENT = "no heartbeat for 30.0 s"


class TestTheRule:
    @given(sides=st.lists(st.sampled_from(["coordinator's", "other", "told dead", "untold"]), min_size=1, max_size=9))
    def test_of_two_sides_at_most_one_may_go_on(self, sides: list[str]) -> None:
        """Whatever their sizes; of those who died, only the coordinator's side has been told."""
        with_coordinator = sides.count("coordinator's") + sides.count("told dead")
        one = may_go_on(with_coordinator, len(sides), has_coordinator=True)
        other = may_go_on(sides.count("other"), len(sides), has_coordinator=False)
        assert not (one and other)

    @pytest.mark.parametrize(
        ("accounted", "members", "with_coordinator", "without"),
        [(1, 1, True, True), (1, 2, True, False), (2, 3, True, True), (1, 3, False, False), (2, 4, True, False)],
    )
    def test_half_is_enough_with_the_coordinator(
        self, accounted: int, members: int, with_coordinator: bool, without: bool
    ) -> None:
        assert may_go_on(accounted, members, has_coordinator=True) == with_coordinator
        assert may_go_on(accounted, members, has_coordinator=False) == without

    def test_who_is_no_member_does_not_count(self) -> None:
        accounts = Accounts()
        accounts.lose([4, 5, 6])
        assert not accounts.short((0, 1)) and accounts.short((0, 4, 5))
        assert accounts.hear_of([5]) and not accounts.hear_of([5])
        assert not accounts.short((0, 4, 5)[:2]) and not accounts.short((0, 4, 5))


def nodes(number: int) -> Job:
    """Of two workers each, which are a replica together."""
    return Job(workers=2 * number, micro_batches=2 * number).start_with(**REPLICA_PER_NODE)


def lose(job: Job, *lost: int) -> list[Action]:
    return [action for node in lost for action in job.tell(NodeLost(node, SILENT, 0.0))]


def written(job: Job, *workers: int) -> End:
    return only(End, [action for w in workers for action in job.tell(EmergencyCheckpointWritten(w))])


class TestLostNodes:
    def test_node_0_alone_of_three_saves_and_ends(self) -> None:
        job = nodes(3)
        lose(job, 1, 2)
        assert only(AskDown, job.report(0, 1)) == AskDown((1, 2))
        order = only(EmergencyCheckpointOrder, job.tell(NodesDown((), 0.0)))
        assert set(order.writers) == {0, 1}
        end = written(job, *order.writers)
        assert end.code == exit_codes.RETRY
        assert end.reason == (
            "only 2 of 6 workers are accounted for; lost without a word, and perhaps alive: 2, 3, 4, 5"
        )

    def test_a_job_of_two_nodes_survives_one(self) -> None:
        job = nodes(2)
        lose(job, 1)
        assert only(EpochPlan, job.report(0, 1)).plan.members == (0, 1)

    def test_two_of_three_go_on_and_then_one_of_two(self) -> None:
        """It is the last epoch's members that count."""
        job = nodes(3)
        for lost, rest in ((1, (0, 1, 4, 5)), (2, (0, 1))):
            lose(job, lost)
            assert only(EpochPlan, job.report(*rest)).plan.members == rest
            job.ready(*rest)

    def test_an_epoch_that_has_not_begun_does_not_count(self) -> None:
        """The side of node 2 may not know of it."""
        job = nodes(3)
        lose(job, 1)
        only(EpochPlan, job.report(0, 1, 4, 5))
        lose(job, 2)
        assert only(AskDown, job.report(0, 1)) == AskDown((1, 2))

    def test_nodes_that_slurm_knows_to_be_down_are_no_other_side(self) -> None:
        job = nodes(3)
        lose(job, 1, 2)
        job.report(0, 1)
        assert only(EpochPlan, job.tell(NodesDown((2,), 0.0))).plan.members == (0, 1)

    def test_no_answer_counts_as_none_down(self) -> None:
        job = nodes(3)
        lose(job, 1, 2)
        job.report(0, 1)
        assert not job.wait(LIMITS.word_s - 1.0)
        only(EmergencyCheckpointOrder, job.wait(1.0))

    def test_one_more_that_is_lost_meanwhile_is_asked_about(self) -> None:
        job = nodes(5)
        lose(job, 1, 2, 3)
        assert only(AskDown, job.report(0, 1, 8, 9)) == AskDown((1, 2, 3))
        assert only(AskDown, lose(job, 4)) == AskDown((4,))

    def test_workers_that_really_died_are_accounted_for(self) -> None:
        """Their agents have told so, though most of their nodes are lost then: one worker goes on."""
        job = Job(workers=4, pipeline=1).start()
        for worker in (1, 2, 3):
            job.kill(worker)
        lose(job, 1)
        assert only(EpochPlan, job.report(0)).plan.members == (0,)

    def test_word_that_comes_after_the_loss_counts(self) -> None:
        """Of deaths that agents had told of before they were cut off."""
        job = nodes(3)
        lose(job, 1, 2)
        job.report(0, 1)
        assert job.state.phase is Phase.REPORTING
        published = only(EpochPlan, job.kill(4))
        assert published.plan.members == (0, 1)

    def test_workers_on_node_0_are_always_accounted_for(self) -> None:
        job = Job(workers=3, pipeline=1, micro_batches=3, per_node=3).start()
        job.kill(1)
        job.wait(LIMITS.report_s - 1.0)
        job.report(0)
        assert only(EpochPlan, job.wait(2.0)).plan.members == (0,)


class TestGivenUp:
    """Workers that do not report, on nodes that are not lost, or not yet."""

    def gives_up(self) -> Job:
        """Node 0 has not heard of the workers of two other nodes."""
        job = nodes(3)
        job.kill(1)
        job.report(0)
        job.wait(LIMITS.report_s)
        assert job.state.phase is Phase.REPORTING and job.state.living == {0}
        return job

    @pytest.mark.parametrize("word", [ProcessExited(3, -9, 0.0), HeartbeatsMissing(3, 6.0, 0.0)])
    def test_their_agents_tell_of_their_end(self, word: ProcessExited | HeartbeatsMissing) -> None:
        job = self.gives_up()
        assert job.tell(word), "with it half of them are accounted for"
        assert job.state.phase is not Phase.REPORTING

    def test_their_agents_are_cut_off(self) -> None:
        """Node 0 notices that later than it gives them up."""
        job = self.gives_up()
        assert only(AskDown, lose(job, 1)) == AskDown((1,))
        job.tell(NodesDown((), 0.0))
        assert job.state.phase is Phase.REPORTING, "word of node 2 may come"
        only(EmergencyCheckpointOrder, job.wait(LIMITS.word_s))
        assert events(job.actions, "worker_dead")
