# SPDX-License-Identifier: Apache-2.0
"""The bus: who hears which event, in which order, and what becomes of a subscriber that fails."""

from __future__ import annotations

import pytest

from megatron_resihp.events.bus import EventBus
from megatron_resihp.events.event import Event
from megatron_resihp.events.injections import Drill
from megatron_resihp.events.training import Agreed, AgreedStep, Iteration
from megatron_resihp.events.workers import NodeLeft

DRILL = Drill(time=1.0, action="kill", target=3)
STEP = Iteration(time=2.0, iteration=7)


def test_each_hears_of_the_classes_that_it_wants() -> None:
    bus, heard, steps, all_events = EventBus(), list[Event](), list[Event](), list[Event]()
    bus.subscribe(heard.append, Drill, NodeLeft)
    bus.subscribe(steps.append, AgreedStep)
    bus.subscribe(all_events.append, Event)
    agreed = Agreed(time=3.0, iteration=7)
    for event in (DRILL, STEP, agreed):
        bus.publish(event)
    assert (heard, steps, all_events) == ([DRILL], [STEP, agreed], [DRILL, STEP, agreed])


def test_subscribers_are_told_in_their_order() -> None:
    bus, told = EventBus(), list[str]()
    for name in ("log", "progress", "replanner"):
        bus.subscribe(lambda event, name=name: told.append(name), Event)
    bus.publish(DRILL)
    assert told == ["log", "progress", "replanner"]


def test_one_that_fails_keeps_the_event_from_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    bus, heard = EventBus(), list[Event]()

    def fail(event: Event) -> None:
        raise RuntimeError("no room")

    bus.subscribe(fail, Event)
    bus.subscribe(heard.append, Event)
    bus.publish(DRILL)
    bus.publish(STEP)
    assert heard == [DRILL, STEP]
    assert capsys.readouterr().err.count("RuntimeError: no room") == 2


def test_what_is_published_by_a_subscriber_comes_after_what_it_heard() -> None:
    bus, log = EventBus(), list[Event]()
    bus.subscribe(log.append, Event)
    bus.subscribe(lambda event: bus.publish(STEP), Drill)
    bus.publish(DRILL)
    assert log == [DRILL, STEP]


def test_after_the_end_nobody_hears_anything() -> None:
    bus, heard = EventBus(), list[Event]()
    bus.subscribe(heard.append, Event)
    bus.close()
    bus.publish(DRILL)
    assert not heard
