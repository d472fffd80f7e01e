# SPDX-License-Identifier: Apache-2.0
"""The planner's process, asked for real."""

from __future__ import annotations

import json
import os
import queue
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from megatron_resihp.control.replanning.processes import planner_process, planning
from megatron_resihp.control.replanning.processes.planner_process import PlannerProcess
from megatron_resihp.plan import Chunk, ParallelPlan, Replica
from megatron_resihp.protocol.planning import PLANNER_ANSWERS, PLANNER_REQUESTS, KnownJob, NoPlan, PlannerRequest
from megatron_resihp.protocol.version import VERSION
from megatron_resihp.protocol.wire import COORDINATOR

PLAN = ParallelPlan((Replica(((0,), (1,)), (0, 1)),))
WAIT_S = 60.0
MANY = 1100


@pytest.fixture
def planner() -> Iterator[PlannerProcess]:
    process = PlannerProcess()
    yield process
    process.close()


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """More than select can wait for, as on node 0 of a large job."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * MANY:
        pytest.skip(f"no more than {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * MANY), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(MANY)]
    yield
    for file in files:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def the_process() -> psutil.Process:
    """That plans."""
    children = psutil.Process().children()
    [found] = [
        child for child in children if "megatron_resihp.control.replanning.processes.planning" in child.cmdline()
    ]
    return found


def niceness() -> int:
    return int(the_process().nice())


def request(arguments: dict[str, Any] | None = None) -> PlannerRequest:
    own = (Chunk(0, 0, 2), Chunk(1, 2, 4))
    return PlannerRequest("joint", KnownJob(1, 2, arguments), own, 2, 2, PLAN, {0: 1.0, 1: 0.5})


def no_plan(planner: PlannerProcess, request: PlannerRequest) -> str:
    """Why the planner itself has none."""
    answer = planner.ask(request, WAIT_S)
    assert isinstance(answer, NoPlan) and not answer.unanswered
    return answer.reason


def test_nobody_gets_the_answer_to_a_rehearsal(planner: PlannerProcess) -> None:
    """Which differs from that to the request."""
    planner.rehearse(request())
    unlike = no_plan(planner, request(arguments={}))
    assert niceness() == psutil.Process().nice(), "training stands still for it"
    assert unlike == no_plan(planner, request(arguments={}))
    assert unlike != no_plan(planner, request())


def test_signals_to_all_processes_of_a_job_do_not_end_it(planner: PlannerProcess) -> None:
    """As SLURM sends them: a save that is asked for is no reason to be without plans."""
    planner.ask(request(), WAIT_S)
    process = the_process()
    for number in (signal.SIGUSR2, signal.SIGTERM):
        process.send_signal(number)
    assert no_plan(planner, request())
    assert the_process() == process


def test_one_that_is_closed_is_not_started_again(planner: PlannerProcess) -> None:
    planner.close()
    planner.rehearse(request())
    assert planner.ask(request(), WAIT_S) == NoPlan("the job is ending", unanswered=True)


def test_one_that_ends_before_its_answer_is_told_from_one_that_is_late(
    planner: PlannerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner_process, "_read_line", lambda process, deadline: b"")
    assert planner.ask(request(), WAIT_S) == NoPlan("the planner's process has ended", unanswered=True)


def test_an_answer_that_takes_too_long_is_not_the_planners(planner: PlannerProcess) -> None:
    assert planner.ask(request(), 0.0) == NoPlan("no plan within 0 s", unanswered=True)
    assert no_plan(planner, request()), "it has been started again"


def test_one_that_nobody_stands_still_for_stands_back() -> None:
    process = PlannerProcess(low_priority=True)
    try:
        process.ask(request(), WAIT_S)
        assert niceness() == 19
    finally:
        process.close()


def test_one_that_was_too_late_is_soon_ready_again(planner: PlannerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """It practises the same once more, and nobody waits for that."""
    written: queue.Queue[PlannerRequest] = queue.Queue()
    write = planner_process._write

    def noted(process: Any, request: PlannerRequest, deadline: float) -> bool:
        written.put(request)
        return write(process, request, deadline)

    monkeypatch.setattr(planner_process, "_write", noted)
    planner.rehearse(request())
    rehearsed = written.get(timeout=WAIT_S)
    planner.ask(request(arguments={}), 0.0)
    assert written.get(timeout=WAIT_S) == request(arguments={})
    assert written.get(timeout=WAIT_S) == rehearsed and rehearsed == replace(request(), rehearsal=True)


def test_a_question_too_large_for_a_pipe_is_given_up_in_time(planner: PlannerProcess) -> None:
    """The process, which has just been started, doesn't read yet."""
    began = time.monotonic()
    answer = planner.ask(request(arguments={"filler": "x" * 10_000_000}), 0.01)
    assert isinstance(answer, NoPlan) and answer.unanswered
    assert time.monotonic() - began < WAIT_S / 2


def test_it_answers_a_launcher_that_has_many_files_open(many_open_files: None, planner: PlannerProcess) -> None:
    planner.rehearse(request())
    assert no_plan(planner, request())


ON_A_FULL_DISK = """
from megatron_resihp.control.replanning.processes import planning
from megatron_resihp.protocol.planning import NoPlan

def answer(request, on_compiling):
    on_compiling()
    return NoPlan("no strategy has one")

planning.answer = answer
planning.main()
"""


def test_one_that_makes_machine_code_and_can_not_say_so_goes_on() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", ON_A_FULL_DISK], input=PLANNER_REQUESTS.write(request(), COORDINATOR), stderr=full,
            stdout=subprocess.PIPE, text=True, timeout=WAIT_S,
        )  # fmt: skip
    assert PLANNER_ANSWERS.read(done.stdout).body == NoPlan("no strategy has one")


@pytest.mark.parametrize("place", ["_write", "_read_line", "start"])
def test_one_that_can_not_be_asked_whatever_is_wrong_has_no_answer(
    planner: PlannerProcess, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """There are plans without it. The threads that ask have other things to do."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("nobody expects this")

    if place == "start":
        monkeypatch.setattr(subprocess, "Popen", fail)
    else:
        monkeypatch.setattr(planner_process, place, fail)
    planner.start()
    planner.rehearse(request())
    why = "the planner's process can't be asked: RuntimeError: nobody expects this"
    assert planner.ask(request(), WAIT_S) == NoPlan(why, unanswered=True)


def test_an_answer_that_can_not_be_read_is_none(planner: PlannerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another installation, say. It names sender and field."""
    said = {"protocol": VERSION, "sender": "the planner", "kind": "NoPlan", "id": None, "body": {"reason": 7}}
    monkeypatch.setattr(planner_process, "_read_line", lambda process, deadline: json.dumps(said).encode() + b"\n")
    answer = planner.ask(request(), WAIT_S)
    assert answer == NoPlan("NoPlan from the planner: 'reason' is 7, not text", unanswered=True)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "a request to the planner from somebody: it is not JSON (JSONDecodeError)"),
        (PLANNER_REQUESTS.write(request(), COORDINATOR).replace('"own"', '"other"'),
         "PlannerRequest from the coordinator: 'own' is missing"),
    ],
)  # fmt: skip
def test_a_request_that_can_not_be_read_ends_no_planner(line: str, reason: str) -> None:
    assert planning._answer_to(line) == NoPlan(reason)
