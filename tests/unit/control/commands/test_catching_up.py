# SPDX-License-Identifier: Apache-2.0
"""What planner and detector of a coordinator that takes over are told, beside what it has decided itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from made_up_events import made_up

from megatron_resihp.control.commands.launcher import catch_up
from megatron_resihp.control.replanning.health import Speeds, still_slow
from megatron_resihp.events.bus import EventBus
from megatron_resihp.events.detection import Verdict
from megatron_resihp.events.event import Event
from megatron_resihp.events.log import EventLog


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
