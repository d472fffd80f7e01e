# SPDX-License-Identifier: Apache-2.0
"""The script that has nodes which SLURM drains leave the job. SLURM's commands and `resihp` are made up."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[4] / "scripts" / "slurm" / "drain_watch.sh"
HOSTS = "n0 n1 n2 n3"
LOOKS = 3


def watch(directory: Path, states: dict[str, str], resihp: str, first_rank: int = 0) -> tuple[list[str], list[str]]:
    """What the script says while it looks three times, and what it asks `resihp` for; then the job ends.

    Args:
        states: of hosts; empty: `sinfo` fails.
        resihp: what that does.
    """
    listed = "\n".join(f"{host} {state}" for host, state in states.items())
    commands = {
        "scontrol": f"printf '%s\\n' {HOSTS}",
        "sinfo": f"cat <<'END'\n{listed}\n{listed}\nEND" if states else "exit 1",
        "resihp": f'echo "$*" >> {directory}/asked\n{resihp}',
        "sleep": f"echo >> {directory}/l; (($(wc -l < {directory}/l) < {LOOKS})) || touch {directory}/exit_code",
    }
    for name, does in commands.items():
        (directory / name).write_text(f"#!/usr/bin/env bash\n{does}\n")
        (directory / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{directory}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[0-3]"}
    command = ["bash", str(SCRIPT), str(directory), str(first_rank)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30.0)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    asked = directory / "asked"
    return done.stdout.splitlines(), asked.read_text().splitlines() if asked.exists() else []


def test_each_draining_node_is_asked_for_once(tmp_path: Path) -> None:
    states = {"n0": "allocated", "n1": "draining", "n2": "mixed", "n3": "draining*"}
    said, asked = watch(tmp_path, states, 'echo "resihp: told to leave"')
    assert asked == [f"drain {tmp_path} node:1", f"drain {tmp_path} node:3"]
    assert said == [f"drain_watch.sh: SLURM drains {host}: resihp: told to leave" for host in ("n1", "n3")]


def test_what_is_refused_is_asked_for_again_and_said_once(tmp_path: Path) -> None:
    said, asked = watch(tmp_path, {"n2": "drained"}, 'echo "resihp: the job has not begun to train" >&2; exit 2')
    assert asked == [f"drain {tmp_path} node:2"] * LOOKS
    assert said == ["drain_watch.sh: SLURM drains n2: resihp: the job has not begun to train"]


def test_node_0_stays(tmp_path: Path) -> None:
    said, asked = watch(tmp_path, {"n0": "draining"}, "")
    assert not asked and said == ["drain_watch.sh: SLURM drains n0: node 0 has the coordinator, and stays"]


def test_an_allocation_that_joined_later_has_later_ranks(tmp_path: Path) -> None:
    _, asked = watch(tmp_path, {"n0": "draining"}, "", first_rank=4)
    assert asked == [f"drain {tmp_path} node:4"]


def test_a_slurm_that_does_not_answer_is_asked_again(tmp_path: Path) -> None:
    assert watch(tmp_path, states={}, resihp="") == ([], [])
