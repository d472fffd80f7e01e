# SPDX-License-Identifier: Apache-2.0
"""`resihp report` as a user calls it."""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_resihp.control.commands import contact
from megatron_resihp.control.worker.noticeboard import Noticeboard
from megatron_resihp.control.worker.saved_state import LastSave
from megatron_resihp.events.event import Event
from megatron_resihp.events.job import RunStarted
from megatron_resihp.events.log import EventLog
from megatron_resihp.report.run.command import add_arguments, run


def call(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(argument) for argument in arguments]))


@pytest.fixture
def run_dir(tmp_path: Path, recovered_run: Any) -> Path:
    return _written(tmp_path / "run", recovered_run.events)


@pytest.fixture
def reference_dir(tmp_path: Path, synthetic_run: Callable[..., Any]) -> Path:
    reference = synthetic_run()
    reference.step(40)
    reference.finish()
    return _written(tmp_path / "reference", reference.events)


def _written(directory: Path, events: Sequence[Event]) -> Path:
    directory.mkdir()
    with EventLog(directory / "events.jsonl") as log:
        for event in events:
            log.write(event)
    return directory


def test_the_page_goes_to_stdout(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(run_dir) == 0
    assert capsys.readouterr().out.startswith("Reached iteration 40 of 40; 2 recoveries")


def test_json_is_all_of_stdout(run_dir: Path, reference_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(run_dir, "--json", "--reference", reference_dir) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["completed"] is True
    assert summary["recoveries"][0]["dead"][0]["worker"] == 3
    assert summary["compared_iterations"] == 40
    assert 0 <= summary["loss_max_relative_difference"] < 0.1


def test_the_check_passes_where_all_is_well(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(run_dir, "--check", "--reference", run_dir) == 0
    assert capsys.readouterr().err == ""


def test_the_check_fails_with_one_line_and_exit_code_1(
    run_dir: Path, tmp_path: Path, synthetic_run: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    other = synthetic_run(seed=1)
    other.step(40)
    assert call(run_dir, "--check", "--json", "--reference", _written(tmp_path / "other", other.events)) == 1
    out, err = capsys.readouterr()
    assert len(json.loads(out)["loss_reference"]) == 40
    assert err.startswith("resihp: check failed: loss against the reference run: relative difference at most ")
    assert err.count("\n") == 1


def test_a_picture_is_drawn(run_dir: Path, reference_dir: Path, tmp_path: Path) -> None:
    assert call(run_dir, "--plot", tmp_path / "run.png", "--reference", reference_dir) == 0
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_damaged_lines_are_reported(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run_dir / "events.jsonl").open("a") as log:
        log.write('nonsense\n{"event": "itera')
    assert call(run_dir) == 0
    out = capsys.readouterr().out
    assert "2 lines of the event log could not be read" in out
    assert "samples: can't tell: log damaged" in out


def test_a_run_whose_launcher_is_gone_has_ended_without_a_word(
    tmp_path: Path,
    synthetic_run: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a job that was killed as a whole, and of one that does not answer while its process lives."""
    monkeypatch.setattr(contact, "CONNECT_S", 0.05)
    run = synthetic_run()
    run.step(12)
    directory = _written(tmp_path / "cut-off", run.events)
    assert call(directory) == 0
    assert capsys.readouterr().out.startswith("ENDED WITHOUT A WORD (last step ")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    told = {"store": f"127.0.0.1:{port}", "token": "x", "host": socket.gethostname(), "pid": os.getpid()}
    (directory / "coordinator.json").write_text(json.dumps(told))
    assert call(directory) == 0
    assert capsys.readouterr().out.startswith("STALLED (last step ")
    (directory / "coordinator.json").write_text(json.dumps({**told, "host": "another"}))
    assert call(directory) == 0
    assert capsys.readouterr().out.startswith("Running or ended, its launcher can't be reached from here")


def test_bad_input_is_one_line_and_exit_code_2(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = _written(tmp_path / "empty", [])
    nonsense = tmp_path / "nonsense"
    nonsense.mkdir()
    (nonsense / "events.jsonl").write_text("nonsense\n")
    directory = tmp_path / "directory"
    (directory / "events.jsonl").mkdir(parents=True)
    barren = tmp_path / "barren"
    barren.mkdir()
    started = _written(tmp_path / "started", [RunStarted(world_size=8)])
    cases: dict[str, tuple[object, ...]] = {
        "is not a directory": (tmp_path / "nowhere",),
        "has no events.jsonl": (barren,),
        "is empty": (empty,),
        "holds nothing but 1 unreadable line": (nonsense,),
        "cannot be read": (directory,),
        "nowhere is not a directory": (run_dir, "--reference", tmp_path / "nowhere"),
        "nothing to draw": (started, "--plot", tmp_path / "run.png"),
        "cannot be written": (run_dir, "--plot", tmp_path / "nowhere" / "run.png"),
        "cannot be drawn": (run_dir, "--plot", tmp_path / "run.nonsense"),
    }
    for cause, arguments in cases.items():
        assert call(*arguments) == 2, cause
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("resihp: ")
        assert cause in err
        assert "; " in err
        assert err.count("\n") == 1, err


@pytest.mark.parametrize(("later_s", "missing", "said"), [
    (2, (), "all of it; go on from it with --load {run_dir}/emergency_checkpoint --no-load-rng"),
    (2, ((0, 1),), "which is not enough to resume; missing: stage 0 TP rank 1; go on from the last checkpoint"),
    (-3600, (), None),
])  # fmt: skip
def test_what_survivors_of_node_0_have_saved_is_told(
    tmp_path: Path, synthetic_run: Callable[..., Any], capsys: pytest.CaptureFixture[str],
    later_s: int, missing: tuple[tuple[int, int], ...], said: str | None,
) -> None:  # fmt: skip
    """But not what those of an earlier run have, in the same directory."""
    run = synthetic_run()
    run.step(12)
    run_dir = _written(tmp_path / "run", run.events)
    board = Noticeboard(run_dir / "emergency_checkpoint" / "survivors-3fa8-0", me=4)
    LastSave(13, "emergency_checkpoint", missing, run.now + later_s).pin(board)
    assert call(run_dir) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    if said is None:
        assert first.startswith("ENDED WITHOUT A WORD") and not any("saved" in line for line in rest)
    else:
        assert first.startswith("COORDINATOR LOST (last step") and "iteration 12 of 40" in first
        [reason] = [each for each in rest if each.startswith("  reason: the coordinator was lost; ")]
        assert "the state after iteration 13" in reason and reason.endswith(said.format(run_dir=run_dir))
