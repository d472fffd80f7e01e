# SPDX-License-Identifier: Apache-2.0
"""What planner, detector and log of a coordinator that takes over are told, beside what it has decided itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from made_up_events import made_up

from megatron_resihp.control.commands.launch.launcher import catch_up
from megatron_resihp.control.head.logs.logbook import Logbook
from megatron_resihp.control.head.logs.own_curves import HEALTHY
from megatron_resihp.control.head.logs.writer import CarefulWriter, Term
from megatron_resihp.control.replanning.health import Speeds, still_slow
from megatron_resihp.events.bus import EventBus
from megatron_resihp.events.detection import Verdict
from megatron_resihp.events.epochs import EpochStarted
from megatron_resihp.events.event import Event
from megatron_resihp.events.log import EventLog, read_first_epoch
from megatron_resihp.events.training import Iteration
from megatron_resihp.events.workers import WorkerDead
from megatron_resihp.protocol.logs import LogPage, LogsWanted, TensorBoardWish


def verdict(*workers: int, change: str = "onset", speed: float = 0.5) -> Any:
    kind = "compute" if len(workers) == 1 else "link"
    return made_up("verdict", kind=kind, change=change, workers=workers, speed=speed, since=2, iteration=4)


def test_who_is_slow_is_known_to_the_next_coordinator(tmp_path: Path) -> None:
    said = [
        verdict(3), verdict(1), verdict(3, change="severity", speed=0.4), verdict(0, 2, speed=0.6),
        verdict(1, change="recovery", speed=1.0),
    ]  # fmt: skip
    EventLog(tmp_path / "events.jsonl").close()
    bus, speeds, logged = EventBus(), Speeds(), list[Event]()
    bus.subscribe(speeds.note, Verdict)
    sink: Any = SimpleNamespace(follow=lambda bus: bus.subscribe(logged.append, Verdict))
    before: Any = SimpleNamespace(facts=(), last=())
    catch_up(before, still_slow(said), bus, sink, tmp_path / "events.jsonl")
    assert speeds.of(range(4)) == {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.4} and speeds.links(range(4)) == {(0, 2): 0.6}
    assert not logged, "the log has them"


def iteration(number: int, seconds: float, epoch: int = 0) -> Iteration:
    return Iteration(time=1.0, epoch=epoch, iteration=number, samples=8, duration_s=seconds, worker=3)


def test_the_plugin_s_own_curves_go_on_where_they_were(tmp_path: Path) -> None:
    """Who lives is known from decisions, the healthy speed from the log of the first epoch."""
    path, bus, pages = tmp_path / "events.jsonl", EventBus(), list[LogPage]()
    with EventLog(path) as log:
        for event in (made_up("run_started"), iteration(1, 50.0), made_up("run_started"), iteration(1, 2.0),
                      iteration(2, 2.0), iteration(3, 4.0, epoch=1)):  # fmt: skip
            log.write(event)
    writer: Any = SimpleNamespace(write=pages.append, close=lambda: None)
    make = lambda wanted, tell, term: [CarefulWriter("TensorBoard", lambda: writer, tell)]  # noqa: E731
    book = Logbook(bus, Term("a run"), make, read_first_epoch(path, HEALTHY))
    plan: Any = {"version": 2, "standbys": {"3": [0, 1]}, "replicas": [{"stages": [[0], [2]], "micro_batches": [0]}]}
    started = EpochStarted(time=2.0, epoch=1, plan=plan)
    before: Any = SimpleNamespace(facts=(started, WorkerDead(time=3.0, epoch=1, dead=0, cause="exit code 1")), last=())
    catch_up(before, [verdict(2)], bus, SimpleNamespace(follow=lambda bus: None), path)  # type: ignore[arg-type]
    book.take(LogsWanted(0, TensorBoardWish("/logs", 1000), None))
    bus.publish(iteration(4, 4.0, epoch=1))
    book.close()
    assert [{point.tag: point.value for point in page.scalars} for page in pages] == [{
        "resihp/workers_alive": 2.0, "resihp/slow_workers": 1.0, "resihp/samples_per_s": 2.0,
        "resihp/share_of_healthy_speed": 0.5,
    }]  # fmt: skip
