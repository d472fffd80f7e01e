# SPDX-License-Identifier: Apache-2.0
"""A coordinator that takes over from the log of one that was lost, wherever in it that one was lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from replayed import entries_in, known
from test_coordinator import STARTED, Played, keep, order_in, ready, report, saved

from megatron_resihp.control import exit_codes, keys
from megatron_resihp.control.coordination.actions import Notify, Phase
from megatron_resihp.control.coordination.coordinator import Coordinator
from megatron_resihp.control.coordination.decisions.entries import Entry, Start, Step, TakenOver, line_of
from megatron_resihp.control.coordination.decisions.handover import LETTERS_KEPT, Handover
from megatron_resihp.control.coordination.decisions.reading import Decisions
from megatron_resihp.control.coordination.decisions.recorded import Recorded, UnrecordedError
from megatron_resihp.control.coordination.decisions.succession import Succession, succession, unlogged
from megatron_resihp.control.coordination.state_machine.state import State
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.replanning.recovery.next_plan import uniform_or_less
from megatron_resihp.events.event import Event
from megatron_resihp.events.workers import WorkerDead
from megatron_resihp.plan import ParallelPlan, Replica
from megatron_resihp.protocol.messages import (
    Message,
    NodeReport,
    ProcessExited,
    SaveRequest,
    ScriptEnded,
    Survivor,
    SurvivorReport,
)
from megatron_resihp.protocol.notices import NOTICES, EpochIsBroken, NoticesForgotten, PlanChange, SaveOrder
from megatron_resihp.protocol.published import END, EpochPlan, Go
from megatron_resihp.protocol.records import IterationPhase, Record
from megatron_resihp.protocol.wire import Letter

SIZE = JobSize(4, 1, apart=True)


def second_report(worker: int) -> SurvivorReport:
    record = Record(7, IterationPhase.COMPUTE, counters={n: {"iteration": n - 1} for n in (6, 7)})
    return SurvivorReport(worker, 1, record, report(0).held)


STORY: tuple[Message, ...] = (
    STARTED, *(ready(worker, 0) for worker in range(4)), SaveRequest(1.0), ProcessExited(3, -9, 1.0),
    *map(report, range(3)), *(ready(worker, 1) for worker in range(3)), SaveRequest(2.0), ProcessExited(2, -9, 2.0),
    *map(second_report, range(2)), *(ready(worker, 2) for worker in range(2)), *map(ScriptEnded, range(2)),
)  # fmt: skip
"""A job of which two workers die, one after the other, and two checkpoints are asked for."""
LETTERS = tuple(Letter("a process", message, f"letter {number}") for number, message in enumerate(STORY))


class LostError(Exception):
    """Stands for the death of the coordinator."""


def coordinator(store: Played, write: Any, before: Succession | None = None, told: list[Event] | None = None) -> Any:
    events: list[Event] = [] if told is None else told
    return Coordinator(
        store, events.append, SIZE, [], clock=lambda: store.now, write_decision=write, run="token", before=before,
    )  # type: ignore[arg-type]  # fmt: skip


def run_until(lost_at: int | None) -> tuple[list[Entry], Played]:
    """Of a coordinator that dies when it has kept so many entries, before it carries out the last; None: it doesn't."""
    entries: list[Entry] = []

    def write(lines: Sequence[str]) -> None:
        for entry in entries_in(lines):
            entries.append(entry)
            if len(entries) == lost_at:
                raise UnrecordedError

    store = Played(*LETTERS)
    if lost_at is None:
        assert coordinator(store, write).run() == 0
    else:
        with pytest.raises(UnrecordedError):
            coordinator(store, write).run()
    return entries, store


def folded(entries: Sequence[Entry]) -> Succession:
    """As from a file."""
    start, *steps = entries_in([line_of(entry) for entry in entries])
    assert isinstance(start, Start) and all(isinstance(step, Step) for step in steps)
    return succession(Decisions(start, tuple(steps)))  # type: ignore[arg-type]


def shortened(entries: Sequence[Entry], by: int) -> list[Entry]:
    """A snapshot in the place of the first entries."""
    before = folded(entries[:by])
    [snapshot] = entries_in([Recorded.after(before.replay, uniform_or_less, lambda lines: None).snapshot()])
    return [snapshot, *entries[by:]]


def published(store: Played) -> tuple[dict[str, str], list[str]]:
    """What a process finds that comes now: by key, and the notices in their order."""
    values = {key: text for key, text in store.values.items() if key not in (keys.END, keys.FORGOTTEN)}
    notices = list[str]()
    number = 0
    while (text := values.pop(keys.notice_key(number), None)) is not None:
        notice = NOTICES.read(text).body
        number = notice.next if isinstance(notice, NoticesForgotten) else number + 1
        notices += [] if isinstance(notice, NoticesForgotten) else [text]
    return {key: text for key, text in values.items() if not key.startswith("notice/")}, notices


def lost_at() -> Iterator[int]:
    entries, _ = run_until(None)
    return iter(range(2, len(entries) + 1))


def test_the_store_is_as_it_was_wherever_the_one_before_was_lost() -> None:
    for number in lost_at():
        entries, store = run_until(number + 1) if number < len(run_until(None)[0]) else run_until(None)
        again = Played()
        coordinator(again, keep([]), folded(entries[:number])).take_over()
        assert published(again) == published(store), f"lost after {number} entries"


def test_a_snapshot_says_what_the_entries_said_that_it_stands_for() -> None:
    entries, store = run_until(None)
    before = folded(entries)
    for by in range(1, len(entries)):
        after, again = folded(shortened(entries, by)), Played()
        assert known(after.state) == known(before.state)
        assert (after.facts, after.last, after.end, after.letters, after.began_at, after.awaited, after.run) == (
            before.facts, before.last, before.end, before.letters, before.began_at, before.awaited, before.run
        ), f"{by} entries in a snapshot"  # fmt: skip
        coordinator(again, keep([]), after).take_over()
        assert published(again) == published(store)
        twice = shortened([*shortened(entries, by)], 1)
        assert line_of(twice[0]) == line_of(shortened(entries, by)[0]), "a snapshot of a snapshot is the same"


def test_what_is_handed_over_does_not_grow_with_the_number_of_epochs() -> None:
    """Of plans and letters; the dead are not forgotten."""
    handover, letter = Handover(), 0
    plan = ParallelPlan((Replica(((0,),), (0,)),))
    sizes = []
    for epoch in range(40):
        change = Notify(PlanChange(epoch + 1, epoch, plan))
        for action in (EpochPlan(epoch, plan, None), Notify(SaveOrder(epoch + 1)), change, Go(epoch, ())):
            letter += 1
            handover.note(Step(letter, 1.0, TakenOver("it"), f"letter {letter}"), [action], epoch)
        for _ in range(LETTERS_KEPT // 2):
            letter += 1
            handover.note(Step(letter, 1.0, TakenOver("it"), f"letter {letter}"), [], epoch)
        sizes.append(sum(map(len, handover.letters)))
    plans = [each.epoch for each in handover.published if isinstance(each, EpochPlan)]
    gos = [each.epoch for each in handover.published if isinstance(each, Go)]
    notices = [each.notice for each in handover.published if isinstance(each, Notify)]
    assert (plans, gos) == ([0, 39], [38, 39])
    assert notices == [SaveOrder(40), PlanChange(40, 39, plan)]
    assert f"letter {letter - LETTERS_KEPT + 1}" in frozenset().union(*handover.letters) and sizes[-1] == sizes[10]


def test_letters_of_agents_are_known_for_ever() -> None:
    """An agent tells each coordinator all that it has ever told one."""
    handover = Handover()
    handover.note(Step(1, 1.0, ProcessExited(3, -9, 1.0), "agent 3.1"), [], 0)
    for epoch in range(1, 10):
        handover.note(Step(1 + epoch, 1.0, ready(0, epoch), f"{epoch}"), [Go(epoch, ())], epoch)
        handover.note(Step(1 + epoch, 1.0, ready(0, epoch), f"{epoch}"), [], epoch)
        handover.letters[-1] += [""] * LETTERS_KEPT
    assert handover.from_agents == ["agent 3.1"] and len(handover.letters) == 3


def test_a_letter_that_was_decided_about_counts_once_and_another_is_made_up_for() -> None:
    """Senders send all again. The job ends as it would have, with the same plans, whenever the coordinator is lost."""
    whole, _ = run_until(None)
    for number in lost_at():
        entries, _ = run_until(number)
        before = folded(entries)
        if before.state.phase in (Phase.STARTING, Phase.ENDED):
            continue
        building, epoch = before.state.phase.value == "building", before.state.epoch
        store = Played(*LETTERS)
        if building:  # what was being built is built again, under the next number
            store.script = deque(_after_a_break(before.state, epoch))
        later: list[Entry] = []
        successor = coordinator(store, keep(later), before)
        successor.take_over()
        assert successor.run() == 0
        taken_over, *others = later
        assert isinstance(taken_over, Step) and isinstance(taken_over.fed, TakenOver)
        assert taken_over.number == number, "numbers go on"
        assert folded([*entries, *later]).end is not None, "the whole log can be folded again"
        if not building:
            assert len(others) == len(whole) - number, f"lost after {number} entries"


def test_an_end_that_was_decided_on_and_not_told_is_told() -> None:
    """Else agents would wait for a coordinator, and end with another code."""
    entries, _ = run_until(None)
    before, store, later = folded(entries), Played(), list[Entry]()
    assert before.state.phase is Phase.ENDED
    successor = coordinator(store, keep(later), before)
    successor.take_over()
    assert keys.END not in store.values, "first it is known that no other can decide"
    assert successor.run() == 0
    assert END.read(store.values[keys.END]).body.reason == "finished"
    [taken_over] = later
    assert isinstance(taken_over, Step) and isinstance(taken_over.fed, TakenOver)
    assert folded([*entries, *later]).end == before.end
    assert before.awaited == {0, 1, 2, 3}, "nodes whose workers have finished or died wait for it, too"


def test_a_job_that_has_not_begun_to_train_ends() -> None:
    entries, _ = run_until(4)
    before, store, told = folded(entries), Played(), list[Event]()
    assert before.state.phase is Phase.STARTING
    successor = coordinator(store, keep([]), before, told)
    successor.take_over()
    assert successor.run() == exit_codes.RETRY
    assert END.read(store.values[keys.END]).body.code == exit_codes.RETRY
    assert [event.name for event in told] == ["coordinator_replaced", "run_finished"]


def _after_a_break(state: State, epoch: int) -> Iterator[Message | Letter[Message]]:
    yield from LETTERS[: len(STORY) - 2]
    held = report(0).held
    record = Record(7, IterationPhase.COMPUTE, counters={n: {"iteration": n - 1} for n in (4, 5, 6, 7)})
    workers = sorted(state.living)
    yield from (SurvivorReport(worker, epoch, record, held) for worker in workers)
    yield from (ready(worker, epoch + 1) for worker in workers)
    yield from (ScriptEnded(worker) for worker in workers)


def test_letters_of_a_node_s_report_are_known_one_by_one() -> None:
    """Its workers tell another coordinator again, and their agent joins what they tell as it comes then."""
    record, held = report(0).record, report(0).held
    joined = NodeReport(0, record, tuple(Survivor(worker, f"{worker}.1", held, {}) for worker in (0, 1)))
    entries: list[Entry] = []
    recorded = Recorded(SIZE, write=lambda lines: keep(entries)(lines))
    recorded.handle(joined, 1.0, "node.1")
    recorded.write_down()
    assert folded(entries).letters == {"node.1", "0.1", "1.1"}


def test_an_epoch_that_was_built_is_broken_for_all() -> None:
    number = next(n for n in lost_at() if folded(run_until(n)[0]).state.phase.value == "building")
    before = folded(run_until(number)[0])
    store = Played(*_after_a_break(before.state, before.state.epoch))
    successor = coordinator(store, keep([]), before)
    successor.take_over()
    assert successor.run() == 0
    texts = [text for key, text in store.values.items() if key.startswith("notice/")]
    broken = [notice for text in texts if isinstance(notice := NOTICES.read(text).body, EpochIsBroken)]
    assert broken and broken[-1].cause == "the coordinator was lost while this epoch was built"


def test_an_error_when_it_takes_over_has_survivors_save_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(by: str, now: float) -> None:
        raise ZeroDivisionError("a bug")

    entries, _ = run_until(8)
    store = Played(*map(report, range(4)), saved(0))
    successor = coordinator(store, keep([]), folded(entries))
    monkeypatch.setattr(successor._membership, "take_over", fail)
    successor.take_over()
    assert successor.run() == exit_codes.RETRY
    assert order_in(store, 1).reason == "the coordinator failed: ZeroDivisionError: a bug"


def test_planner_and_detector_are_told_what_the_ones_before_were() -> None:
    entries, _ = run_until(None)
    before = folded(entries)
    names = [event.name for event in before.facts]
    assert names == ["run_started", "job", "worker_dead", "worker_dead", "epoch_started"]
    assert all(event.time for event in before.facts)
    assert before.run == "token" and before.end is not None and before.end.code == 0


def test_a_node_whose_worker_has_died_is_awaited() -> None:
    """Its launcher stays until the job's end."""
    number = next(n for n in lost_at() if 3 in folded(run_until(n)[0]).state.dead)
    assert 3 in folded(run_until(number)[0]).awaited


def test_what_was_decided_last_and_not_logged_is_told() -> None:
    """A coordinator may be lost between the two."""
    death = next(n for n in lost_at() if any(isinstance(e, WorkerDead) for e in folded(run_until(n)[0]).last))
    last = folded(run_until(death)[0]).last
    logged = [replace(event, time=event.time + 1.0) for event in last]  # a moment after it was decided
    assert unlogged(last, logged) == []
    assert unlogged(last, [event for event in logged if not isinstance(event, WorkerDead)]) == [
        event for event in last if isinstance(event, WorkerDead)
    ]
    later = replace(logged[0], time=last[0].time + 60.0)
    assert unlogged(last, [later]) == [], "the end of a long log need not have what was logged long ago"
