# SPDX-License-Identifier: Apache-2.0
"""What a worker makes of what the coordinator has published; the store is stood in for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_resihp.control import exit_codes, keys
from megatron_resihp.control.transport.sockets import StoreError
from megatron_resihp.control.transport.store.lasting import LastingStore
from megatron_resihp.control.worker import channel as channel_module
from megatron_resihp.control.worker.channel import Channel
from megatron_resihp.control.worker.client import WorkerControl
from megatron_resihp.control.worker.doors import Doors
from megatron_resihp.control.worker.errors import CoordinatorLost, EpochBroken, JobEnded
from megatron_resihp.control.worker.heard import NOTICE_S
from megatron_resihp.events.training import Digest
from megatron_resihp.plan import ParallelPlan, Replica
from megatron_resihp.protocol.logs import LogPage
from megatron_resihp.protocol.messages import (
    MESSAGES,
    CommunicationFailed,
    EventsReported,
    FirstStepFailed,
    Message,
    Ready,
    TrainingFinished,
)
from megatron_resihp.protocol.notices import NOTICES, EpochIsBroken, Notice, PlanChange
from megatron_resihp.protocol.published import GO, Go
from megatron_resihp.protocol.records import IterationPhase, Record

HEARD_S = 30.0


class Published:
    """A store in which some keys are set."""

    def __init__(self, **values: Notice | Go) -> None:
        self.values = {name.replace("_", "/"): self._written(value) for name, value in values.items()}
        self.told: list[Message] = []
        self.ids: set[str] = set()
        self.answers_after_s = 0.0

    @staticmethod
    def _written(value: Notice | Go) -> str:
        return (GO if isinstance(value, Go) else NOTICES).write(value, "the coordinator")  # type: ignore[arg-type]

    def clone(self) -> Published:
        return self

    def push(self, queue: str, item: str) -> None:
        letter = MESSAGES.read(item)
        assert letter.id is not None and letter.id not in self.ids, "each has one of its own"
        assert letter.sender == "worker 1"
        self.ids.add(letter.id)
        self.told.append(letter.body)

    def check(self, key: str) -> bool:
        return key in self.values

    def wait(self, key: str, timeout_s: float) -> bool:
        if key not in self.values and timeout_s >= NOTICE_S:
            threading.Event().wait()  # for a notice that never comes
        return key in self.values

    def get(self, key: str, timeout_s: float) -> str:
        if timeout_s < self.answers_after_s:
            raise TimeoutError(key)
        return self.values[key]


def control_of(store: Any) -> WorkerControl:
    """A worker's that has heard that epoch 0 is broken."""
    heard = threading.Event()
    control = WorkerControl(store, 1, heard.set)
    assert heard.wait(HEARD_S)
    return control


BROKEN = EpochIsBroken(0, "worker 0: exit signal 9")


class Slow(Published):
    """Takes events only when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.takes = threading.Event()

    def push(self, queue: str, item: str) -> None:
        if isinstance(MESSAGES.read(item).body, EventsReported):
            assert self.takes.wait(HEARD_S)
        super().push(queue, item)


def test_an_iteration_is_told_of_while_training_goes_on_and_before_what_is_told_later() -> None:
    store = Slow()
    control = WorkerControl(store, 1, lambda: None)  # type: ignore[arg-type]
    control.event_behind(Digest(iteration=1, digests={}))
    assert store.told == []
    later = threading.Thread(target=lambda: control.tell(TrainingFinished(1, 1)))
    later.start()
    assert store.told == []
    store.takes.set()
    later.join(HEARD_S)
    assert [type(each) for each in store.told] == [EventsReported, TrainingFinished]


def test_a_worker_whose_events_nobody_takes_any_more_ends_before_the_next_step_counts() -> None:
    store = Published()
    control = WorkerControl(store, 1, lambda: None)  # type: ignore[arg-type]

    def push(queue: str, item: str) -> None:
        raise StoreError("the connection to the store is lost")

    store.push = push  # type: ignore[method-assign]
    control.event_behind(Digest(iteration=1, digests={}))
    with pytest.raises(JobEnded):
        control.settle_events()


def test_go_holds_for_who_hears_of_a_death_first() -> None:
    """Others may have given up what they held before it."""
    store = Published(notice_0=BROKEN, go_0=Go(0, (7, 8)))
    assert keys.go_key(0) in store.values and keys.notice_key(0) in store.values
    control = control_of(store)
    control.ready({}, 0, 0, [8])
    assert control.peer_ports == {7, 8} and control.heard.broken()
    assert store.told == [Ready(1, 0, {}, (8,), 0, 0)]


def test_an_epoch_that_broke_before_go_never_holds() -> None:
    control = control_of(Published(notice_0=BROKEN))
    with pytest.raises(EpochBroken, match="exit signal 9"):
        control.ready({}, 0, 0, [8])


@pytest.mark.parametrize("broken", [False, True])
def test_go_is_read_however_long_a_busy_machine_takes(broken: bool) -> None:
    store = Published(go_0=Go(0, (7, 8)), **({"notice_0": BROKEN} if broken else {}))
    store.answers_after_s = 5.0
    control = control_of(store) if broken else WorkerControl(store, 1, lambda: None)
    control.ready({}, 0, 0, [8])
    assert control.peer_ports == {7, 8}


def test_a_change_that_can_not_be_prepared_is_heard_of(capsys: pytest.CaptureFixture[str]) -> None:
    """And so is all that comes after it."""
    control = control_of(Published(notice_0=BROKEN))

    def prepare(change: PlanChange) -> None:
        raise RuntimeError("can't start new thread")

    control.heard.on_change = prepare
    change = PlanChange(1, 0, ParallelPlan((Replica(((0,), (1,)), (0,)),)))
    control.heard.hear(change)
    assert control.heard.change.of_epoch(control.epoch) == change
    assert "worker 1 does not prepare a change: can't start new thread" in capsys.readouterr().err


def test_a_coordinator_that_never_answers_is_lost_in_the_end() -> None:
    """No error of this worker's own, of which nobody would be told: it ends as where the store is gone."""
    control = WorkerControl(Published(), 1, lambda: None)
    with pytest.raises(JobEnded, match=r"the coordinator is gone: it has not answered for 0\.1 s"):
        control.suspect(RuntimeError("gloo: Connection closed by peer"), 0.1)


class Gone(Published):
    """A store that is served no more."""

    def push(self, queue: str, item: str) -> None:
        raise StoreError("the connection to the store is lost")

    def set(self, key: str, value: str) -> None:
        raise StoreError("the connection to the store is lost")


@pytest.mark.parametrize(
    "ask",
    [
        lambda control: control.tell(TrainingFinished(1, 3)),
        lambda control: control.suspect(RuntimeError("gloo: Connection closed by peer"), HEARD_S),
        lambda control: control.report(Record(3, IterationPhase.COMPUTE), ()),
        lambda control: control.channel.put("saved/0", "yes"),
    ],
    ids=["a message", "a suspicion", "a report", "a value"],
)
def test_who_notices_first_that_the_coordinator_is_gone_has_lost_it(ask: Callable[[WorkerControl], Any]) -> None:
    """Whatever it wanted; and no collective of another thread goes on."""
    aborted = threading.Event()
    control = WorkerControl(Gone(), 1, aborted.set)
    with pytest.raises(CoordinatorLost, match="the coordinator is gone: the connection to the store is lost") as lost:
        ask(control)
    assert lost.value.code == exit_codes.RETRY and control.heard.broken() and aborted.is_set()


class Away(Published):
    """A store whose coordinator answers a suspicion only when it is back."""

    def push(self, queue: str, item: str) -> None:
        super().push(queue, item)
        threading.Timer(0.2, self.back).start()

    def back(self) -> None:
        """What the coordinator does then."""


def test_a_coordinator_that_was_away_is_waited_for() -> None:
    store = Away()
    control = WorkerControl(store, 1, lambda: None)
    store.back = lambda: control.heard.hear(BROKEN)  # type: ignore[method-assign]
    control.suspect(RuntimeError("gloo: Connection closed by peer"), HEARD_S)
    assert control.heard.broken() and store.told == [CommunicationFailed(1, 0, "gloo: Connection closed by peer")]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("shards (2) must be >= 4\nas they are"), "ValueError: shards (2) must be >= 4"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_a_plan_is_blamed_once(error: Exception, told: str) -> None:
    """By an error and its kind; not in an epoch that others have given up."""
    store = Published()
    control = WorkerControl(store, 1, lambda: None)
    with pytest.raises(JobEnded):
        control.blame_plan(error, 0.0)
    assert store.told == [FirstStepFailed(1, 0, told)]
    broken = Published(notice_0=BROKEN)
    control_of(broken).blame_plan(error, 0.0)
    assert not broken.told


def test_who_has_never_answered_is_not_taken_for_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall may let communicators through, and nothing else."""
    store = Published(notice_0=BROKEN)
    for worker, host in ((2, "10.0.0.2"), (3, "10.0.0.2"), (4, "10.0.0.4")):
        store.values[f"{keys.KNOCK_AT}{worker}"] = f"{host}:1"
    control = control_of(store)
    knocks = iter(([2, 3, 4], [4], [2, 3, 4]))
    monkeypatch.setattr("megatron_resihp.control.worker.doors.unreachable", lambda doors: next(knocks))
    assert [control.doors.silent((1, 2, 3, 4)) for _ in range(3)] == [[], [], [2, 3]]


def doors_of(worker: int, nodes: int = 4) -> Doors:
    """Of one of two workers of each node."""
    store = Published()
    for each in range(2 * nodes):
        store.values[f"{keys.KNOCK_AT}{each}"] = f"10.0.0.{each // 2}:1"
    return Doors(Channel(store, worker, lambda error: JobEnded(1, error)), worker, lambda each: each // 2)


def test_workers_of_a_node_share_the_others_and_look_for_one_worker_of_each() -> None:
    looked_for = [doors_of(worker).one_of_each_node(range(8)) for worker in (0, 1, 2, 3)]
    assert looked_for == [[4], [2, 6], [1, 5], [7]], "node 0, whose workers are 0 and 1, and node 1"
    assert doors_of(3).one_of_each_node([1, 4]) == [1, 4], "of others only: all of them"
    assert doors_of(1).one_of_each_node([0, 1]) == []


def test_a_link_that_fails_together_with_a_node_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that has never answered does not count. So who looks for a node before a loss looks for it after that."""
    silent: set[int] = set()
    monkeypatch.setattr(
        "megatron_resihp.control.worker.doors.unreachable", lambda doors: [each for each in doors if each in silent]
    )
    doors = [doors_of(worker) for worker in range(8)]
    assert not any(each.cut_off(range(8)) for each in doors)
    silent |= {6, 7}  # from node 2
    lost = [doors[worker].cut_off([0, 1, 4, 5, 6, 7]) for worker in (4, 5)]  # node 1 is gone
    assert lost == [[], [6, 7]]


def test_no_two_workers_give_a_message_the_same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second one the coordinator would think that it came twice. Thousands of workers draw some token alike."""
    monkeypatch.setattr("secrets.token_hex", lambda size: "a" * 2 * size)
    texts = []

    class Store(Published):
        def push(self, queue: str, item: str) -> None:
            texts.append(item)

    for worker in (1, 2):
        channel = Channel(Store(), worker, lambda why: JobEnded(1, why))  # type: ignore[arg-type]
        channel.tell(TrainingFinished(worker, 3))
    assert len({MESSAGES.read(text).id for text in texts}) == 2


class Followed(LastingStore):
    """A store that is lost with its coordinator, and another one's in its place. Each keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[list[Message]] = [[]]
        self.on_successor: Any = None

    term = 1  # type: ignore[assignment]

    def follow(self, on_successor: Callable[[Any], None]) -> None:
        self.on_successor = on_successor

    def push(self, queue: str, value: str) -> None:
        self.told[-1].append(MESSAGES.read(value).body)

    def lose(self) -> None:
        self.told.append([])
        self.on_successor(self)


@pytest.mark.parametrize("pages", [1, 1000, 1005])
def test_pages_that_may_have_waited_in_a_lost_coordinator_are_sent_to_the_next(pages: int) -> None:
    store = Followed()
    channel = Channel(store, 1, lambda why: JobEnded(1, why))
    sent = [LogPage(1, 0, iteration, 0.0) for iteration in range(pages)]
    for page in sent:
        channel.tell(page)
    channel.heard_of_all()
    for _ in range(2):
        store.lose()
        assert store.told[-1] == sent[-1000:]


def test_events_that_a_lost_coordinator_may_not_have_written_are_told_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of long ago are in the log, and thousands of workers would tell them at once."""
    store, now = Followed(), [1000.0]
    monkeypatch.setattr(channel_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    channel = Channel(store, 1, lambda why: JobEnded(1, why))
    for number in range(1, 4):
        now[0] = 1000.0 + 500.0 * number
        channel.tell(EventsReported(1, ({"number": number},)))
    channel.heard_of_all()
    now[0] += 10.0
    store.lose()
    assert store.told[-1] == [EventsReported(1, ({"number": number},), again=True) for number in (2, 3)]
