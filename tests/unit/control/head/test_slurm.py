# SPDX-License-Identifier: Apache-2.0
"""Which nodes SLURM says are down. Its commands are made up."""

from __future__ import annotations

import queue
import subprocess
from pathlib import Path

import pytest

from megatron_resihp.control.head import slurm
from megatron_resihp.control.head.slurm import SlurmQuery

STEP = {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NODELIST": "n[0-2]"}
SINFO = "echo n1 down*; echo n1 down*; echo n2 allocated*"


def down(
    directory: Path, monkeypatch: pytest.MonkeyPatch, nodes: tuple[int, ...], sinfo: str = SINFO, **step: str
) -> tuple[int, ...]:
    """What is told of these nodes."""
    for name, does in {"scontrol": "printf 'n%d\\n' 0 1 2", "sinfo": f"echo $5 >> {directory}/asked; {sinfo}"}.items():
        (directory / name).write_text(f"#!/usr/bin/env bash\n{does}\n")
        (directory / name).chmod(0o755)
    monkeypatch.setattr(slurm, "LISTEN_S", 0.2)
    monkeypatch.setattr(slurm, "LOOK_S", 0.1)
    monkeypatch.setenv("PATH", str(directory), prepend=":")
    told: queue.Queue[tuple[int, ...]] = queue.Queue()
    SlurmQuery(STEP | step, 3, lambda answer: told.put(answer.nodes)).ask(nodes)
    return told.get(timeout=20.0)


def test_a_node_that_does_not_answer_yet_is_not_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert down(tmp_path, monkeypatch, (1, 2)) == (1,)
    assert set((tmp_path / "asked").read_text().splitlines()) == {"n1,n2"}


@pytest.mark.parametrize(
    ("state", "lost"),
    [
        ("down", True), ("down*", True), ("drained", True), ("drained*", True), ("fail*", True), ("drained~", True),
        ("draining", False), ("draining*", False), ("failing", False), ("allocated*", False), ("completing", False),
    ],
)  # fmt: skip
def test_the_job_script_calls_the_same_nodes_lost(state: str, lost: bool) -> None:
    """A node that was being drained when it was lost is `drained*`, not `down*`."""
    script = (Path(__file__).parents[4] / "scripts" / "slurm" / "job.sbatch").read_text()
    assert "[[ $state != $DOWN ]]" in script and "[[ $state == $DOWN ||" in script
    [pattern] = (line for line in script.splitlines() if line.startswith("DOWN="))
    done = subprocess.run(["bash", "-c", f"{pattern}; [[ $1 == $DOWN ]]", "bash", state], check=False)
    assert slurm.is_down(state) == (done.returncode == 0) == lost


def test_it_is_asked_again_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = f"(($(wc -l < {tmp_path}/asked) < 2)) || echo n2 down*"
    assert down(tmp_path, monkeypatch, (2,), later) == (2,)
    assert (tmp_path / "asked").read_text() == "n2\n" * 2


def test_what_was_not_asked_about_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert down(tmp_path, monkeypatch, (2,)) == ()


@pytest.mark.parametrize(
    "step", [{"SLURM_NODEID": "1"}, {"SLURM_STEP_NUM_NODES": "4"}, {"SLURM_NODEID": ""}], ids=["2nd", "4 nodes", "none"]
)
def test_where_ranks_are_not_its_own_it_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: dict[str, str]
) -> None:
    assert down(tmp_path, monkeypatch, (1, 2), **step) == () and not (tmp_path / "asked").exists()


def test_nodes_that_joined_later_are_not_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert down(tmp_path, monkeypatch, (3,)) == () and not (tmp_path / "asked").exists()


@pytest.mark.parametrize("sinfo", ["exit 1", "exec sleep 60"])
def test_without_an_answer_none_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sinfo: str
) -> None:
    monkeypatch.setattr(slurm, "ANSWER_S", 0.5)
    assert down(tmp_path, monkeypatch, (1,), sinfo) == ()
    assert capsys.readouterr().out.startswith("resihp: SLURM does not say which nodes are down (Command")
