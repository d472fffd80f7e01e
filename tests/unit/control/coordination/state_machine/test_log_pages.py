# SPDX-License-Identifier: Apache-2.0
"""What is logged is written once, whoever logs it, and is logged again if the worker that had it died too early."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_membership import Job, only

from megatron_resihp.protocol.logs import LogPage, LogsWanted, Scalar, TensorBoardWish
from megatron_resihp.protocol.published import EpochPlan

WANTED = LogsWanted(0, TensorBoardWish("/logs", 1000), None)
LOGGER = 3
"""The last rank."""


def page(iteration: int, worker: int = LOGGER, call: int = 0, value: float = 1.0) -> LogPage:
    return LogPage(worker, call, iteration, 0.0, (Scalar("lm loss", value, iteration),))


def logging(*pages: LogPage, **options: Any) -> Job:
    job = Job(**options)
    assert job.tell(WANTED) == [WANTED]
    job.start()
    for each in pages:
        assert job.tell(each) == [each]
    return job


def commit_after(job: Job, died: int, survivors: tuple[int, ...], **record: Any) -> Any:
    """Where survivors go on from. `record`: what is special about their records."""
    job.kill(died)
    actions = [action for each in survivors for action in job.report(each, record=replace(job.record(each), **record))]
    return only(EpochPlan, actions).commit


def test_a_page_is_written_once() -> None:
    job = logging(page(0), page(1))
    assert not job.tell(page(1, worker=2, value=2.0)), "its successor logs the iteration again"
    assert job.tell(page(2, worker=2))
    assert not job.tell(page(1))


def test_logs_of_evaluations_after_training_follow_those_of_training() -> None:
    job = logging(page(9), page(9, call=1), page(9, call=2))
    assert not job.tell(page(9, call=1)) and not job.tell(page(9))


def test_nothing_is_written_that_was_not_asked_for() -> None:
    assert not Job().start().tell(page(1))


def test_the_first_worker_says_what_is_wanted_and_once() -> None:
    job = Job()
    assert job.tell(WANTED) == [WANTED]
    assert not job.tell(WANTED)


def test_of_a_worker_that_was_given_up_nothing_is_written() -> None:
    """It may be stopped in the middle of that; whoever follows it logs the same."""
    job = logging(page(4))
    job.kill(LOGGER)
    assert not job.tell(page(5))
    assert job.tell(page(5, worker=2))


def test_an_iteration_that_only_the_dead_worker_has_logged_and_not_sent_is_logged_again() -> None:
    """All others compute iteration 5; what was logged after iteration 4 has died with its worker."""
    commit = commit_after(logging(page(3)), LOGGER, (0, 1, 2))
    assert (commit.iteration, commit.replay, commit.entry) == (4, True, 4)


@pytest.mark.parametrize("wanted", [True, False], ids=["it is there", "no logs are wanted"])
def test_an_iteration_is_not_logged_again_without_need(wanted: bool) -> None:
    job = logging(page(3), page(4)) if wanted else Job().start()
    commit = commit_after(job, LOGGER, (0, 1, 2))
    assert (commit.iteration, commit.replay, commit.entry) == (4, False, 5)


def test_before_the_first_step_there_is_nothing_to_log_again() -> None:
    job = logging()
    job.iteration = 1
    commit = commit_after(job, LOGGER, (0, 1, 2), outcomes={})
    assert (commit.iteration, commit.replay) == (0, False)


def test_workers_that_had_left_the_loop_return_to_it_for_what_is_missing() -> None:
    commit = commit_after(logging(page(3)), LOGGER, (0, 1, 2), position=2)
    assert (commit.iteration, commit.replay, commit.position) == (4, True, 0)


def test_a_call_after_training_that_is_not_logged_is_made_again() -> None:
    commit = commit_after(logging(page(4), page(4, call=1)), LOGGER, (0, 1, 2), position=3)
    assert (commit.replay, commit.position) == (False, 2)
