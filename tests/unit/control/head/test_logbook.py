# SPDX-License-Identifier: Apache-2.0
"""The thread that writes logs: nothing is lost, nothing waits for it, and its failures are one line each."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from megatron_resihp.control.head.logs import lane
from megatron_resihp.control.head.logs.logbook import Logbook
from megatron_resihp.control.head.logs.own_curves import OwnCurves, OwnPage
from megatron_resihp.control.head.logs.tensorboard_files import TensorBoardFiles
from megatron_resihp.control.head.logs.wandb_run import WandbRun
from megatron_resihp.control.head.logs.writer import (
    AGAIN_S,
    MOST_KEPT,
    CarefulWriter,
    MissingPackageError,
    Term,
    Writer,
)
from megatron_resihp.events.bus import EventBus
from megatron_resihp.events.detection import Verdict
from megatron_resihp.events.epochs import EpochStarted, Reconfiguration, Recovery
from megatron_resihp.events.event import Event
from megatron_resihp.events.job import BatchGrown, LogFailed
from megatron_resihp.events.training import Iteration
from megatron_resihp.events.workers import WorkerDead
from megatron_resihp.protocol.logs import LogPage, LogsWanted, Scalar, TensorBoardWish, WandbWish

TERM = Term("a run")
WANTED = LogsWanted(0, TensorBoardWish("/logs", 1000), None)
PLAN: dict[str, Any] = {
    "version": 2, "standbys": {},
    "replicas": [{"stages": [[0], [2]], "micro_batches": [0]}, {"stages": [[1], [3]], "micro_batches": [1]}],
}  # fmt: skip


def page(iteration: int) -> LogPage:
    return LogPage(3, 0, iteration, 0.0, (Scalar("lm loss", 1.0, iteration),))


class Fake:
    """A writer that keeps what it is given, and fails while `broken`."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.broken = False
        self.opened = 0
        self.closed = 0
        self.missing = False

    def open(self) -> Writer:
        if self.missing:
            raise MissingPackageError("tensorboard is not there")
        self.opened += 1
        return self

    def write(self, page: LogPage) -> None:
        if self.broken:
            raise OSError(28, "No space left on device")
        self.written.append(page.iteration)

    def close(self) -> None:
        if self.broken:
            raise OSError(28, "No space left on device")
        self.closed += 1


class Careful:
    """A careful writer over a fake, with a clock that stands still."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fake = Fake()
        self.told: list[LogFailed] = []
        self.writer = CarefulWriter("TensorBoard", self.fake.open, self.told.append, lambda: self.now)


def test_a_full_disk_is_told_once_and_nothing_is_lost_once_it_has_room() -> None:
    it = Careful()
    it.writer.write(page(1))
    it.fake.broken = True
    for iteration in (2, 3, 4):
        it.writer.write(page(iteration))
        it.now += AGAIN_S
    assert [(each.part, each.error) for each in it.told] == [
        ("TensorBoard", "OSError: [Errno 28] No space left on device")
    ]
    it.fake.broken = False
    it.writer.write(page(5))
    assert it.fake.written == [1, 2, 3, 4, 5]
    assert it.fake.opened > 1, "a writer that has failed is not used again"
    it.fake.broken = True
    it.writer.write(page(6))
    assert len(it.told) == 2, "another failure is told again"


def test_of_more_than_can_wait_the_oldest_are_dropped_and_that_is_told() -> None:
    it = Careful()
    it.fake.broken = True
    for iteration in range(MOST_KEPT + 2):
        it.writer.write(page(iteration))
    assert [told.error for told in it.told[1:]] == [f"{MOST_KEPT} pages wait already, so the oldest are dropped"]
    it.fake.broken = False
    it.writer.close()
    assert it.fake.written == list(range(2, MOST_KEPT + 2))


def test_what_waits_for_a_full_disk_is_tried_once_more_at_the_end() -> None:
    it = Careful()
    it.fake.broken = True
    it.writer.write(page(1))
    it.fake.broken = False
    it.writer.write(page(2))
    assert it.fake.written == []
    it.writer.close()
    assert it.fake.written == [1, 2] and it.fake.closed == 1


def test_a_coordinator_in_whose_place_another_writes_writes_no_more() -> None:
    """It may have been stopped meanwhile, with pages that workers have sent to the other one again."""
    it, over = Careful(), [False]
    writer = CarefulWriter("TensorBoard", it.fake.open, it.told.append, lambda: it.now, lambda: over[0])
    writer.write(page(1))
    it.fake.broken = True
    writer.write(page(2))
    it.fake.broken, over[0] = False, True
    it.now += AGAIN_S
    writer.write(page(3))
    writer.close()
    assert it.fake.written == [1] and it.fake.opened == 1


def test_a_missing_package_is_one_line() -> None:
    it = Careful()
    it.fake.missing = True
    for iteration in range(3):
        it.writer.write(page(iteration))
        it.now += AGAIN_S
    it.writer.close()
    assert [each.error for each in it.told] == ["tensorboard is not there"]


@pytest.mark.parametrize(
    ("module", "open_writer", "flag"),
    [
        ("torch.utils.tensorboard", lambda: TensorBoardFiles(TensorBoardWish("/logs", 10), TERM), "--tensorboard-dir"),
        (
            "wandb",
            lambda: WandbRun(WandbWish("project", "name", None, "/logs", {}, "1234abcd"), TERM),
            "--wandb-project",
        ),
    ],
)
def test_the_line_names_the_flag_and_the_package(
    monkeypatch: pytest.MonkeyPatch, module: str, open_writer: Callable[[], Writer], flag: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=f"{flag} needs the package .* where the coordinator runs"):
        open_writer()


# ---- the thread


@pytest.fixture
def bus() -> EventBus:
    return EventBus()


def told_on(bus: EventBus) -> list[LogFailed]:
    told: list[LogFailed] = []
    bus.subscribe(told.append, LogFailed)
    return told


def made_of(fake: Fake) -> Callable[..., list[CarefulWriter]]:
    return lambda wanted, tell, term: [CarefulWriter("TensorBoard", fake.open, tell)]


def test_all_that_has_come_is_written_before_the_job_ends(bus: EventBus) -> None:
    fake = Fake()
    book = Logbook(bus, TERM, made_of(fake))
    book.take(WANTED)
    for iteration in range(500):
        book.take(page(iteration))
    book.close()
    assert fake.written == list(range(500)) and fake.closed == 1


def test_the_coordinator_does_not_wait_for_a_slow_disk(bus: EventBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "WAITING", 3)
    told, fake, go_on = told_on(bus), Fake(), threading.Event()
    fake.write = lambda page: (go_on.wait(60), fake.written.append(page.iteration))  # type: ignore[assignment]
    book = Logbook(bus, TERM, made_of(fake))
    book.take(WANTED)
    for iteration in range(10):
        book.take(page(iteration))
    assert [each.part for each in told] == ["TensorBoard"] and "wait already" in told[0].error
    book.close(timeout_s=0.01)
    assert "not written" in told[-1].error
    go_on.set()
    book.close()
    assert fake.written == sorted(fake.written) and fake.written[0] == 0


def test_a_log_that_hangs_holds_up_no_other(bus: EventBus) -> None:
    """As W&B does while its server can't be reached."""
    hanging, fake, go_on = Fake(), Fake(), threading.Event()
    hanging.write = lambda page: go_on.wait(60)  # type: ignore[assignment, return-value]
    book = Logbook(
        bus,
        TERM,
        lambda wanted, tell, term: [
            CarefulWriter("W&B", hanging.open, tell),
            CarefulWriter("TensorBoard", fake.open, tell),
        ],
    )
    book.take(WANTED)
    for iteration in range(10):
        book.take(page(iteration))
    book.close(timeout_s=0.5)
    assert fake.written == list(range(10)) and fake.closed == 1
    go_on.set()
    book.close()


def test_a_job_without_logs_has_no_thread(bus: EventBus) -> None:
    book, before = Logbook(bus, TERM), threading.active_count()
    book.take(LogsWanted(0, None, None))
    assert threading.active_count() == before
    book.close(timeout_s=0.0)


def test_the_plugin_s_own_curves_are_written_beside(bus: EventBus) -> None:
    fake = Fake()
    book = Logbook(bus, TERM, made_of(fake))
    book.take(WANTED)
    bus.publish(Iteration(time=1.0, iteration=7))
    book.close()
    assert fake.written == [7]


def test_they_are_written_after_the_page_of_their_iteration(bus: EventBus) -> None:
    """W&B takes nothing of an earlier step: where a coordinator takes over, pages of these come first."""
    fake = Fake()
    written: list[tuple[bool, int]] = []
    fake.write = lambda page: written.append((isinstance(page, OwnPage), page.iteration))  # type: ignore[assignment]
    book = Logbook(bus, TERM, made_of(fake))
    book.take(WANTED)
    bus.publish(Iteration(time=1.0, iteration=3))
    for iteration in (1, 2, 3):
        book.take(page(iteration))
    bus.publish(Iteration(time=2.0, iteration=4))
    book.take(page(4))
    book.close()
    assert written == [(False, 1), (False, 2), (False, 3), (True, 3), (False, 4), (True, 4)]


# ---- the plugin's own curves


def points(*events: Event) -> dict[str, list[float]]:
    curves, found = OwnCurves(), {}
    for event in events:
        for tag, value, _ in (curves.note(event) or page(0)).scalars:
            found.setdefault(tag.removeprefix("resihp/"), []).append(value)
    found.pop("lm loss", None)
    return found


def done(iteration: int, seconds: float | None = 2.0) -> Iteration:
    return Iteration(time=float(iteration), iteration=iteration, samples=8, duration_s=seconds, worker=3)


def test_speed_and_workers_after_a_death() -> None:
    dead = WorkerDead(time=3.0, dead=1, cause="exit signal 9")
    later = {**PLAN, "replicas": PLAN["replicas"][:1], "standbys": {"3": [0, 1]}}
    found = points(
        EpochStarted(epoch=0, plan=PLAN), done(1, None), done(2), dead,
        Recovery(time=5.0, from_epoch=0, to_epoch=1, resumed_iteration=2, dead=(1,), broken_at=3.5, resumed_at=5.0),
        EpochStarted(epoch=1, plan=later), done(3, None), done(4, 4.0),
    )  # fmt: skip
    assert found["workers_alive"] == [4, 4, 3, 3]
    assert found["samples_per_s"] == [4.0, 2.0]
    assert found["share_of_healthy_speed"] == [1.0, 0.5]
    assert found["pause_s"] == [1.5]


@pytest.mark.parametrize("dies", [False, True])
def test_the_healthy_speed_of_larger_batches_is_another(dies: bool) -> None:
    """It is not known if some worker is missing by then."""
    grown = BatchGrown(global_batch_size=16, micro_batches=8)
    dead = [WorkerDead(time=2.5, dead=1, cause="exit signal 9")] if dies else []
    plan = {**PLAN, "replicas": PLAN["replicas"][:1], "standbys": {"3": [0, 1]}} if dies else PLAN
    found = points(
        EpochStarted(epoch=0, plan=PLAN), done(1), done(2), *dead, grown, EpochStarted(epoch=1, plan=plan),
        done(3, 1.0), done(4, 2.0),
    )  # fmt: skip
    assert found["share_of_healthy_speed"] == ([1.0, 1.0] if dies else [1.0, 1.0, 1.0, pytest.approx(2 / 3)])


def test_slow_workers_and_changes_of_plan() -> None:
    slow = Verdict(kind="compute", change="onset", workers=(2,), speed=0.5, since=1, iteration=2)
    link = Verdict(kind="link", change="onset", workers=(0, 1), speed=0.5, since=1, iteration=2)
    well = Verdict(kind="compute", change="recovery", workers=(2,), speed=1.0, since=3, iteration=4)
    change = Reconfiguration(
        number=1, why="faster", from_epoch=0, to_epoch=1, resumed_iteration=2, stood_still_s=0.25
    )  # fmt: skip
    found = points(EpochStarted(epoch=0, plan=PLAN), done(1), slow, link, done(2), change, done(3), well, done(4))
    assert found["slow_workers"] == [0, 1, 1, 0]
    assert found["pause_s"] == [0.25]


def test_an_iteration_that_is_reported_twice_is_one_point() -> None:
    assert len(points(done(1), done(2), done(2))["workers_alive"]) == 2
