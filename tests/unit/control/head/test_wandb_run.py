# SPDX-License-Identifier: Apache-2.0
"""What a W&B run is told of checkpoints where a coordinator takes over; W&B's library is a stand-in."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_resihp.control.head.logs.wandb_run import WandbRun
from megatron_resihp.control.head.logs.writer import Term
from megatron_resihp.protocol.logs import CheckpointNote, LogPage, WandbRow, WandbWish


class Run:
    """W&B's, which has rows before this step. It knows no artifact."""

    offline, entity, project = False, "us", "ours"
    config: dict[str, Any]

    def __init__(self, starting_step: int) -> None:
        self.starting_step = starting_step
        self.steps: list[int] = []
        self.artifacts: list[str] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.steps.append(step)

    def log_artifact(self, artifact: Artifact, aliases: Sequence[str]) -> None:
        self.artifacts += aliases

    def use_artifact(self, name: str) -> None:
        raise ValueError(f"{name} is not there")


class Artifact:
    """W&B's, which takes only what is there."""

    def __init__(self, name: str, type: str, metadata: dict[str, int]) -> None:
        pass

    def add_reference(self, uri: str, checksum: bool) -> None:
        if not Path(uri.removeprefix("file://")).exists():
            raise ValueError(f"{uri} is not there")


def page(directory: Path, iteration: int, *, call: int = 0, saved: bool = True, row: bool = False) -> LogPage:
    """Of an iteration with a checkpoint."""
    note = CheckpointNote(saved, str(directory / f"iter_{iteration}"), str(directory), None, iteration)
    rows = (WandbRow({"lm loss": 1.0}, iteration),) if row else ()
    return LogPage(3, call, iteration, 1.0, rows=rows, checkpoints=(note,))


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    for iteration in range(1, 9):
        (tmp_path / f"iter_{iteration}").mkdir()
    return tmp_path


def led(monkeypatch: pytest.MonkeyPatch, directory: Path, after: int) -> tuple[Run, WandbRun]:
    """By a coordinator that takes over; the one before has written rows up to this step."""
    run = Run(after + 1)
    wandb = SimpleNamespace(Settings=lambda **_: None, init=lambda **_: run, Artifact=Artifact)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    wish = WandbWish("ours", None, None, str(directory / "wandb"), {}, "1234abcd")
    return run, WandbRun(wish, Term("a run", began=1.0))


def test_checkpoints_that_the_one_before_has_told_of_are_not_told_again(
    monkeypatch: pytest.MonkeyPatch, checkpoints: Path
) -> None:
    """Where rows are for every tenth iteration, most pages have none."""
    run, writer = led(monkeypatch, checkpoints, after=5)
    for each in (page(checkpoints, 4), page(checkpoints, 5, row=True), page(checkpoints, 6)):
        writer.write(each)
    writer.write(page(checkpoints, 7, row=True))
    assert (run.artifacts, run.steps) == (["iter_6", "iter_7"], [7])


def test_a_checkpoint_after_training_is_told(monkeypatch: pytest.MonkeyPatch, checkpoints: Path) -> None:
    """The rows of its iteration are there, and don't say whether it is."""
    run, writer = led(monkeypatch, checkpoints, after=8)
    writer.write(page(checkpoints, 8, call=1))
    assert run.artifacts == ["iter_8"]


@pytest.mark.parametrize(("saved", "said"), [(True, "does not take"), (False, "does not know")])
def test_a_checkpoint_that_is_gone_does_not_keep_rows_from_being_written(
    monkeypatch: pytest.MonkeyPatch, checkpoints: Path, capsys: pytest.CaptureFixture[str], saved: bool, said: str
) -> None:
    run, writer = led(monkeypatch, checkpoints, after=0)
    (checkpoints / "iter_3").rmdir()
    writer.write(page(checkpoints, 3, saved=saved, row=True))
    assert run.steps == [3]
    assert f"resihp: W&B {said} {checkpoints}/iter_3: " in capsys.readouterr().err
