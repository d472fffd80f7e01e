# SPDX-License-Identifier: Apache-2.0
"""A link that fails again and again is remembered, until it has been good for a while."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from test_membership import Job, events, notices

from megatron_resihp.control.coordination.actions import Action, Phase
from megatron_resihp.control.coordination.state_machine.links import GOOD_S, FailedLinks
from megatron_resihp.plan.slots import renamed
from megatron_resihp.protocol.messages import CommunicationFailed
from megatron_resihp.protocol.notices import PlanChange

KEPT_APART = r"nodes 1 and 2 have failed to reach each other 2 times or more, and are kept apart until their link"


def fail(job: Job, one: int, other: int) -> list[Action]:
    """The link between two nodes of two workers each fails."""
    waiting = sorted(job.state.living)
    job.tell(CommunicationFailed(waiting[0], job.state.epoch, "Timed out waiting 600000ms"))
    actions: list[Action] = []
    for worker in waiting:
        lost = {one: other, other: one}.get(worker // 2)
        actions += job.report(worker, unreachable=[peer for peer in waiting if peer // 2 == lost])
    return actions


def without_node_2() -> Job:
    """Node 2 has been left out, since it and node 1 lost each other twice."""
    job = Job(workers=6, micro_batches=12).start()
    fail(job, 1, 2)
    fail(job, 1, 2)
    job.ready(0, 1, 2, 3)
    assert job.state.phase is Phase.RUNNING and job.state.plan is not None and job.state.plan.members == (0, 1, 2, 3)
    return job


def test_workers_that_come_back_are_kept_apart_until_the_link_has_been_good_for_a_while() -> None:
    job = without_node_2()
    for worker in (10, 11):
        actions = job.come_back(worker)
    [refused] = events(actions, "change_refused")
    assert refused.why.startswith("worker") and refused.reason.startswith(KEPT_APART)
    assert refused.reason.endswith(f", {GOOD_S:.0f} s from now")
    assert not notices(actions)
    assert not job.wait(GOOD_S - 1.0)
    [change] = notices(job.wait(1.0))
    assert change is PlanChange


def test_a_plan_that_would_bring_them_together_is_refused() -> None:
    job = without_node_2()
    together = job.state.first
    assert together is not None
    for worker in (10, 11):
        job.come_back(worker)
    asked = renamed(together, lambda worker: {4: 10, 5: 11}.get(worker, worker))
    [refused] = events(job.apply(asked), "change_refused")
    assert refused.reason.startswith(KEPT_APART)


def test_two_failures_long_after_each_other_are_two_passing_faults() -> None:
    job = Job(workers=6, micro_batches=12).start()
    fail(job, 1, 2)
    job.ready(*sorted(job.state.living))
    job.wait(GOOD_S)
    assert not events(fail(job, 1, 2), "link_failed")
    assert events(fail(job, 1, 2), "link_failed")


def test_while_a_link_is_remembered_nothing_is_written_until_something_is_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each write may be a transaction in etcd, and the hour has thousands of turns of the coordinator."""
    job = without_node_2()
    written = list[Sequence[str]]()
    write = job.membership._write
    monkeypatch.setattr(job.membership, "_write", lambda lines: (written.append(lines), write(lines)))
    for _ in range(1000):
        job.wait(0.5)
        job.membership.write_down()
    assert not written
    actions = job.come_back(10)
    assert any("Passed" in line for line in written[0]), "the time is told before what it may matter to"
    [refused] = events(actions, "change_refused")
    assert refused.reason.endswith(f", {GOOD_S - 500.0:.0f} s from now")
    job.come_back(11)
    for _ in range(int(GOOD_S - 501.0)):
        assert not job.wait(1.0)
    assert notices(job.wait(1.0)) == [PlanChange], "the link is good again"


def test_each_coordinator_that_takes_over_counts_the_time_since_the_last_decision() -> None:
    """The one before has written nothing since, and is lost with what it knows."""
    job = without_node_2()
    for worker in (10, 11):
        job.now += GOOD_S / 3  # what that one counts is lost
        job.membership.take_over("process 7 on login", job.now)
        [refused] = events(job.come_back(worker), "change_refused")
    assert refused.reason.endswith(f", {GOOD_S / 3:.0f} s from now")
    job.now += GOOD_S
    assert notices(job.membership.take_over("process 8 on login", job.now)) == [PlanChange]


def test_a_coordinator_whose_clock_is_behind_takes_over() -> None:
    job = without_node_2()
    job.membership.take_over("process 7 on login", job.now - 100.0)
    [refused] = events(job.come_back(10), "change_refused")
    assert refused.reason.endswith(f", {GOOD_S:.0f} s from now")


@pytest.fixture
def links() -> FailedLinks:
    """Of nodes of two workers each."""
    return FailedLinks(lambda worker: worker // 2 % 3)


def test_what_is_remembered_outlives_deaths_and_new_ids(links: FailedLinks) -> None:
    for epoch in (1, 2):
        links.note(epoch, {2: [4], 3: [4]})
    links.forget([0])
    assert links.kept_apart([10], [2, 3]), "worker 10 has the place of worker 4"
    assert not links.kept_apart([10], [0, 1]) and not links.kept_apart([6], [2, 4])


def test_each_failure_begins_the_while_anew(links: FailedLinks) -> None:
    for epoch in (1, 2):
        links.note(epoch, {2: [4]})
    assert not links.passed(GOOD_S / 2)
    links.note(3, {3: [5]})
    assert not links.passed(GOOD_S * 0.75) and links.kept_apart([4], [2])
    assert links.passed(GOOD_S / 4) and not links.kept_apart([4], [2])


def test_a_link_that_is_remembered_needs_no_second_failure(links: FailedLinks) -> None:
    for epoch in (1, 2):
        links.note(epoch, {2: [4]})
    links.forget([0])
    links.note(3, {3: [5]})
    separated = links.separated({2, 3, 4, 5}, lambda without: 4 - len(without))
    assert separated is not None and "can't reach each other" in separated.why


def test_one_failure_more_ends_no_job_that_can_spare_neither_side(links: FailedLinks) -> None:
    for epoch in (1, 2):
        links.note(epoch, {2: [4]})
    links.forget([0])
    links.note(3, {3: [5]})
    assert links.separated({2, 3, 4, 5}, lambda without: None) is None
    links.note(4, {3: [5]})
    separated = links.separated({2, 3, 4, 5}, lambda without: None)
    assert separated is not None and not separated.without


def test_workers_of_one_node_are_no_link(links: FailedLinks) -> None:
    for epoch in (1, 2):
        links.note(epoch, {2: [3]})
    assert not links.good_in and not links.passed(0.0)
