# SPDX-License-Identifier: Apache-2.0
"""The script that submits a job for each node that a job lacks. SLURM's commands are made up."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[4] / "scripts" / "slurm" / "replace_watch.sh"
JOIN = SCRIPT.with_name("join.sbatch")
LOOKS = 3


def watch(directory: Path, lacking: list[int], squeue: str, sbatch: str = "echo 40") -> tuple[list[str], list[str]]:
    """What the script says while it looks three times, and what it asks SLURM for; then the job ends.

    Args:
        lacking: nodes that the job offers a place.
        squeue: what that does.
        sbatch: likewise.
    """
    run_dir = directory / "slurm-7"
    (run_dir / "returning").mkdir(parents=True)
    for rank in lacking:
        (run_dir / "returning" / f"node_{rank}.json").write_text("[]")
    (run_dir / "returning" / "node_9.taken-by-5").touch()
    commands = {
        "sbatch": f'echo "sbatch $*" >> {directory}/asked\n{sbatch}',
        "scancel": f'echo "scancel $*" >> {directory}/asked',
        "squeue": squeue,
        "sleep": f"echo >> {directory}/l; (($(wc -l < {directory}/l) < {LOOKS})) || touch {run_dir}/exit_code",
    }
    for name, does in commands.items():
        (directory / name).write_text(f"#!/usr/bin/env bash\n{does}\n")
        (directory / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{directory}:{os.environ['PATH']}",
        "RESIHP_REPLACE": "--gpus-per-node=8 --time=1-0",
    }
    command = ["bash", "-c", f'echo $$ > {directory}/pid; exec bash "$@"', "bash", str(SCRIPT), str(run_dir)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30.0)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    asked = directory / "asked"
    return done.stdout.splitlines(), asked.read_text().splitlines() if asked.exists() else []


def submitted(rank: int) -> str:
    return f"sbatch --parsable --nodes=1 --gpus-per-node=8 --time=1-0 {JOIN} slurm-7 {rank}"


def test_each_node_that_is_lost_is_asked_for_once(tmp_path: Path) -> None:
    """Its job waits until there is a node. The training job does not wait for it, and takes what still waits along."""
    said, asked = watch(tmp_path, [1, 3], "echo PENDING")
    assert asked == [submitted(1), submitted(3), "scancel --quiet --state=PENDING 40 40"]
    assert said == [f"replace_watch.sh: node {rank} is not there: job 40 is to bring it" for rank in (1, 3)]


def test_a_node_that_could_not_join_is_asked_for_again(tmp_path: Path) -> None:
    _, asked = watch(tmp_path, [2], "exit 1")
    assert asked[:-1] == [submitted(2)] * LOOKS


def test_a_slurm_that_refuses_is_quoted(tmp_path: Path) -> None:
    said, asked = watch(tmp_path, [2], "exit 1", 'echo "sbatch: error: Invalid account" >&2; exit 1')
    assert asked == [submitted(2)] * LOOKS
    assert set(said) == {"replace_watch.sh: node 2 is not there: sbatch: error: Invalid account"}


def test_a_whole_job_needs_nothing(tmp_path: Path) -> None:
    assert watch(tmp_path, [], "exit 1") == ([], [])


def test_what_is_being_submitted_at_the_end_is_cancelled_too(tmp_path: Path) -> None:
    """The batch script ends the watch, which has not seen yet that the job is over."""
    _, asked = watch(tmp_path, [1, 3], "echo PENDING", f"kill -s TERM $(< {tmp_path}/pid); echo 40")
    assert asked == [submitted(1), "scancel --quiet --state=PENDING 40"]


def test_no_other_job_is_cancelled_where_none_could_be_noted(tmp_path: Path) -> None:
    """The disk was full. Without ids scancel takes all jobs of the user that wait."""
    scancel = tmp_path / "scancel"
    scancel.write_text(f'#!/usr/bin/env bash\necho "scancel $*" >> {tmp_path}/asked\n')
    scancel.chmod(0o755)
    (tmp_path / "asked").touch()
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for noted, asked in (("", ""), ("40\n\n41;x\n", "scancel --quiet --state=PENDING 40\n")):
        (tmp_path / "replacements").write_text(noted)
        subprocess.run(["bash", str(SCRIPT), str(tmp_path), "cancel"], env=environment, check=True, timeout=30.0)
        assert (tmp_path / "asked").read_text() == asked
        assert not (tmp_path / "replacements").exists()
