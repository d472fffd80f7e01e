# SPDX-License-Identifier: Apache-2.0
"""The command line: what it refuses, in one line and before anything is started."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from megatron_resihp.cli import main


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('this must not be run')")
    return str(path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line that `resihp launch` says when it refuses."""
    assert main(["launch", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("resihp: ") and captured.err.count("\n") == 1 and "; " in captured.err
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nproc-per-node", "0"], "--nproc-per-node 0"),
        (["--nnodes", "0"], "--nnodes 0"),
        (["--nnodes", "0:2"], "--nnodes 0:2 is not a job; give 1 or more nodes to begin with"),
        (["--nnodes", "3:2"], "--nnodes 3:2 begins with more nodes than there may be; give MIN:MAX"),
        (["--nnodes", "two"], "--nnodes two is not a number of nodes; give N, or MIN:MAX"),
        (["--nnodes", "1:"], "--nnodes 1: is not a number of nodes"),
        (["--nnodes", "1:3", "--node-rank", "3"], "--node-rank 3 is out of range; give 0 to 2"),
        (["--nnodes", "1:2"], "the same --coordinator HOST:PORT"),
        (["--node-rank", "1"], "--node-rank 1 is out of range; give 0 to 0"),
        (["--nnodes", "2", "--coordinator", "here:1", "--node-rank", "-1"], "give 0 to 1"),
        (["--nnodes", "2"], "the same --coordinator HOST:PORT"),
        (["--nnodes", "2", "--coordinator", "here:29500"], "the same --run-dir"),
        (["--coordinator", "here"], "--coordinator 'here' is not host:port"),
        (["--heartbeat-timeout", "0"], "--heartbeat-timeout 0"),
        (["--survivor-timeout", "nan"], "--survivor-timeout nan"),
        (["--drain-deadline", "0"], "--drain-deadline 0 is invalid; give more than 0 and at most 604800 seconds"),
        (["--min-workers", "2"], "--min-workers 2 is invalid; give 1 to 1, the workers at the start"),
        (["--connect-timeout", "inf"], "--connect-timeout inf is invalid; give more than 0 and at most 604800 seconds"),
        (["--coordinator", "no host:29500"], "the host 'no host' is unknown"),
        (["-m"], "there is no module"),
    ],
)
def test_bad_options(capsys: pytest.CaptureFixture[str], script: str, arguments: list[str], said: str) -> None:
    assert said in refused(capsys, *arguments, script)


@pytest.mark.parametrize("command", ["launch", "check"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--nproc-per-node 8 --distributed-timeout-minutes 10", "; Megatron's flags stand after the script, and "),
        ("--nproc_per_node 8 --master_port", "invalid int value: '{}' (an unset shell variable?); see "),
        ("--nproc_per_node --nnodes 1", "--nproc_per_node: expected one argument (an unset shell variable?); see "),
    ],
)
def test_words_before_the_script_that_can_not_be_read(
    capsys: pytest.CaptureFixture[str], script: str, command: str, words: str, said: str
) -> None:
    """In one line: all the options, above what is wrong, fill a terminal."""
    with pytest.raises(SystemExit) as ended:
        main([command, *words.split(), script, "--lr", "1"])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.startswith("resihp: ") and err.count("\n") == 1
    assert said.replace("{}", script) in err


@pytest.mark.parametrize("command", ["launch", "check"])
def test_help_says_that_flags_of_torchrun_are_taken(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert said.endswith("All flags of torchrun are accepted too, with dashes or underscores, except a few; "
                         "docs/usage.md lists them.")  # fmt: skip


def test_no_such_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "no.py does not exist; give a Python script" in refused(capsys, str(tmp_path / "no.py"))
    assert "is not a file" in refused(capsys, str(tmp_path))


def test_a_busy_port(capsys: pytest.CaptureFixture[str], script: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(capsys, "--coordinator", f"127.0.0.1:{port}", "--run-dir", str(tmp_path / "run"), script)
    assert f"cannot serve the store on port {port}" in said
    assert not (tmp_path / "run").exists()


def test_a_coordinator_that_does_not_answer(capsys: pytest.CaptureFixture[str], script: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    said = refused(
        capsys, "--nnodes", "2", "--node-rank", "1", "--coordinator", f"127.0.0.1:{port}", "--run-dir",
        str(tmp_path / "run"), "--connect-timeout", "0.2", script,
    )  # fmt: skip
    assert f"nothing answers at 127.0.0.1:{port} (Connection refused)" in said


def test_an_unwritable_run_directory(capsys: pytest.CaptureFixture[str], script: str) -> None:
    said = refused(capsys, "--run-dir", f"{script}/run", script)
    assert "cannot be written (Not a directory); give another --run-dir" in said


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    output = capsys.readouterr().out
    assert "launch" in output and "report" in output


def test_report_is_a_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "is not a directory" in capsys.readouterr().err


def test_flags_of_the_script_are_its_own(capsys: pytest.CaptureFixture[str], script: str) -> None:
    assert "--nproc-per-node 0" in refused(capsys, "--nproc-per-node", "0", script, "--rdzv_id", "--standalone")


def test_the_version_names_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(f"{name} " in said for name in ("megatron-resihp", "megatron-core", "torch", "Python"))
