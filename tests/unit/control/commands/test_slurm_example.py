# SPDX-License-Identifier: Apache-2.0
"""The job script for SLURM starts launchers that have all that they need, and ends as the job does.

SLURM's own commands are made up here. tests/cluster runs the script on a real SLURM.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron_resihp.control import exit_codes
from megatron_resihp.control.commands.launch.launch_options import add_arguments, check, options_of
from megatron_resihp.control.commands.launch.run_directory import JOB_ENDED
from megatron_resihp.control.commands.launch.seat import REASON
from megatron_resihp.control.transport.leaders import RESULT
from megatron_resihp.control.worker.saved_state import DIRECTORY, TRACKER

ROOT = Path(__file__).parents[4]
SLURM = ROOT / "scripts" / "slurm"
SCRIPT = (SLURM / "job.sbatch").read_text()
COMMANDS = {
    # Its controller may be away for the first so many questions.
    "scontrol": "[[ $2 == hostnames ]] || (($(cat asked 2>/dev/null | wc -l) >= ${AWAY_FOR:-0})) || "
    "{ echo >> asked; exit 1; }; "
    'if [[ $2 == config ]]; then echo "SlurmdPort = 6818"; '
    'elif [[ $2 == job ]]; then echo "   Requeue=1 Restarts=${SLURM_RESTART_COUNT:-0} BatchFlag=1"; '
    'elif [[ $1 == show ]]; then printf "node%s\\n" ${NODES_OF_JOB:-0 1}; else echo "scontrol $*"; fi',
    # The example hands its job over. The watch submits another one.
    "sbatch": "if [[ $1 == --parsable ]]; then echo 40; exit; fi; "
    'while [[ $1 == --* ]]; do shift; done; exec bash "$@"',
    # As SLURM does for the task on a node, the second one.
    "srun": 'eval "${SRUN:-}"; while [[ $1 == --* ]]; do shift; done; SLURM_NODEID=${TASK:-1} "$@"; '
    'echo "task: $?" >&2; exit ${SRUN_CODE:-0}',
    "resihp": "[[ $1 != checkpoint ]] || ((${LOOK_CODE:-0} == 0)) || exit $LOOK_CODE; "
    "if [[ $1 == checkpoint || $1 == emergency ]]; then "
    "[[ $1 != emergency ]] || ((${EMERGENCY_CODE:-0} == 0)) || exit $EMERGENCY_CODE; "
    f'[[ -z ${{SAVED:-}} ]] || {sys.executable} -m megatron_resihp.cli "$@"; '
    'exit; fi; printf "%s\\n" "$@"; eval "${LAUNCH:-}"; '
    'echo "${JOB_REASON:-}" > "$RUN_DIR/exit_reason"; '
    '[[ -z ${JOB_CODE:-} ]] || echo "$JOB_CODE" > "$RUN_DIR/exit_code"',
    # The first node and its coordinator are there, or out of reach.
    "timeout": f'[[ "$1 $2" != "5 tail" ]] || exec {shutil.which("timeout")} ${{LOOK_S:-5}} "${{@:2}}"; '
    f'[[ "$*" == */dev/tcp/* ]] || exec {shutil.which("timeout")} "$@"; '
    '[[ "$*" != */29400 ]] || exit ${COORDINATOR_GONE:-1}; exit ${NODE0_GONE:-0}',
    "sinfo": 'if [[ "$*" == *node2* ]]; then echo "$STATE_OF_2"; else echo "${NODE0_STATE:-allocated}"; fi',
    "scancel": 'echo "scancel $*"; exit ${SCANCEL_CODE:-0}',
    "squeue": "echo PENDING",
    "sleep": 'eval "${SLEEP:-}"',
}


def run(directory: Path, *more: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script where the checkout would be. `more`: flags of Megatron's."""
    for name, does in COMMANDS.items():
        (directory / name).write_text(f"#!/usr/bin/env bash\n{does}\n")
        (directory / name).chmod(0o755)
    (directory / "resihp-runs" / "slurm-7").mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "PATH": f"{directory}:{os.environ['PATH']}", "RESIHP_BIN": str(directory), "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "8", **variables,
    }  # fmt: skip
    (directory / "scripts").unlink(missing_ok=True)
    (directory / "scripts").symlink_to(ROOT / "scripts")
    command = ["bash", SLURM / "example_8b.sh", "data/prefix", "--nodes=2"]
    if more:
        command = ["bash", SLURM / "job.sbatch", "pretrain_gpt.py", *more]
    return subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, timeout=30.0)


def test_every_node_gets_a_launcher_of_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subcommand, *arguments = run(tmp_path, JOB_CODE="0").stdout.splitlines()
    assert subcommand == "launch"
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = options_of(parser.parse_args(arguments))
    monkeypatch.chdir(ROOT)  # the training script is there
    check(options)
    assert (options.nodes, options.node, options.workers_per_node) == (2, 1, 8)
    assert options.coordinator == ("node0", 29400) and options.run_dir == tmp_path / "resihp-runs" / "slurm-7"
    assert "--resihp" in options.command and "--eval-interval" in options.command
    for flag in ("--save", "--load"):
        assert options.command[options.command.index(flag) + 1] == str(tmp_path / "checkpoints" / "resihp")


@pytest.mark.parametrize(("last_checkpoint", "from_survivors"), [(3000, True), (5000, False)])
def test_it_goes_on_from_what_survivors_of_node_0_have_saved_since(
    tmp_path: Path, last_checkpoint: int, from_survivors: bool
) -> None:
    """The last `--load` counts."""
    saved = tmp_path / "resihp-runs" / "slurm-7" / DIRECTORY
    for directory, iteration in ((saved, 4321), (tmp_path / "checkpoints" / "resihp", last_checkpoint)):
        directory.mkdir(parents=True)
        (directory / TRACKER).write_text(f"{iteration}\n")
    done = run(tmp_path, JOB_CODE="0", SAVED="1", SLURM_RESTART_COUNT="1", PYTHONPATH=str(ROOT))
    arguments = done.stdout.splitlines()
    loaded = [Path(value) for flag, value in pairwise(arguments) if flag == "--load"]
    assert done.returncode == 0 and loaded[0] == tmp_path / "checkpoints" / "resihp"
    assert loaded[1:] == ([saved] if from_survivors else []) and ("--no-load-rng" in arguments) == from_survivors


def test_its_result_is_the_jobs(tmp_path: Path) -> None:
    """Whatever srun says of a node that was lost on the way."""
    done = run(tmp_path, JOB_CODE="0", SRUN_CODE="9")
    assert done.returncode == exit_codes.FINISHED, done.stderr
    assert "scontrol requeue" not in done.stdout


@pytest.mark.parametrize(
    ("variables", "code", "again"),
    [
        ({"JOB_CODE": str(exit_codes.RETRY)}, exit_codes.RETRY, True),
        ({"JOB_CODE": str(exit_codes.stopped_by(10))}, 138, True),
        ({"JOB_CODE": str(exit_codes.RETRY), "SLURM_RESTART_COUNT": "20"}, exit_codes.RETRY, False),
        ({"JOB_CODE": str(exit_codes.NO_PLAN)}, exit_codes.NO_PLAN, False),
        ({"JOB_CODE": str(exit_codes.FAILED)}, exit_codes.FAILED, False),
        ({"JOB_CODE": str(exit_codes.stopped_by(15))}, 143, False),
        ({"SRUN_CODE": "137"}, exit_codes.RETRY, True),
        ({"SRUN_CODE": str(exit_codes.REFUSED)}, exit_codes.REFUSED, False),
        ({"SRUN_CODE": "127"}, 127, False),
        ({"JOB_CODE": "138", "SLURM_RESTART_COUNT": "20", "RESIHP_MOST_REQUEUES": "100"}, 138, True),
    ],
    ids=[
        "lost", "time is over", "lost too often", "no plan", "failed", "told to end", "launcher killed", "refused",
        "no command", "more often",
    ],
)  # fmt: skip
def test_it_is_queued_again_where_that_helps(tmp_path: Path, variables: dict[str, str], code: int, again: bool) -> None:
    done = run(tmp_path, **variables)
    assert done.returncode == code, done.stderr
    assert ("scontrol requeue 7" in done.stdout) == again


def test_a_task_that_hangs_does_not_keep_the_job_from_being_queued_again(tmp_path: Path) -> None:
    hangs = "echo 138 > $RUN_DIR/exit_code; exec /bin/sleep 5"
    done = run(tmp_path, LAUNCH=hangs, LOOK_S="0.05")
    assert (done.returncode, "scontrol requeue 7" in done.stdout) == (138, True)
    assert "but not all tasks have" in done.stderr


def test_a_result_that_a_full_disk_has_cut_off_is_none(tmp_path: Path) -> None:
    done = run(tmp_path, LAUNCH=": > $RUN_DIR/exit_code", SRUN_CODE="138")
    assert done.returncode == exit_codes.RETRY and "scontrol requeue 7" in done.stdout


def test_a_controller_that_is_away_for_a_moment_is_asked_again(tmp_path: Path) -> None:
    """At the start, and at the end."""
    done = run(tmp_path, JOB_CODE="138", AWAY_FOR="2", LAUNCH="rm asked")
    assert done.returncode == 138 and "scontrol requeue 7" in done.stdout


def test_a_signal_of_slurm_ends_no_task_before_its_launcher(tmp_path: Path) -> None:
    """Slurm signals all processes of a step. The launcher takes its time to save, and its code is the task's."""
    saving = f"kill -s USR1 $PPID; echo saved; exit {exit_codes.RETRY}"
    done = run(tmp_path, LAUNCH=saving)
    assert "saved" in done.stdout and f"task: {exit_codes.RETRY}" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("gone", "state", "restarts", "follows"),
    [
        ("1", "down*", "0", "scontrol requeue 7"), ("1", "allocated*", "0", "scontrol requeue 7"),
        ("1", "allocated", "0", ""), ("1", "draining", "0", ""), ("0", "down*", "0", ""),
        ("0", "down", "0", "scontrol requeue 7"), ("0", "allocated", "0", ""),
        ("1", "down*", "20", "scancel 7"),
    ],
)  # fmt: skip
def test_a_task_queues_the_job_again_if_the_first_node_is_lost(
    tmp_path: Path, gone: str, state: str, restarts: str, follows: str
) -> None:
    """Not if its own node was cut off, and the job goes on without it. A first node that was started again answers."""
    done = run(
        tmp_path, LAUNCH=f"exit {exit_codes.RETRY}", SRUN_CODE=str(exit_codes.REFUSED), NODE0_GONE=gone,
        NODE0_STATE=state, SLURM_RESTART_COUNT=restarts,
    )  # fmt: skip
    said = [line for line in done.stdout.splitlines() if line.startswith(("scontrol requeue", "scancel"))]
    assert said == ([follows] if follows else []), done.stderr


@pytest.mark.parametrize(
    ("ends", "variables", "follows"),
    [
        (f"exit {exit_codes.REFUSED}", {}, "scontrol requeue 7"), ("kill -s KILL $$", {}, "scontrol requeue 7"),
        ("echo 138 > $RUN_DIR/exit_code; exit 138", {}, "scontrol requeue 7"),
        ("echo 0 > $RUN_DIR/exit_code; exit 0", {}, "scancel 7"),
        ("echo 69 > $RUN_DIR/exit_code; exit 69", {}, "scancel 7"),
        ("exit 0", {"COORDINATOR_GONE": "0"}, ""), ("touch $RUN_DIR/ended/0; exit 0", {}, ""),
    ],
    ids=["refused", "killed", "time is over", "finished", "no plan", "left, and the job goes on", "ended by itself"],
)  # fmt: skip
def test_an_allocation_whose_first_node_is_lost_ends_whatever_the_others_end_with(
    tmp_path: Path, ends: str, variables: dict[str, str], follows: str
) -> None:
    """The first node may be lost before its coordinator was there, or once the job was over."""
    done = run(
        tmp_path, LAUNCH=ends, NODE0_GONE="1", NODE0_STATE="down*", SRUN_CODE=str(exit_codes.REFUSED),
        RESIHP_MOST_REQUEUES="1", **variables,
    )  # fmt: skip
    task = done.stdout.partition("resihp: exit code")[0]  # what comes then is the batch script's
    said = [line for line in task.splitlines() if line.startswith(("scontrol requeue", "scancel"))]
    assert said == ([follows] if follows else []), done.stderr


@pytest.mark.parametrize(("ends", "noted"), [("exit 0", True), ("exit 75", True), ("kill -s KILL $$", False)])
def test_a_first_node_on_which_all_is_killed_has_not_ended_by_itself(tmp_path: Path, ends: str, noted: bool) -> None:
    """The task may outlive the launcher by a moment."""
    run(tmp_path, LAUNCH=ends, TASK="0", SRUN_CODE=str(exit_codes.REFUSED))
    assert (tmp_path / "resihp-runs" / "slurm-7" / "ended" / "0").exists() == noted


@pytest.mark.parametrize(
    ("states", "waits"),
    [("allocated", True), ("down*", False), ("allocated*", False)], ids=["writes", "lost", "lost, as it seems"],
)  # fmt: skip
def test_a_task_does_not_end_others_that_still_write_what_they_hold(tmp_path: Path, states: str, waits: bool) -> None:
    """The first node is lost. Node 2 takes longer than node 1 to save."""
    done = run(
        tmp_path, LAUNCH=f"exit {exit_codes.RETRY}", NODE0_GONE="1", NODES_OF_JOB="0 1 2", SLURM_JOB_NUM_NODES="3",
        STATE_OF_2=states, NODE0_STATE="down*", SRUN_CODE=str(exit_codes.REFUSED),
        SLEEP="[[ $1 != 5 ]] || { echo waited; touch $RUN_DIR/ended/2; }",
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line in ("waited", "scontrol requeue 7")]
    assert lines == ["waited"] * waits + ["scontrol requeue 7"], done.stderr


@pytest.mark.parametrize(
    ("flags", "variables", "said"),
    [
        (["--save", "out", "--finetune"], {}, "--finetune would apply again"),
        (["--save", "out", "--ckpt-step", "3"], {}, "--ckpt-step would apply again"),
        (["--save", "out", "--ckpt-step=3"], {}, "--ckpt-step would apply again"),
        (["--save", "out", "--exit-on-missing-checkpoint"], {}, "before there is a checkpoint; leave it out"),
        (["--save", "out", "--load", "base"], {}, "--load base would load that again"),
        (["--save=out", "--load=base"], {}, "--load base would load that again"),
        (["--load", "base"], {}, "usage: sbatch"),
        (["--save", "out"], {"SLURM_GPUS_ON_NODE": ""}, "use sbatch --gpus-per-node=N"),
    ],
)  # fmt: skip
def test_what_can_not_go_on_is_refused_before_it_begins(
    tmp_path: Path, flags: list[str], variables: dict[str, str], said: str
) -> None:
    done = run(tmp_path, *flags, **variables)
    assert (done.returncode, done.stdout) == (exit_codes.REFUSED, "") and said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("flags", [["--save", "out", "--load", "out"], ["--save=out", "--load=out"]])
def test_a_job_may_load_where_it_saves(tmp_path: Path, flags: list[str]) -> None:
    done = run(tmp_path, *flags, JOB_CODE="0")
    assert done.returncode == 0 and "launch" in done.stdout
    given = done.stdout.splitlines()
    assert given[given.index("--load") + 1] == "out"


@pytest.mark.parametrize(
    ("flags", "variables", "spread"),
    [
        ([], {}, True), ([], {"RESIHP_SPREAD": "0"}, False), ([], {"SLURM_JOB_NUM_NODES": "1"}, False),
        (["--expert-model-parallel-size", "2"], {}, False), (["--context-parallel-size=2"], {}, False),
        (["--context-parallel-size", "1"], {}, True),
    ],
    ids=["nodes", "not wanted", "one node", "experts shared", "sequences shared", "sequences whole"],
)  # fmt: skip
def test_no_shard_lives_on_one_node_only_where_that_can_be(
    tmp_path: Path, flags: list[str], variables: dict[str, str], spread: bool
) -> None:
    done = run(tmp_path, "--save", "out", *flags, JOB_CODE="0", **variables)
    assert done.returncode == 0 and done.stdout.splitlines().count("--resihp-spread-replicas") == spread


def test_nothing_is_trained_where_the_newest_state_is_not_known(tmp_path: Path) -> None:
    done = run(tmp_path, "--save", "out", SLURM_RESTART_COUNT="1", LOOK_CODE="7")
    assert done.returncode == 7 and not done.stdout


@pytest.mark.parametrize(("code", "trains"), [(1, True), (2, False), (137, False)])
def test_state_of_survivors_that_can_not_be_used_is_not_passed_over(tmp_path: Path, code: int, trains: bool) -> None:
    (tmp_path / "resihp-runs" / "slurm-7" / DIRECTORY).mkdir(parents=True)
    done = run(tmp_path, "--save", "out", SLURM_RESTART_COUNT="1", EMERGENCY_CODE=str(code), JOB_CODE="0")
    assert done.returncode == (0 if trains else code) and ("launch" in done.stdout.splitlines()) == trains


def test_a_job_that_has_had_a_checkpoint_does_not_begin_anew(tmp_path: Path) -> None:
    """The file system of its checkpoints may not be mounted."""
    tracker = tmp_path / "out" / TRACKER
    saves = f"mkdir -p {tracker.parent}; echo 10 > {tracker}"
    assert run(tmp_path, "--save", str(tracker.parent), LAUNCH=saves, JOB_CODE="138").returncode == 138
    assert run(tmp_path, "--save", str(tracker.parent), JOB_CODE="138").returncode == 138
    tracker.unlink()
    done = run(tmp_path, "--save", str(tracker.parent), JOB_CODE="138")
    assert (done.returncode, done.stdout) == (exit_codes.REFUSED, "") and "was there and is not now" in done.stderr


@pytest.mark.parametrize(
    ("ends", "nodes", "code", "said"),
    [
        ("exit 1", "2", exit_codes.RETRY, "unfit: node1; requeued without them"), ("exit 2", "2", 0, ""),
        ("exit 127", "2", 0, ""), ("exit 124", "2", exit_codes.RETRY, "unfit: node1"),
        ("exit 1", "1", exit_codes.RETRY, "unfit: node1"),
    ],
    ids=["unfit", "nothing tested", "no command", "hangs", "the only one"],
)  # fmt: skip
def test_only_nodes_that_are_unfit_are_excluded(tmp_path: Path, ends: str, nodes: str, code: int, said: str) -> None:
    done = run(
        tmp_path, JOB_CODE="0", LAUNCH=f"[[ $1 != health ]] || {ends}", RESIHP_HEALTH="1", SLURMD_NODENAME="node1",
        SLURM_JOB_NUM_NODES=nodes,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert said in done.stdout and ("ExcNodeList=node1" in done.stdout) == bool(said)


def test_what_all_nodes_share_excludes_none(tmp_path: Path) -> None:
    """Such as a full disk: the next nodes would be found unfit, too."""
    both = "[[ $1 != health ]] || { echo unfit=node0 >&3; exit 1; }"
    done = run(
        tmp_path, LAUNCH=both, RESIHP_HEALTH="1", SLURMD_NODENAME="node1", SRUN="exec 3>&1", SLURM_JOB_NUM_NODES="2"
    )
    assert done.returncode == exit_codes.REFUSED and "2 of 2 nodes are unfit" in done.stderr
    assert "ExcNodeList" not in done.stdout


def test_it_knows_the_names_that_the_launcher_uses() -> None:
    assert f"$RUN_DIR/{RESULT}" in SCRIPT and f"$RUN_DIR/{REASON}" in SCRIPT
    assert f'\nSTOPPED_BY_FLAGS="{exit_codes.STOPPED_BY_FLAGS}"\n' in SCRIPT
    known = {"REFUSED": exit_codes.REFUSED, "RETRY": exit_codes.RETRY, "WARNED": exit_codes.stopped_by(10)}
    assert all(f"\n{name}={code}\n" in SCRIPT for name, code in known.items())


@pytest.mark.parametrize(
    ("ends", "variables", "launches"),
    [
        ("kill -s KILL $$", {}, 3), (f"exit {exit_codes.FENCED}", {}, 3), ("exit 1", {}, 1), ("exit 0", {}, 1),
        ("kill -s KILL $$", {"COORDINATOR_GONE": "1"}, 1), ("echo 75 > $RUN_DIR/exit_code; exit 75", {}, 1),
        (f"mkdir $RUN_DIR/{JOB_ENDED}; touch $RUN_DIR/{JOB_ENDED}/node_1; exit 75", {}, 1),
    ],
    ids=[
        "killed", "cut off", "failed", "finished", "killed with the coordinator", "the job is over",
        "the job is over, and the coordinator waits for other nodes",
    ],
)  # fmt: skip
def test_a_node_comes_back_while_the_job_goes_on_without_it(
    tmp_path: Path, ends: str, variables: dict[str, str], launches: int
) -> None:
    done = run(
        tmp_path,
        LAUNCH=ends,
        RESIHP_RELAUNCHES="2",
        **{"COORDINATOR_GONE": "0", "RESIHP_MOST_REQUEUES": "0"} | variables,
    )
    lines = done.stdout.splitlines()
    assert lines.count("launch") == launches, done.stderr
    assert sum(line.endswith("and comes back") for line in lines) == launches - 1


class TestChain:
    """Jobs that continue each other: an array whose tasks run one by one, or jobs of one name."""

    @pytest.mark.parametrize(
        ("variables", "run_dir"),
        [
            ({"SLURM_ARRAY_JOB_ID": "5"}, "slurm-5"), ({"RESIHP_CHAIN": "large"}, "large"),
            ({"RESIHP_CHAIN": "large", "SLURM_ARRAY_JOB_ID": "5"}, "large"),
        ],
        ids=["array", "name", "both"],
    )  # fmt: skip
    def test_all_have_one_run_directory_and_none_is_queued_again(
        self, tmp_path: Path, variables: dict[str, str], run_dir: str
    ) -> None:
        done = run(tmp_path, JOB_CODE="138", **variables)
        arguments = done.stdout.splitlines()
        assert done.returncode == 138 and "scontrol requeue" not in done.stdout
        assert arguments[arguments.index("--run-dir") + 1] == str(tmp_path / "resihp-runs" / run_dir)

    @pytest.mark.parametrize("code", [exit_codes.FINISHED, exit_codes.FAILED, exit_codes.REFUSED, exit_codes.NO_PLAN])
    def test_nothing_follows_an_end_that_another_start_would_not_change(self, tmp_path: Path, code: int) -> None:
        run(tmp_path, JOB_CODE=str(code), RESIHP_CHAIN="large")
        done = run(tmp_path, JOB_CODE="0", RESIHP_CHAIN="large")
        told = (
            f"resihp: the chain has ended with {code}; to continue it, remove {tmp_path}/resihp-runs/large/exit_code\n"
        )
        assert (done.returncode, done.stdout) == (code, told)

    def test_the_next_one_continues_a_job_that_its_flags_have_stopped(self, tmp_path: Path) -> None:
        """--exit-duration-in-mins ends with 0, as in stock Megatron."""
        reason = f"{exit_codes.STOPPED_BY_FLAGS} after iteration 10 of 20"
        run(tmp_path, JOB_CODE="0", JOB_REASON=reason, RESIHP_CHAIN="large")
        for launched in (True, False):
            done = run(tmp_path, JOB_CODE="0", JOB_REASON="finished", RESIHP_CHAIN="large")
            assert done.returncode == 0 and ("launch" in done.stdout.splitlines()) == launched

    def test_nothing_follows_a_refusal_of_the_launcher(self, tmp_path: Path) -> None:
        """It writes no result itself."""
        run(tmp_path, SRUN_CODE=str(exit_codes.REFUSED), RESIHP_CHAIN="large")
        done = run(tmp_path, JOB_CODE="0", RESIHP_CHAIN="large")
        assert done.returncode == exit_codes.REFUSED and "launch" not in done.stdout

    @pytest.mark.parametrize("code", [exit_codes.RETRY, 138, 143])
    def test_the_next_one_continues_from_what_was_saved_last(self, tmp_path: Path, code: int) -> None:
        run(tmp_path, JOB_CODE=str(code), RESIHP_CHAIN="large")
        saved = tmp_path / "resihp-runs" / "large" / DIRECTORY
        saved.mkdir()
        (saved / TRACKER).write_text("4321\n")
        done = run(tmp_path, JOB_CODE="0", RESIHP_CHAIN="large", SAVED="1", PYTHONPATH=str(ROOT))
        arguments = done.stdout.splitlines()
        assert done.returncode == 0 and arguments[arguments.index("--load", arguments.index("--load") + 1) + 1] == str(
            saved
        )

    def test_a_first_node_that_is_lost_ends_the_allocation(self, tmp_path: Path) -> None:
        done = run(
            tmp_path, LAUNCH=f"exit {exit_codes.RETRY}", NODE0_GONE="1", NODE0_STATE="down*", RESIHP_CHAIN="large"
        )
        assert "scancel 7" in done.stdout.splitlines() and "scontrol requeue" not in done.stdout


def test_places_of_nodes_that_an_earlier_run_lacked_are_forgotten(tmp_path: Path) -> None:
    """Before anything looks for such places."""
    place = tmp_path / "resihp-runs" / "slurm-7" / "returning" / "node_1.json"
    place.parent.mkdir(parents=True)
    place.write_text("[8]")
    done = run(tmp_path, JOB_CODE="0", SLURM_RESTART_COUNT="1", LAUNCH=f"[[ ! -e {place} ]] || echo there")
    assert done.returncode == 0 and "there" not in done.stdout.splitlines()


class TestReplacements:
    """Jobs that are to bring nodes back are in the queue, where they outlive this one."""

    WATCH = {"RESIHP_REPLACE_WATCH": str(SLURM / "replace_watch.sh"), "RESIHP_REPLACE_LOOK_S": "60"}

    def test_those_that_wait_are_cancelled_when_the_job_ends(self, tmp_path: Path) -> None:
        """The watch sleeps by then, and SLURM would kill it."""
        submits = (
            "mkdir $RUN_DIR/returning; touch $RUN_DIR/returning/node_1.json; "
            "until [[ -s $RUN_DIR/replacements ]]; do /bin/sleep 0.05; done"
        )
        sleeps = "[[ -s $RUN_DIR/replacements ]] || exec /bin/sleep 0.05; [[ $1 != 60 ]] || exec /bin/sleep 60"
        done = run(tmp_path, JOB_CODE="0", LAUNCH=f"{submits}; echo trained", SLEEP=sleeps, **self.WATCH)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[lines.index("trained") + 1 :] == ["scancel --quiet --state=PENDING 40"]
        assert not (tmp_path / "resihp-runs" / "slurm-7" / "replacements").exists()

    def test_those_of_a_start_before_are_cancelled(self, tmp_path: Path) -> None:
        """Its first node was lost, and the batch script with it."""
        noted = tmp_path / "resihp-runs" / "slurm-7" / "replacements"
        noted.parent.mkdir(parents=True)
        noted.write_text("38\n39\n")
        done = run(tmp_path, JOB_CODE="0", SLURM_RESTART_COUNT="1", **self.WATCH)
        lines = done.stdout.splitlines()
        cancelled = [line for line in lines if line.startswith("scancel")]
        assert cancelled == ["scancel --quiet --state=PENDING 38 39"] and lines.index(cancelled[0]) < lines.index(
            "launch"
        )

    def test_a_slurm_that_does_not_cancel_them_is_asked_again_at_the_next_start(self, tmp_path: Path) -> None:
        noted = tmp_path / "resihp-runs" / "slurm-7" / "replacements"
        noted.parent.mkdir(parents=True)
        noted.write_text("39\n")
        done = run(tmp_path, JOB_CODE="0", SCANCEL_CODE="1", **self.WATCH)
        assert done.returncode == 0 and noted.read_text() == "39\n"
        assert "replacements names may still wait" in done.stderr


def test_every_command_runs_in_the_container(tmp_path: Path) -> None:
    """Also those that look for what survivors have saved."""
    (tmp_path / "resihp-runs" / "slurm-7" / "emergency_checkpoint").mkdir(parents=True)
    (tmp_path / "resihp-runs" / "slurm-7" / "slurm_job.sh").touch()
    (tmp_path / "contained").write_text('#!/usr/bin/env bash\necho "$2" >> "$1"\nexec "${@:2}"\n')
    (tmp_path / "contained").chmod(0o755)
    (tmp_path / "resihp").unlink(missing_ok=True)
    done = run(tmp_path, JOB_CODE="0", RESIHP_CONTAINER=f"contained {tmp_path}/ran", RESIHP_HEALTH="1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ran").read_text().split() == ["resihp"] * 4  # health, emergency, checkpoint, launch


class TestJoin:
    """Nodes of a second job, which join the first one."""

    @pytest.fixture
    def join(self, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
        """Runs the task of its second node, of three."""
        run(tmp_path, JOB_CODE="0")

        def joined(**variables: str) -> subprocess.CompletedProcess[str]:
            environment = os.environ | {
                "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[0-2]", "SLURM_JOB_ID": "8",
                "NODES_OF_JOB": "0 1 2", "SLURM_GPUS_ON_NODE": "8", "LAUNCH": "[[ $1 != launch ]] || exit 75",
                **variables,
            }  # fmt: skip
            return subprocess.run(
                ["bash", SLURM / "join.sbatch", "7"], env=environment, cwd=tmp_path, capture_output=True, text=True,
                timeout=30.0,
            )  # fmt: skip

        return joined

    def test_a_node_has_the_rank_behind_those_of_the_first_job(self, join: Callable[..., Any]) -> None:
        arguments = join().stdout.splitlines()
        assert arguments[arguments.index("--node-rank") + 1] == "3"
        assert arguments[arguments.index("launch") :].count("--resihp-spread-replicas") == 1

    def test_a_node_that_is_unfit_does_not_join(self, join: Callable[..., Any]) -> None:
        done = join(LAUNCH="[[ $1 != health ]] || exit 1")
        assert "launch" not in done.stdout.splitlines() and "task: 1" in done.stderr

    @pytest.mark.parametrize(
        ("gone", "of_2", "cancelled"), [("1", "down*", True), ("1", "allocated", False), ("0", "down*", False)],
        ids=["no node is left", "another one trains", "the first one lives"],
    )  # fmt: skip
    def test_the_last_one_ends_the_allocation_if_the_first_one_is_lost(
        self, join: Callable[..., Any], gone: str, of_2: str, cancelled: bool
    ) -> None:
        """The batch script and srun were there."""
        done = join(NODE0_GONE=gone, NODE0_STATE="down*", STATE_OF_2=of_2)
        assert ("scancel 8" in done.stdout) == cancelled and "task: 75" in done.stderr
