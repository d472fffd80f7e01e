# SPDX-License-Identifier: Apache-2.0
"""When later starts find what survivors have saved, where the coordinator ordered it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_resihp.control.node.environment import RUN_DIR
from megatron_resihp.integration.loop import emergency_checkpoint
from megatron_resihp.integration.loop.emergency_checkpoint import name_if_whole, write_emergency_checkpoint
from megatron_resihp.plan import Shard
from megatron_resihp.protocol.published import EmergencyCheckpointOrder
from megatron_resihp.protocol.records import Commit

SHARDS = {0: (Shard(0, 3, 0, 1),), 2: (Shard(3, 6, 0, 1),)}
ORDER = EmergencyCheckpointOrder(4, "no plan", Commit(6, None, False, {}), SHARDS, (), entire=True)


class Channel:
    """Of one worker, to a coordinator that may be replaced."""

    def __init__(self, store: dict[str, str]) -> None:
        self.store = store
        self._own: dict[str, str] = {}

    def put(self, key: str, value: str) -> None:
        self._own[key] = self.store[key] = value

    def published(self, key: str) -> str | None:
        return self.store.get(key)

    def follow(self, store: dict[str, str]) -> None:
        self.store = store
        store.update(self._own)


def worker(number: int, store: dict[str, str]) -> Any:
    control = SimpleNamespace(channel=Channel(store), event=lambda event: None, tell=lambda message: None)
    own = SimpleNamespace(coordinates_in=lambda shards: ())
    return SimpleNamespace(worker=number, control=control, job=SimpleNamespace(own=own))


@pytest.fixture(autouse=True)
def stood_in_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    monkeypatch.setattr(emergency_checkpoint, "write_state", lambda runtime, order, directory: (directory, ""))
    monkeypatch.setattr(emergency_checkpoint, "by_stage", lambda runtime, order: True)
    (tmp_path / "emergency_checkpoint").mkdir()


def named(run_dir: Path) -> str | None:
    """The iteration that later starts find."""
    path = run_dir / "emergency_checkpoint" / "latest_checkpointed_iteration.txt"
    return path.read_text() if path.exists() else None


def test_it_is_found_once_all_have_written(tmp_path: Path) -> None:
    store: dict[str, str] = {}
    writers = [worker(number, store) for number in SHARDS]
    write_emergency_checkpoint(writers[0], ORDER)
    name_if_whole(writers[0], ORDER)
    assert named(tmp_path) is None, "worker 2 has died before it had written"
    write_emergency_checkpoint(writers[1], ORDER)
    name_if_whole(writers[1], ORDER)
    assert named(tmp_path) == "6"


def test_another_coordinator_may_come_between(tmp_path: Path) -> None:
    """What one worker has written, the others find with the next coordinator, too."""
    store, later = dict[str, str](), dict[str, str]()
    first, second = (worker(number, store) for number in SHARDS)
    write_emergency_checkpoint(first, ORDER)
    second.control.channel.follow(later)
    write_emergency_checkpoint(second, ORDER)
    first.control.channel.follow(later)
    name_if_whole(first, ORDER)
    assert named(tmp_path) == "6"


@pytest.mark.parametrize("order", [replace(ORDER, missing=SHARDS[2]), replace(ORDER, commit=None)])
def test_what_is_not_whole_is_not_found(tmp_path: Path, order: EmergencyCheckpointOrder) -> None:
    store: dict[str, str] = {}
    writers = [worker(number, store) for number in SHARDS]
    for each in writers:
        write_emergency_checkpoint(each, order)
    for each in writers:
        name_if_whole(each, order)
    assert named(tmp_path) is None


def test_who_has_nothing_to_write_finds_nothing(tmp_path: Path) -> None:
    idle = worker(1, {"saved/0": "yes", "saved/2": "yes"})
    write_emergency_checkpoint(idle, ORDER)
    name_if_whole(idle, ORDER)
    assert named(tmp_path) is None and "saved/1" not in idle.control.channel.store
