# SPDX-License-Identifier: Apache-2.0
"""What becomes of saves that are under way: they are told of once they are whole, or dropped and removed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_resihp.control.worker.saved_state import TRACKER
from megatron_resihp.events.training import Checkpoint
from megatron_resihp.integration.saves.pending import Saves, directory_of_saves


class Writer:
    """In Megatron's writer's place. `calls`: how many saves wait for others."""

    def __init__(self) -> None:
        self.calls = 0

    def forget_calls(self) -> None:
        self.calls = 0


def saves_of(tmp_path: Path, *iterations: int) -> Any:
    """One worker's, with these under way and files of each."""
    saves: Any = Saves(SimpleNamespace(async_save=True, use_persistent_ckpt_worker=True))
    saves.writer = Writer()
    for iteration in iterations:
        (tmp_path / f"iter_{iteration:07d}").mkdir()
        (tmp_path / f"iter_{iteration:07d}" / "__0_0.distcp").write_text("half of it")
        saves.under_way.append(Checkpoint(iteration=iteration, path=str(tmp_path)))
        saves.writer.calls += 1
    return saves


def left(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def test_a_save_is_told_of_once_it_is_whole(tmp_path: Path) -> None:
    saves = saves_of(tmp_path, 2, 4)
    assert saves.take_whole() == []
    saves.writer.calls = 1
    assert [save.iteration for save in saves.take_whole()] == [2]
    assert saves.take_whole() == []


def test_what_is_dropped_is_removed_and_wanted_again(tmp_path: Path) -> None:
    saves = saves_of(tmp_path, 2, 4)
    saves.drop()
    assert saves.lost and left(tmp_path) == ["iter_0000002", "iter_0000004"], "others may still write"
    saves.drop()  # another epoch breaks on the way
    saves.forget_dropped(remove=True)
    assert left(tmp_path) == []


def test_one_survivor_removes(tmp_path: Path) -> None:
    saves = saves_of(tmp_path, 2)
    saves.drop()
    saves.forget_dropped(remove=False)
    saves.forget_dropped(remove=True)
    assert left(tmp_path) == ["iter_0000002"]


def test_what_all_have_written_stays(tmp_path: Path) -> None:
    """It has left the queue, and another worker may have seen it end."""
    saves = saves_of(tmp_path, 2, 4)
    saves.writer.calls = 1
    saves.drop()
    saves.forget_dropped(remove=True)
    assert left(tmp_path) == ["iter_0000002"]


def test_an_epoch_that_ends_between_saves_loses_none(tmp_path: Path) -> None:
    saves = saves_of(tmp_path)
    saves.drop()
    assert not saves.lost


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, "out/non_persistent"), ("scratch", "scratch")],
    ids=["beside the others", "elsewhere"],
)
def test_where_non_persistent_saves_are(given: str | None, expected: str) -> None:
    args = SimpleNamespace(save="out", non_persistent_global_ckpt_dir=given)
    assert directory_of_saves(args, non_persistent=True) == expected
    assert directory_of_saves(args, non_persistent=False) == "out"


def answer(monkeypatch: pytest.MonkeyPatch, others: bool) -> list[Any]:
    """The others' answer when all ask each other; returns how often they do."""
    plain, asked = torch.tensor, []

    def all_reduce(seen: torch.Tensor, op: Any) -> None:
        asked.append(op)
        seen |= others

    monkeypatch.setattr(torch, "tensor", lambda values, dtype, device: plain(values, dtype=dtype))
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return asked


@pytest.mark.parametrize(
    ("own", "others", "expected"), [(4, False, True), (2, True, True), (2, False, False), (None, False, False)]
)
def test_a_save_that_some_worker_has_seen_end_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: int | None, others: bool, expected: bool
) -> None:
    """All ask in the iteration that they repeat, and in no other: asking is a collective."""
    asked = answer(monkeypatch, others)
    saves = saves_of(tmp_path)
    if own is not None:
        saves.made("out", own)
    assert saves.is_there("out", 4) is (own == 4), "nobody has died since, and all know the same"
    saves.repeated = 4
    assert not saves.is_there("out", 5) and not asked
    assert saves.is_there("out", 4) is expected and len(asked) == 1


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [("2", "4", True), (None, "4", True), ("2", "2", False), ("4", "4", False), (None, None, False)],
    ids=["it has ended", "the first has ended", "cut short", "cut short in a job that was taken back", "the first cut"],
)
def test_a_save_that_nobody_has_seen_end_has_ended_once_the_tracker_has_come_to_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None, after: str | None, expected: bool
) -> None:
    answer(monkeypatch, others=False)
    saves = saves_of(tmp_path)
    if before is not None:
        (tmp_path / TRACKER).write_text(before)
    saves.begun(str(tmp_path), 4)
    if after is not None:
        (tmp_path / TRACKER).write_text(after)
    saves.repeated = 4
    assert saves.is_there(str(tmp_path), 4) is expected


def test_a_non_persistent_save_is_no_other_one(tmp_path: Path) -> None:
    saves = saves_of(tmp_path)
    saves.made("out/non_persistent", 4)
    assert not saves.is_there("out", 4)


def test_a_save_that_the_tracker_names_is_whole_though_its_epoch_broke_then(tmp_path: Path) -> None:
    saves = saves_of(tmp_path, 2, 4)
    (tmp_path / TRACKER).write_text("2")
    saves.writer.calls = 1
    saves.drop()
    assert saves.is_there(str(tmp_path), 2) and not saves.is_there(str(tmp_path), 4)
