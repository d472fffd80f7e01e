# SPDX-License-Identifier: Apache-2.0
"""The planner's process, asked for real."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import pytest

from megatron_resihp.control.replanning import planner_process
from megatron_resihp.control.replanning.planner_process import UNANSWERED, PlannerProcess
from megatron_resihp.control.replanning.planning import request_of
from megatron_resihp.plan import ParallelPlan, Replica

PLAN = ParallelPlan((Replica(((0,), (1,)), (0, 1)),))
WAIT_S = 60.0


@pytest.fixture
def planner() -> Iterator[PlannerProcess]:
    process = PlannerProcess()
    yield process
    process.close()


def the_process() -> psutil.Process:
    """That plans."""
    children = psutil.Process().children()
    [found] = [child for child in children if "megatron_resihp.control.replanning.planning" in child.cmdline()]
    return found


def niceness() -> int:
    return int(the_process().nice())


def request(**job: Any) -> dict[str, Any]:
    return request_of("joint", {"chunks": [[0, 0, 2], [1, 2, 4]], **job}, 2, 2, PLAN, {0: 1.0, 1: 0.5}, {}, None)


def test_nobody_gets_the_answer_to_a_rehearsal(planner: PlannerProcess) -> None:
    """Which differs from that to the request."""
    planner.rehearse(request())
    unlike = planner.ask(request(arguments={}), WAIT_S)["no_plan"]
    assert niceness() == psutil.Process().nice(), "training stands still for it"
    assert unlike == planner.ask(request(arguments={}), WAIT_S)["no_plan"]
    assert unlike != planner.ask(request(), WAIT_S)["no_plan"]


def test_signals_to_all_processes_of_a_job_do_not_end_it(planner: PlannerProcess) -> None:
    """As SLURM sends them: a save that is asked for is no reason to be without plans."""
    planner.ask(request(), WAIT_S)
    process = the_process()
    for number in (signal.SIGUSR2, signal.SIGTERM):
        process.send_signal(number)
    assert UNANSWERED not in planner.ask(request(), WAIT_S)
    assert the_process() == process


def test_one_that_is_closed_is_not_started_again(planner: PlannerProcess) -> None:
    planner.close()
    planner.rehearse(request())
    assert planner.ask(request(), WAIT_S) == {"no_plan": "the job is ending", UNANSWERED: True}


def test_an_answer_that_takes_too_long_is_not_the_planners(planner: PlannerProcess) -> None:
    assert planner.ask(request(), 0.0) == {"no_plan": "no plan within 0 s", UNANSWERED: True}
    assert UNANSWERED not in planner.ask(request(), WAIT_S), "it has been started again"


def test_one_that_nobody_stands_still_for_stands_back() -> None:
    process = PlannerProcess(low_priority=True)
    try:
        process.ask(request(), WAIT_S)
        assert niceness() == 19
    finally:
        process.close()


def test_one_that_was_too_late_is_soon_ready_again(planner: PlannerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """It practises the same once more, and nobody waits for that."""
    written: queue.Queue[Mapping[str, Any]] = queue.Queue()
    write = planner_process._write

    def noted(process: Any, request: Mapping[str, Any], deadline: float) -> bool:
        written.put(request)
        return write(process, request, deadline)

    monkeypatch.setattr(planner_process, "_write", noted)
    planner.rehearse(request())
    rehearsed = written.get(timeout=WAIT_S)
    planner.ask(request(arguments={}), 0.0)
    assert written.get(timeout=WAIT_S) == request(arguments={})
    assert written.get(timeout=WAIT_S) == rehearsed and rehearsed["rehearsal"]


def test_a_question_too_large_for_a_pipe_is_given_up_in_time(planner: PlannerProcess) -> None:
    """The process, which has just been started, doesn't read yet."""
    began = time.monotonic()
    assert UNANSWERED in planner.ask(request(arguments={"filler": "x" * 10_000_000}), 0.01)
    assert time.monotonic() - began < WAIT_S / 2
