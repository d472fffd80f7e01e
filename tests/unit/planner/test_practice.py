# SPDX-License-Identifier: Apache-2.0
"""What an installation compiles at its set-up is all that planners need."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress

import pytest
from numba import njit
from numba.core import event
from planner_instances import first_plan, healthy, job

from megatron_resihp.pipeline.compiled import PlanningClock
from megatron_resihp.planner import NoPlanError
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.practice import practise
from megatron_resihp.planner.strategies.registry import STRATEGIES


@pytest.fixture(scope="module")
def practised() -> None:
    practise()


@pytest.fixture
def functions() -> Iterator[list[str]]:
    """The functions that were compiled meanwhile."""
    found: list[str] = []

    class Names(event.Listener):
        def on_start(self, event: event.Event) -> None:
            found.append(event.data["dispatcher"].__name__)

        def on_end(self, event: event.Event) -> None:
            pass

    names = Names()
    event.register("numba:compile", names)
    yield found
    event.unregister("numba:compile", names)


@pytest.mark.usefixtures("practised")
@pytest.mark.parametrize("name", STRATEGIES)
def test_no_strategy_compiles_anything_in_a_job(name: str, functions: list[str]) -> None:
    """Of another model, and in another layout, than what was practised."""
    cost = job(layers=12, micro_batches=12)
    plan = first_plan(cost, tensor=2, replicas=2, pipeline=3)
    for health in (healthy(plan, slow={2: 0.6}), healthy(plan, dead=(5,)), healthy(plan, dead=(5, 6), slow={2: 0.6})):
        with suppress(NoPlanError):
            evaluate(STRATEGIES[name].strategy(plan, health, cost), health, cost)
    assert not functions


def test_compiling_is_no_planning() -> None:
    """A clock that ticks once whenever it is read."""
    ticks, told = itertools.count(), []

    @njit
    def twice(number: int) -> int:
        return 2 * number

    with PlanningClock(lambda: float(next(ticks)), lambda: told.append("compiling")) as clock:
        began = clock()
        assert twice(2) == 4
        assert clock() - began == 2.0, "of four readings, two were the compiler's"
        twice(3)
        assert clock() - began == 3.0
    assert told == ["compiling"]
