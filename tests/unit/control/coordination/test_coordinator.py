# SPDX-License-Identifier: Apache-2.0
"""The coordinator on a store and a clock that the tests play: what it hears in which order, and when it gives up."""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from replayed import entries_in, replay

from megatron_resihp.control import exit_codes
from megatron_resihp.control.coordination import coordinator
from megatron_resihp.control.coordination.actions import Limits
from megatron_resihp.control.coordination.coordinator import Coordinator
from megatron_resihp.control.coordination.decisions.entries import Entry, Step
from megatron_resihp.control.coordination.decisions.recorded import Write
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.events.training import Iteration
from megatron_resihp.plan import Chunk, Shard
from megatron_resihp.planner import NoPlanError
from megatron_resihp.protocol import published
from megatron_resihp.protocol.job import JobDescription
from megatron_resihp.protocol.logs import LogPage, LogsWanted, Place
from megatron_resihp.protocol.messages import (
    MESSAGES,
    EmergencyCheckpointWritten,
    EventsReported,
    JobStarted,
    Message,
    ProcessExited,
    Ready,
    SaveRequest,
    ScriptFailed,
    SurvivorReport,
)
from megatron_resihp.protocol.notices import NOTICES, Notice, SaveOrder, WorkersGivenUp
from megatron_resihp.protocol.published import DECISIONS, EmergencyCheckpointOrder, EpochPlan
from megatron_resihp.protocol.records import IterationPhase, Record
from megatron_resihp.protocol.wire import Letter

REPORT_S = 60.0
STARTED = JobStarted(0, JobDescription(1, 1, 4, (Chunk(0, 0, 3),), 8, False, True))
END = ScriptFailed(0, "enough", 1)


class Played:
    """A store whose inbox is a script: a message, or seconds that pass without one. Its time is the clock's."""

    def __init__(self, *script: Message | Letter[Message] | float) -> None:
        self.script = deque(script)
        self.now = 1000.0
        self.values: dict[str, str] = {}

    def take(self, queue: str, timeout_s: float) -> list[str]:
        if not self.script and not timeout_s:
            return []
        assert self.script, "the coordinator goes on after the end"
        told = self.script[0]
        if not isinstance(told, float):
            self.script.popleft()
            letter = told if isinstance(told, Letter) else Letter("a process", told)
            return [MESSAGES.write(letter.body, letter.sender, letter.id)]
        if timeout_s:
            self.script.popleft()
            self.now += told
        return []

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def set_once(self, key: str, value: str) -> str:
        return self.values.setdefault(key, value)

    def delete(self, key: str) -> None:
        self.values.pop(key, None)

    def delete_all(self, prefix: str) -> None:
        """There are no keys of torch."""


def keep(entries: list[Entry]) -> Write:
    """A log that is a list."""
    return lambda lines: entries.extend(entries_in(lines))


def injection(action: str, worker: int, struck_at: float) -> EventsReported:
    event = {"event": "drill", "time": struck_at, "epoch": 0, "worker": worker, "action": action, "target": worker}
    return EventsReported(worker, (event,))


def ready(worker: int, epoch: int) -> Ready:
    return Ready(worker, epoch, {"0/0": "a"}, (9000 + worker,), 0, 0)


def report(worker: int) -> SurvivorReport:
    record = Record(5, IterationPhase.COMPUTE, counters={n: {"iteration": n - 1} for n in (4, 5)})
    return SurvivorReport(worker, 0, record, (Shard(0, 3, 0, 1),))


def trained_until_a_death() -> list[Message | float]:
    return [STARTED, *(ready(worker, 0) for worker in range(4)), 0.5, ProcessExited(3, -9, 1.0)]


def dead_after(*script: Message | float) -> list[int]:
    """Who was given up in a job in which worker 3 dies, and this follows."""
    store = Played(*trained_until_a_death(), *script, END)
    events: list[Any] = []
    limits = Limits(report_s=REPORT_S)
    Coordinator(store, events.append, JobSize(4, 1), [], limits, clock=lambda: store.now).run()  # type: ignore[arg-type]
    return [event.dead for event in events if event.name == "worker_dead"]


HALF_SECONDS = [0.5] * int(2 * REPORT_S + 1)


def test_who_does_not_report_in_time_is_given_up() -> None:
    assert dead_after(report(0), report(1), *HALF_SECONDS) == [3, 2]


def test_who_has_reported_in_time_is_heard_first() -> None:
    """Their messages may wait long on a busy machine."""
    almost = HALF_SECONDS[: int(2 * REPORT_S - 2)]
    assert dead_after(*almost, 4.0, report(0), report(1), report(2)) == [3]


def test_a_coordinator_that_was_stopped_gives_up_nobody() -> None:
    """With node 0 for an hour, and its workers too: they report a while after it goes on."""
    assert dead_after(0.5, 3600.0, *[0.5] * 20, report(0), report(1), report(2)) == [3]
    assert dead_after(0.5, 3600.0, *HALF_SECONDS) == [3, 0, 1, 2], "but not for ever"


def test_a_clock_that_is_set_gives_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    later = iter(range(0, 10_000_000, 3600))
    began = time.time()
    monkeypatch.setattr(coordinator.time, "time", lambda: began + next(later))
    assert dead_after(0.5, report(0), 0.5, report(1), 0.5, report(2)) == [3]


def saved(worker: int) -> EmergencyCheckpointWritten:
    return EmergencyCheckpointWritten(worker)


REPORTED = (report(0), report(1), report(2))


def ends_after(store: Played, code: int = exit_codes.RETRY, **options: Any) -> list[Any]:
    """The events of a job that ends with this code."""
    events: list[Any] = []
    options = {"clock": lambda: store.now, **options}
    made = Coordinator(store, events.append, JobSize(4, 1), [], Limits(), **options)  # type: ignore[arg-type]
    assert made.run() == code
    assert published.END.read(store.values["end"]).body.code == code
    assert events[-1].name == "run_finished"
    return events


def order_in(store: Played, epoch: int) -> EmergencyCheckpointOrder:
    decision = DECISIONS.read(store.values[f"plan/{epoch}"]).body
    assert isinstance(decision, EmergencyCheckpointOrder)
    return decision


def test_an_error_of_its_own_has_survivors_save_what_they_hold(capsys: pytest.CaptureFixture[str]) -> None:
    def next_plan(survivors: Any) -> Any:
        raise ZeroDivisionError("a bug")

    store = Played(*trained_until_a_death(), *REPORTED, saved(0))
    events = ends_after(store, next_plan=next_plan)
    order = order_in(store, 1)
    assert events[-1].reason == "the coordinator failed: ZeroDivisionError: a bug" == order.reason
    assert order.writers == {0: (Shard(0, 3, 0, 1),)}, "each shard once"
    assert "a bug" in capsys.readouterr().err


def test_an_error_at_the_end_is_not_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller tells of the end; otherwise nobody would."""

    def set_value(key: str, value: str) -> None:
        raise ZeroDivisionError("a bug")

    store = Played(*trained_until_a_death(), END)
    monkeypatch.setattr(store, "set", set_value)
    made = Coordinator(store, lambda event: None, JobSize(4, 1), [], clock=lambda: store.now)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        made.run()


def test_a_plan_that_can_not_be_published_has_them_save_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for it, and get the order in its place."""
    store = Played(*trained_until_a_death(), *REPORTED, saved(0))
    put = store.set_once

    def set_once(key: str, value: str) -> str:
        if key == "plan/1" and isinstance(DECISIONS.read(value).body, EpochPlan):
            raise ValueError("'plan/1': the store takes values up to 8388608 bytes")
        return put(key, value)

    monkeypatch.setattr(store, "set_once", set_once)
    assert "the store takes values up to" in ends_after(store)[-1].reason
    assert order_in(store, 1)


def test_a_go_that_somebody_else_has_given_binds_nobody() -> None:
    store = Played(*trained_until_a_death(), *REPORTED, *(ready(worker, 1) for worker in range(3)),
                   *(replace(each, epoch=1) for each in REPORTED), saved(0))  # fmt: skip
    store.values["go/1"] = '{"ports": []}'
    assert "'go/1' was in the store before" in ends_after(store)[-1].reason
    assert order_in(store, 2)


def test_before_the_first_iteration_there_is_nothing_to_save() -> None:
    store = Played(STARTED)
    store.values["plan/0"] = "{}"
    assert "'plan/0' was in the store before" in ends_after(store)[-1].reason


@pytest.mark.parametrize(
    ("action", "exited", "cause", "died_at"),
    [
        ("kill", {}, "fault injection, exit signal 9", 0.25),
        ("rebuild", {}, "exit signal 9", 1.0),
        ("rebuild", {"cause": "out-of-memory killer"}, "out-of-memory killer, exit signal 9", 1.0),
    ],
)
def test_the_cause_of_a_death_is_told_where_it_is_known(
    action: str, exited: dict[str, Any], cause: str, died_at: float
) -> None:
    *trained, death = trained_until_a_death()
    assert isinstance(death, ProcessExited)
    store = Played(*trained, injection(action, 3, struck_at=0.25), replace(death, **exited), END)
    events: list[Any] = []
    Coordinator(store, events.append, JobSize(4, 1), [], clock=lambda: store.now).run()  # type: ignore[arg-type]
    (dead,) = [event for event in events if event.name == "worker_dead"]
    assert (dead.cause, dead.died_at) == (cause, died_at)


def test_what_is_sent_again_counts_once() -> None:
    event = {"event": "samples", "time": 1.0, "epoch": 0, "worker": 1, "iteration": 1, "samples": [[0, 3]]}
    once = Letter[Message]("worker 1", EventsReported(1, (event,)), "a.1")
    events = ends_after(Played(once, once, replace(once, id="a.2"), END), code=exit_codes.FAILED)
    assert [each.name for each in events].count("samples") == 2


def test_who_is_given_up_is_named_to_its_agent() -> None:
    store = Played(*trained_until_a_death(), report(0), report(1), *HALF_SECONDS, END)
    ends_after(store, code=exit_codes.FAILED)
    notices = [NOTICES.read(value).body for key, value in store.values.items() if key.startswith("notice/")]
    given_up = [notice for notice in notices if isinstance(notice, WorkersGivenUp)]
    assert given_up == [WorkersGivenUp((2,), "did not report within 60 s")]


def test_who_looks_for_stalls_is_asked_only_once_all_is_heard() -> None:
    heard: list[str] = []
    store = Played(STARTED, injection("stop", 1, 0.5), 0.5, END)
    Coordinator(
        store, lambda event: heard.append(event.name), JobSize(4, 1), [], clock=lambda: store.now,  # type: ignore[arg-type]
        on_heard=lambda: heard.append("all"),
    ).run()  # fmt: skip
    assert "drill" in heard[: heard.index("all")]


def test_who_looks_for_stalls_knows_that_a_checkpoint_was_asked_for() -> None:
    told: list[Notice] = []
    store = Played(STARTED, SaveRequest(1.0), END)
    Coordinator(
        store, lambda event: None, JobSize(4, 1), [], clock=lambda: store.now,  # type: ignore[arg-type]
        on_told=told.append,
    ).run()  # fmt: skip
    assert SaveOrder(1) in told


def test_what_is_published_was_written_down_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that is killed has done nothing that can't be replayed."""
    store = Played(*trained_until_a_death(), *REPORTED, *(ready(worker, 1) for worker in range(3)), END)
    decisions: list[Entry] = []
    published: list[str] = []

    def put(key: str, value: str) -> str:
        step = decisions[-1]
        assert isinstance(step, Step)
        kind = json.loads(value)["kind"]
        assert kind in step.actions or kind == "JobEnd"
        published.append(kind)
        return store.values.setdefault(key, value)

    monkeypatch.setattr(store, "set_once", put)
    monkeypatch.setattr(store, "set", put)
    ends_after(store, code=exit_codes.FAILED, write_decision=keep(decisions))
    assert published == ["EpochPlan", "Go", "EpochIsBroken", "EpochPlan", "Go", "JobEnds", "JobEnd"]
    replay(decisions)


class AllAtOnce(Played):
    """Gives all messages at once that are there."""

    def take(self, queue: str, timeout_s: float) -> list[str]:
        texts = []
        while taken := super().take(queue, timeout_s if not texts else 0.0):
            texts += taken
        return texts


def test_what_comes_at_once_and_decides_one_thing_is_written_at_once() -> None:
    """In a job of thousands of workers as many reports come, and each write would cost time."""
    written: list[list[Entry]] = []
    store = AllAtOnce(*trained_until_a_death(), *REPORTED, 0.5, SaveRequest(1.0), ready(0, 1), 0.5, END)
    ends_after(store, exit_codes.FAILED, write_decision=lambda lines: written.append(entries_in(lines)))
    fed = [[type(each.fed).__name__ for each in entries if isinstance(each, Step)] for entries in written]
    assert ["SurvivorReport"] * len(REPORTED) in fed, "the last one leads to a plan"
    at = fed.index(["SaveRequest"])
    assert fed[at + 1] == ["Ready"], "before it waits it writes down all"
    replay([entry for entries in written for entry in entries])


@pytest.mark.parametrize(
    ("error", "code"),
    [(ZeroDivisionError("a bug"), exit_codes.RETRY), (NoPlanError("none is left"), exit_codes.NO_PLAN)],
)
def test_what_the_planner_raised_needs_no_planner_to_be_replayed(error: Exception, code: int) -> None:
    def next_plan(survivors: Any) -> Any:
        raise error

    decisions: list[Entry] = []
    store = Played(*trained_until_a_death(), *REPORTED, saved(0))
    ends_after(store, code, next_plan=next_plan, write_decision=keep(decisions))
    replay(decisions)


def test_events_that_a_coordinator_before_has_written_are_not_written_again() -> None:
    """That they are done still counts. What is told for the first time is written in any case."""
    step = {"event": "iteration", "time": 1.0, "epoch": 0, "worker": 1, "tokens": 1.0}
    told = [EventsReported(1, ({**step, "iteration": number},), again) for number, again in ((6, True), (7, False))]
    *trained, death = trained_until_a_death()
    decisions: list[Entry] = []
    events = ends_after(
        Played(*trained, *told, death, END), code=exit_codes.FAILED, write_decision=keep(decisions),
        is_logged=lambda event: isinstance(event, Iteration),
    )  # fmt: skip
    assert [event.iteration for event in events if isinstance(event, Iteration)] == [7]
    assert replay(decisions).state.job.reached == 7


def test_pages_and_iterations_are_told_by_what_comes_after_them() -> None:
    """They are many, and decide nothing; what is decided next depends on them."""
    step = {"event": "iteration", "time": 1.0, "epoch": 0, "worker": 1, "iteration": 7, "tokens": 1.0}
    logs = [LogsWanted(3, None, None), *(LogPage(3, 0, number, 1.0) for number in (6, 7))]
    *trained, death = trained_until_a_death()
    decisions: list[Entry] = []
    ends_after(
        Played(*trained, *logs, EventsReported(1, (step,)), death, END),
        code=exit_codes.FAILED, write_decision=keep(decisions),
    )  # fmt: skip
    steps = [each for each in decisions if isinstance(each, Step)]
    told = [(type(each.fed).__name__, each.reached, each.page) for each in steps if each.reached or each.page]
    assert told == [("ProcessExited", 7, Place(0, 7))]
    job = replay(decisions).state.job
    assert (job.reached, job.pages.reached) == (7, Place(0, 7))
