# SPDX-License-Identifier: Apache-2.0
"""The file of decisions where a coordinator takes over, and the one before is not gone yet."""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from megatron_resihp.control.coordination.actions import Limits
from megatron_resihp.control.coordination.decisions.entries import Began, Step, TakenOver, line_of
from megatron_resihp.control.coordination.decisions.reading import Decisions
from megatron_resihp.control.head.decision_file import FILE_NAME, DecisionFile, read_decisions
from megatron_resihp.control.head.decision_logs import DecisionLogs
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.version import __version__

BEGAN, EARLIER = (Began(__version__, JobSize(2, 1), Limits(), run) for run in ("this", "earlier"))
STEPS = tuple(Step(number, 1000.0 + number, TakenOver(f"process {number}")) for number in range(1, 6))


def lead(run_dir: Path, known: int | None, *steps: Step) -> DecisionLogs:
    """Write these steps. `known`: in the place of another, of so many steps."""
    before = None if known is None else Decisions(BEGAN, STEPS[:known])
    logs = DecisionLogs(run_dir, None, threading.Event(), BEGAN.run, before)
    logs.write([*([line_of(BEGAN)] if known is None else []), *map(line_of, steps)])
    return logs


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Another run was here, and was killed in the middle of a line."""
    with closing(DecisionFile(tmp_path)) as file:
        file.write([line_of(EARLIER), line_of(STEPS[0]), line_of(STEPS[1])[:-10]])
    (tmp_path / FILE_NAME).write_text((tmp_path / FILE_NAME).read_text()[:-1])
    return tmp_path


def test_what_the_one_before_still_writes_is_not_in_the_file(run_dir: Path) -> None:
    """It has heard late that its last decision is in etcd, where the next one has read it."""
    with ExitStack() as stack:
        first = stack.enter_context(closing(lead(run_dir, None, *STEPS[:2])))
        second = stack.enter_context(closing(lead(run_dir, 3, STEPS[3])))
        first.write([line_of(STEPS[2])])
        second.write([line_of(STEPS[4])])
    found = read_decisions(run_dir)
    assert (found.began, found.steps, found.problem) == (BEGAN, STEPS, "")
    [file] = run_dir.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_each_run_is_there_once_however_often_it_is_taken_over(run_dir: Path) -> None:
    lead(run_dir, None, STEPS[0]).close()
    for known in range(1, 5):
        lead(run_dir, known, STEPS[known]).close()
    lines = [line for line in (run_dir / FILE_NAME).read_text().splitlines() if line]
    assert lines[:2] == [line_of(EARLIER), line_of(STEPS[0])]
    assert lines[3:] == [line_of(BEGAN), *map(line_of, STEPS)]


def test_a_run_directory_without_the_file_gets_one(tmp_path: Path) -> None:
    lead(tmp_path, 4, STEPS[4]).close()
    assert read_decisions(tmp_path).steps == STEPS


def test_a_file_that_can_not_be_written_anew_is_left(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(own: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    lead(run_dir, None, STEPS[0]).close()
    monkeypatch.setattr(Path, "replace", full)
    logs = lead(run_dir, 1, STEPS[1])
    logs.write([line_of(STEPS[2])])
    logs.close()
    assert "can't be written (No space left on device)" in capsys.readouterr().err
    assert read_decisions(run_dir).steps == STEPS[:1] and [each.name for each in run_dir.iterdir()] == [FILE_NAME]
