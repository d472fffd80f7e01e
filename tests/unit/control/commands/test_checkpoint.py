# SPDX-License-Identifier: Apache-2.0
"""`resihp checkpoint` as people and job scripts call it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from megatron_resihp.control import exit_codes
from megatron_resihp.control.commands.checkpoint import NOTHING, add_arguments, run
from megatron_resihp.control.worker.noticeboard import Noticeboard
from megatron_resihp.control.worker.saved_state import DIRECTORY, JOINED, TRACKER, LastSave


def call(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(argument) for argument in arguments]))


def state(directory: Path, iteration: object) -> Path:
    """What Megatron takes for a directory of checkpoints."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / TRACKER).write_text(str(iteration))
    return directory


def test_it_says_in_one_line_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the newest state, where a run directory was used again."""
    state(tmp_path / "run" / DIRECTORY, 5)
    later = state(tmp_path / "run" / DIRECTORY / "3fa8", 9)
    assert call(tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert said == f"the state after iteration 9 is saved, all of it; go on from it with --load {later} --no-load-rng\n"


def test_of_two_runs_that_saved_the_same_iteration_the_later_one_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier, later = state(tmp_path / DIRECTORY, 5), state(tmp_path / DIRECTORY / "3fa8", 5)
    os.utime(earlier / TRACKER, (100, 100))
    assert call(tmp_path, "--flags") == 0
    assert capsys.readouterr().out.splitlines() == ["--load", str(later), "--no-load-rng"]


@pytest.mark.parametrize(
    ("saved", "last_checkpoint", "is_newer"),
    [(9, 8, True), (9, None, True), (9, "release", True), (8, 8, False), (8, 9, False), (None, None, False)],
)
def test_a_script_loads_only_what_is_newer_than_the_last_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], saved: int | None, last_checkpoint: object, is_newer: bool
) -> None:
    if saved is not None:
        state(tmp_path / "run" / DIRECTORY, saved)
    if last_checkpoint is not None:
        state(tmp_path / "checkpoints", last_checkpoint)
    asked = (tmp_path / "run", "--newer-than", tmp_path / "checkpoints")
    assert call(*asked, "--flags") == 0
    expected = ["--load", str(tmp_path / "run" / DIRECTORY), "--no-load-rng"] if is_newer else []
    assert capsys.readouterr().out.splitlines() == expected
    assert call(*asked) == (0 if is_newer else NOTHING)


@pytest.mark.parametrize(
    ("persistent", "non_persistent", "is_newer"), [(4, 8, True), (4, 9, False), (9, 6, False), (None, 12, False)]
)
def test_a_state_replaces_no_newer_non_persistent_checkpoint(
    tmp_path: Path, persistent: int | None, non_persistent: int, is_newer: bool
) -> None:
    """Megatron would load that one: the newest of both kinds."""
    state(tmp_path / "run" / DIRECTORY, 9)
    state(tmp_path / "checkpoints" / "non_persistent", non_persistent)
    if persistent is not None:
        state(tmp_path / "checkpoints", persistent)
    assert call(tmp_path / "run", "--newer-than", tmp_path / "checkpoints") == (0 if is_newer else NOTHING)


@pytest.mark.parametrize("flags", [(), ("--flags",)])
@pytest.mark.parametrize("kind", ["", "non_persistent"])
def test_nothing_is_chosen_where_the_last_checkpoint_is_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], kind: str
) -> None:
    """A power failure may leave an empty tracker. An old state of survivors' must not replace what is there."""
    state(tmp_path / "run" / DIRECTORY, 5)
    state(tmp_path / "checkpoints", 4)
    state(tmp_path / "checkpoints" / kind, "")
    assert call(tmp_path / "run", "--newer-than", tmp_path / "checkpoints", *flags) == exit_codes.REFUSED
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1 and "can't be read" in said.err


def test_what_no_start_can_load_is_told_and_not_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    board = Noticeboard(tmp_path / DIRECTORY / "survivors-3fa8-0", me=2)
    LastSave(7, DIRECTORY, ((0, 0), (0, 1)), saved_at=100.0).pin(board)
    (tmp_path / DIRECTORY / "iter_0000007").mkdir()
    assert call(tmp_path) == NOTHING
    told = capsys.readouterr().err
    assert "missing: stage 0 TP rank 0, stage 0 TP rank 1; go on from the last checkpoint" in told
    assert call(tmp_path, "--flags") == 0 and capsys.readouterr().out == ""


def test_what_has_to_be_joined_first_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether survivors of node 0 have left a note or those without a plan have not; later it needs no other flag."""
    saved = tmp_path / DIRECTORY
    (saved / "iter_0000007").mkdir(parents=True)
    (saved / "iter_0000007" / "worker_2.pt").touch()
    assert call(tmp_path) == NOTHING
    assert capsys.readouterr().err.endswith(f"; make a checkpoint of it with resihp emergency {tmp_path}\n")
    LastSave(7, DIRECTORY, (), 100.0, by_parameter=True).pin(Noticeboard(saved / "survivors-3fa8-0", me=2))
    assert call(tmp_path) == NOTHING
    told = capsys.readouterr().err
    assert told == (
        "resihp: the state after iteration 7 is saved, all of it; "
        f"make a checkpoint of it with resihp emergency {tmp_path}\n"
    )
    joined = state(saved / JOINED, 7)
    assert call(tmp_path) == 0 and capsys.readouterr().out.endswith(f"go on from it with --load {joined}\n")
