# SPDX-License-Identifier: Apache-2.0
"""Calls are made when their time has come, in whatever order they were asked for."""

from functools import partial

from megatron_resihp.control.node.schedule import Schedule


def test_calls_are_made_by_their_times() -> None:
    made: list[str] = []
    schedule = Schedule()
    schedule.add(3.0, partial(made.append, "late"))
    schedule.add(1.0, partial(made.append, "early"))
    schedule.run_due(0.5)
    assert made == []
    schedule.run_due(1.0)
    assert made == ["early"]
    schedule.run_due(9.0)
    schedule.run_due(9.0)
    assert made == ["early", "late"]


def test_replaced_calls_are_never_made() -> None:
    made: list[str] = []
    schedule = Schedule()
    schedule.add(1.0, partial(made.append, "before"))
    schedule.replace((2.0, partial(made.append, "after")))
    schedule.run_due(9.0)
    assert made == ["after"]
