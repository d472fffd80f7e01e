# SPDX-License-Identifier: Apache-2.0
"""What is measured on a node: processes that sum, folders, the clock."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from megatron_resihp.cli import main
from megatron_resihp.control.commands.launch import launch_options
from megatron_resihp.health import measures
from megatron_resihp.health.findings import Peer


def program(tmp_path: Path, second: str) -> tuple[str, ...]:
    """One whose second process does something else than its first, which ends well."""
    file = tmp_path / "program.py"
    file.write_text(
        "import argparse, json, os, signal, sys, time\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--number', type=int)\n"
        "number = parser.parse_known_args()[0].number\n"
        "print(json.dumps({'device': 'a GPU'}), flush=True)\n"
        f"if number == 1: {second}\n"
        "print(json.dumps({'device': 'a GPU', 'loop_s': 0.5}), flush=True)\n"
    )
    return sys.executable, str(file)


class TestLoop:
    def test_the_last_that_each_has_said_counts(self, tmp_path: Path) -> None:
        found = measures.loop(2, True, 30.0, {}, program(tmp_path, "print('of a library')"))
        assert found == (Peer("a GPU", loop_s=0.5), Peer("a GPU", loop_s=0.5))

    def test_one_that_hangs_is_killed(self, tmp_path: Path) -> None:
        begun = time.monotonic()
        found = measures.loop(2, True, 2.0, {}, program(tmp_path, "signal.pause()"))
        assert found == (Peer("a GPU", loop_s=0.5), Peer("a GPU"))
        assert time.monotonic() - begun < 20

    @pytest.mark.parametrize(
        ("second", "error"),
        [
            ("sys.exit('torn apart')", "it ended with 1: torn apart"),
            ("os.abort()", "it ended with -6: without a word"),
        ],
    )
    def test_one_that_fails_says_why(self, tmp_path: Path, second: str, error: str) -> None:
        assert measures.loop(2, True, 30.0, {}, program(tmp_path, second))[1] == Peer(error=error)


def test_a_folder_that_cannot_be_written_is_told() -> None:
    assert measures.folder(Path("/proc")).error
    assert measures.folder(Path("/nowhere")).error == "No such file or directory"


def test_a_folder_is_left_as_it_was(tmp_path: Path) -> None:
    found = measures.folder(tmp_path)
    assert found.error is None and found.free_gib > 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("ahead_s", [0.0, 60.0, -60.0])
def test_the_clock_is_compared_with_that_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    real = time.time
    monkeypatch.setattr(measures.time, "time", lambda: real() + ahead_s)
    assert measures.clock_offset_s(tmp_path) == pytest.approx(ahead_s, abs=5.0)


class TestCommand:
    @pytest.fixture
    def no_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever this machine has."""
        monkeypatch.setattr(launch_options, "devices", lambda kind: 0)

    @pytest.mark.nightly
    def test_a_node_that_can_do_it_is_fit(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """With gloo; nothing is left running, since the command waits for its processes."""
        asked = ["health", "--stand-in", "--nproc-per-node", "2", "--run-dir", str(tmp_path), "--min-free-gib", "0"]
        assert main(asked) == 0
        assert capsys.readouterr().out == "resihp: this node is fit for 2 workers\n"
        assert main([*asked, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["fit"] and [peer["error"] for peer in found["peers"]] == [None, None]
        assert all(peer["loop_s"] > 0 for peer in found["peers"])

    @pytest.mark.usefixtures("no_gpus")
    def test_a_node_without_gpus_is_not_fit_for_them(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["health", "--nproc-per-node", "2", "--min-free-gib", "0"]) == 1
        assert capsys.readouterr().err.startswith("resihp: this node is unfit: 0 of 2 GPUs are visible")

    @pytest.mark.usefixtures("no_gpus")
    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            (["--nproc-per-node", "gpu"], "--nproc-per-node gpu: this machine shows no GPU"),
            (["--nproc-per-node", "0"], "--nproc-per-node 0 is not a number of workers"),
            (["--nproc-per-node", "1", "--interface", "none7"], "--interface none7 is none of this node"),
            (["--nproc-per-node", "1", "--run-dir", "/nowhere"], "--run-dir /nowhere is not a folder"),
        ],
    )
    def test_what_cannot_be_tried_is_refused(
        self, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["health", *flags]) == 2
        assert said in capsys.readouterr().err
