"""The planner's process, asked for real."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from megatron_resihp.control.planner_process import UNANSWERED, PlannerProcess
from megatron_resihp.control.planning import request_of
from megatron_resihp.plan import ParallelPlan, Replica

PLAN = ParallelPlan((Replica(((0,), (1,)), (0, 1)),))
WAIT_S = 60.0


@pytest.fixture
def planner() -> Iterator[PlannerProcess]:
    process = PlannerProcess()
    yield process
    process.close()


def request(**job: Any) -> dict[str, Any]:
    return request_of("joint", {"chunks": [[0, 0, 2], [1, 2, 4]], **job}, 2, 2, PLAN, {0: 1.0, 1: 0.5}, {}, None)


def test_nobody_gets_the_answer_to_a_rehearsal(planner: PlannerProcess) -> None:
    """Which differs from that to the request."""
    planner.rehearse(request())
    unlike = planner.ask(request(arguments={}), WAIT_S)["no_plan"]
    assert unlike == planner.ask(request(arguments={}), WAIT_S)["no_plan"]
    assert unlike != planner.ask(request(), WAIT_S)["no_plan"]


def test_one_that_is_closed_is_not_started_again(planner: PlannerProcess) -> None:
    planner.close()
    planner.rehearse(request())
    assert planner.ask(request(), WAIT_S) == {"no_plan": "the job is ending", UNANSWERED: True}


def test_an_answer_that_takes_too_long_is_not_the_planners(planner: PlannerProcess) -> None:
    assert planner.ask(request(), 0.0) == {"no_plan": "no plan within 0 s", UNANSWERED: True}
    assert UNANSWERED not in planner.ask(request(), WAIT_S), "it has been started again"
