# SPDX-License-Identifier: Apache-2.0
"""`resihp replay` of whole, cut, damaged and foreign logs of decisions."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from megatron_resihp.cli import main
from megatron_resihp.control.coordination.decisions.recorded import Recorded
from megatron_resihp.control.head.decision_file import FILE_NAME, DecisionFile
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.plan import Chunk
from megatron_resihp.protocol.job import JobDescription
from megatron_resihp.protocol.messages import JobStarted, ProcessExited, Ready
from megatron_resihp.version import __version__

STEPS = 5
WHOLE = f"resihp: {STEPS} steps, and the replay decides in each what the run decided\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Of a run of two workers, the second of which dies."""
    with closing(DecisionFile(tmp_path)) as file:
        job = Recorded(JobSize(2, 1), write=file.write)
        job.handle(JobStarted(0, JobDescription(1, 1, 4, (Chunk(0, 0, 3),), 8, False, True)), 1000.0)
        for worker in (0, 1):
            job.handle(Ready(worker, 0, {"0/0": "a"}, (9000 + worker,), 0, 0), 1001.0)
        job.tick(0.5, 1001.5)
        job.handle(ProcessExited(1, -9, 1002.0), 1002.0)
        job.tick(0.5, 1002.5)
        job.write_down()
    return tmp_path / FILE_NAME


def replayed(log: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    code = main(["replay", str(log.parent), *options])
    captured = capsys.readouterr()
    assert captured.err.count("\n") <= 1
    return code, captured.out, captured.err


def test_what_was_decided_is_told_and_decided_again(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = replayed(log, capsys)
    assert (code, err) == (0, "") and out.endswith(WHOLE)
    [started, ready, died, _] = out.splitlines()
    assert "JobStarted(worker=0) -> " in started and "EpochPlan(epoch=0)" in started
    assert "Ready(worker=1" in ready and " -> Go(epoch=0, ports=(9000, 9001)); " in ready
    assert "ProcessExited(worker=1, code=-9, time=1002.0) -> log WorkerDead(" in died
    assert "tell all EpochIsBroken(epoch=0, cause=worker 1: exit signal 9" in died
    assert "Passed(seconds=0.5) -> nothing" in replayed(log, capsys, "--steps")[1]


def test_only_its_user_may_read_it(log: Path) -> None:
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_run_directory_that_is_used_again_has_the_last_run(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Even if the one before it was killed in the middle of a line."""
    log.write_text(log.read_text()[:-10])
    with closing(DecisionFile(log.parent)) as file:
        Recorded(JobSize(1, 1), write=file.write).handle(ProcessExited(0, 0, 1.0), 1.0)
    code, out, err = replayed(log, capsys)
    assert (code, err) == (0, "") and "resihp: 1 steps" in out


def test_a_log_that_is_cut_in_the_middle_of_a_line(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.write_text(log.read_text()[:-10])
    code, out, err = replayed(log, capsys)
    assert code == 1 and f"resihp: {STEPS - 1} steps, and" in out
    assert err == f"resihp: {log}: its last line is cut off; what came before it is replayed\n"


def test_lines_that_are_damaged_or_missing(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[:2], lines[2][:40], *lines[3:], ""]))
    code, out, err = replayed(log, capsys)
    assert code == 1 and "resihp: 1 steps" in out and f"{log}: line 3 is damaged: " in err
    log.write_text("\n".join([*lines[:2], *lines[3:], ""]))
    code, out, err = replayed(log, capsys)
    assert code == 1 and "resihp: 1 steps" in out and f"{log}: line 3 has step 3, and step 2 is missing; " in err


@pytest.mark.parametrize("field", [{}, {"new": 1}])
def test_a_log_of_another_version(log: Path, capsys: pytest.CaptureFixture[str], field: dict[str, int]) -> None:
    """Even if its entries can't be read here."""
    began, *steps = log.read_text().splitlines()
    other = json.loads(began)
    other["body"] |= {"version": "9.1", **field}
    log.write_text("\n".join([json.dumps(other), *steps, ""]))
    said = f"resihp: {log} holds decisions of version 9.1, this is {__version__}; replay them there\n"
    assert replayed(log, capsys) == (2, "", said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "can't be read (No such file or directory); give the run directory of a job"),
        ("", "holds no decisions: its job has not begun"),
        ('{"protocol": "2.0", "kind": "Began", "se', "holds no decisions: its job has not begun"),
        ('{"protocol": "2.0", "kind": "Began", "se\n', "holds no decisions: line 1 is damaged: "),
    ],
)
def test_where_there_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / FILE_NAME).write_text(text)
    code, out, err = replayed(tmp_path / FILE_NAME, capsys)
    assert (code, out) == (2, "") and said in err


def test_a_step_that_is_decided_otherwise_is_named(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = log.read_text()
    log.write_text(text.replace('"code": -9', '"code": 1'))
    code, _, err = replayed(log, capsys)
    assert code == 1 and "resihp: step 4 (ProcessExited): the run did worker_dead, epoch_broken, EpochIsBroken" in err
    log.write_text(text.replace('"code": -9', '"code": -15'))
    assert "the replay worker_dead, epoch_broken, EpochIsBroken with other contents" in replayed(log, capsys)[2]


def test_a_full_disk_ends_no_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = DecisionFile(tmp_path / "missing")
    job = Recorded(JobSize(1, 1), write=file.write)
    assert job.handle(ProcessExited(0, 0, 1.0), 1.0)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "can't be written (No such file or directory); what is decided" in said
