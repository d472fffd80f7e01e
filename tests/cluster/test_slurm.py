# SPDX-License-Identifier: Apache-2.0
"""Jobs of scripts/slurm/job.sbatch on a real SLURM: nodes are lost, warned, cancelled and added."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import FP32, REPOSITORY
from slurm import Slurm, needs_slurm
from training import EVENT_S, HELD, ITERATIONS, RESIHP, Training

from megatron_resihp.report.run.summary import RunSummary, compare

Train = Callable[..., Training]

pytestmark = [needs_slurm, pytest.mark.timeout(600)]


def check(training: Training, reference: RunSummary, first: int = 1) -> None:
    """It has trained what the reference has, from that iteration on."""
    summary = training.summary
    assert summary.completed, training.output()
    assert sorted(summary.loss) == list(range(first, ITERATIONS + 1))
    expected = {iteration: loss for iteration, loss in reference.loss.items() if iteration >= first}
    difference = compare(summary.loss, expected)
    assert difference is not None and difference <= FP32.loss
    assert (summary.samples_lost, summary.samples_applied_twice, summary.samples_out_of_place) == (0, 0, 0)


def test_a_job_outlives_a_node(slurm: Slurm, train: Train, reference: RunSummary) -> None:
    """For SLURM it has completed, though it has lost a node."""
    training = train(nodes=3)
    training.await_event("iteration", iteration=HELD - 1)
    slurm.lose("n2")
    training.wish("go_on")
    ended = training.end()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "0"), training.output()
    assert [death["dead"] for death in training.events("worker_dead")] == [2]
    check(training, reference)


@pytest.mark.nightly
@pytest.mark.parametrize("process", ["worker", "launcher"])
def test_a_job_outlives_a_process_of_another_node(
    slurm: Slurm, train: Train, reference: RunSummary, process: str
) -> None:
    training = train(nodes=3)
    training.await_event("iteration", iteration=HELD - 1)
    worker = training.pid(1)
    os.kill(worker if process == "worker" else parent(worker), signal.SIGKILL)
    training.wish("go_on")
    ended = training.end()
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), training.output()
    check(training, reference)


@pytest.mark.nightly
def test_a_launcher_that_was_killed_comes_back(slurm: Slurm, train: Train, reference: RunSummary) -> None:
    training = train(nodes=3)
    training.await_event("iteration", iteration=HELD - 1)
    os.kill(parent(training.pid(1)), signal.SIGKILL)
    training.await_event("worker_waiting")
    training.wish("go_on")
    ended = training.end()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "0"), training.output()
    assert training.events("reconfiguration")
    check(training, reference)


@pytest.mark.nightly
def test_a_node_that_was_lost_comes_back(slurm: Slurm, train: Train, reference: RunSummary) -> None:
    """A job that takes its place waits in the queue until the node, or another one, is there."""
    watch = REPOSITORY / "scripts" / "slurm" / "replace_watch.sh"
    training = train(
        nodes=3, RESIHP_REPLACE_WATCH=str(watch), RESIHP_REPLACE_LOOK_S="1", RESIHP_REPLACE="--gpus-per-node=1"
    )
    training.await_event("iteration", iteration=HELD - 1)
    slurm.lose("n2")
    training.await_event("worker_dead")
    slurm.eventually("a job is submitted", lambda: "is to bring it" in training.output(), EVENT_S)
    slurm.eventually("SLURM has missed n2", lambda: slurm.states()["n2"] == "DOWN", EVENT_S)
    slurm.start("n2")
    training.await_event("worker_waiting")
    training.wish("go_on")
    ended = training.end()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "0"), training.output()
    assert [death["dead"] for death in training.events("worker_dead")] == [2]
    assert training.events("reconfiguration")
    check(training, reference)


@pytest.mark.nightly
def test_a_job_that_still_waits_to_bring_a_node_back_is_cancelled(slurm: Slurm, train: Train) -> None:
    """There is no node for it until the job ends, and what has submitted it sleeps by then."""
    watch = REPOSITORY / "scripts" / "slurm" / "replace_watch.sh"
    training = train(nodes=3, RESIHP_REPLACE_WATCH=str(watch), RESIHP_REPLACE="--gpus-per-node=1")
    training.await_event("iteration", iteration=HELD - 1)
    slurm.lose("n2")
    slurm.eventually("a job is submitted", lambda: "is to bring it" in training.output(), EVENT_S)
    [said] = re.findall(r"job (\d+) is to bring it", training.output())
    training.wish("go_on")
    ended = training.end()
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), training.output()
    slurm.await_state(int(said), "CANCELLED", timeout_s=1.0)


@pytest.mark.nightly
def test_training_needs_no_slurmd(slurm: Slurm, train: Train, reference: RunSummary) -> None:
    training = train(nodes=3)
    training.await_event("iteration", iteration=HELD - 1)
    slurm.lose_daemon("n2")
    slurm.eventually("n2 is down", lambda: slurm.states()["n2"] == "DOWN", EVENT_S)
    training.wish("go_on")
    ended = training.end()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "0"), training.output()
    assert not training.events("worker_dead")
    check(training, reference)


@pytest.mark.nightly
def test_a_chain_trains_from_one_time_limit_to_the_next(slurm: Slurm, train: Train, reference: RunSummary) -> None:
    """SLURM itself warns the first job of its end, after one to two minutes. The last one has nothing left to do."""
    training = train(nodes=3, options=["--array=1-3%1", "--time=3", "--signal=USR1@60"])
    slurm.eventually("the job is warned", lambda: "the job ends after an iteration" in training.output(), EVENT_S)
    training.wish("go_on")
    slurm.eventually("the chain is over", lambda: len(ends(slurm, training)) == 3, EVENT_S)
    first, *others = ends(slurm, training)
    assert first == ("FAILED", "138:0") and set(others) == {("COMPLETED", "0:0")}, training.output()
    assert "the chain has ended with 0" in training.output()
    check(training, reference, first=HELD + 1)


def ends(slurm: Slurm, training: Training) -> list[tuple[str, str]]:
    """State and exit code of each job of an array that is over, in their order."""
    jobs = slurm.jobs(training.number)
    over = [job for job in jobs if job["JobState"] not in ("PENDING", "RUNNING", "COMPLETING")]
    return [(job["JobState"], job["ExitCode"]) for job in sorted(over, key=lambda job: int(job["ArrayTaskId"]))]


@pytest.mark.nightly
def test_a_job_that_is_warned_of_its_end_continues_after_it(slurm: Slurm, train: Train, reference: RunSummary) -> None:
    """SLURM's warning saves the job and ends it. It is queued again and loads what it has saved."""
    training = train(nodes=3)
    training.await_event("iteration", iteration=HELD - 1)
    slurm.ask("scancel", "--signal=USR1", str(training.number))
    training.wish("go_on")
    training.await_event("run_finished")
    ended = training.end()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), training.output()
    assert [event["exit_code"] for event in training.events("run_finished")] == [138, 0]
    check(training, reference, first=HELD + 1)


@pytest.mark.nightly
def test_a_job_that_loses_its_first_node_is_queued_again(slurm: Slurm, train: Train, reference: RunSummary) -> None:
    """By the other node, since srun and the batch script are gone. It continues from what that node has saved."""
    training = train(nodes=2)
    training.await_event("iteration", iteration=HELD - 1)
    slurm.lose("n0")
    training.wish("go_on")
    ended = training.end()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), training.output()
    assert ended["NodeList"] == "n[1-2]"
    assert training.summary.completed


def test_a_node_that_is_drained_leaves(slurm: Slurm, train: Train, reference: RunSummary) -> None:
    watch = REPOSITORY / "scripts" / "slurm" / "drain_watch.sh"
    training = train(nodes=3, RESIHP_DRAIN_WATCH=str(watch), RESIHP_DRAIN_LOOK_S="1")
    training.await_event("iteration", iteration=HELD - 1)
    slurm.drain("n2")
    training.await_event("plan_change")
    training.wish("go_on")
    ended = training.end()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "0"), training.output()
    assert [event["left"] for event in training.events("node_left")] == [[2]] and not training.events("worker_dead")
    check(training, reference)


LATER = 9
"""Another iteration in which worker 0 can wait."""


@pytest.mark.nightly
def test_nodes_of_a_second_job_join_and_leave(slurm: Slurm, train: Train, reference: RunSummary) -> None:
    training = train(nodes=2, RESIHP_MAX_NODES="3")
    training.wish(f"hold-0-{LATER}")
    training.await_event("iteration", iteration=HELD - 1)
    spare = training.submit("join.sbatch", str(training.number), nodes=1)
    training.await_event("worker_waiting")
    training.wish(f"go_on-{HELD}")
    training.await_event("iteration", iteration=LATER - 1, epoch=1)
    slurm.ask("scancel", str(spare))
    training.await_event("plan_change", count=2)
    training.wish("go_on")
    slurm.await_state(spare, "CANCELLED", timeout_s=60.0)
    training.await_event("node_left")
    ended = training.end()
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), training.output()
    check(training, reference)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.nightly
def test_a_node_that_is_unfit_is_excluded(train: Train, tmp_path: Path, reference: RunSummary) -> None:
    """`resihp health` is what it is on two nodes, and finds a problem on the third."""
    wrapper = tmp_path / "bin" / "resihp"
    wrapper.parent.mkdir()
    wrapper.write_text(
        "#!/bin/bash\n"
        '[[ $1 != health || $SLURMD_NODENAME != n0 ]] || { echo "resihp: this node is unfit" >&2; exit 1; }\n'
        f'exec {RESIHP} "$@"\n'
    )
    wrapper.chmod(0o755)
    training = train(nodes=2, RESIHP_BIN=str(wrapper.parent), RESIHP_HEALTH="1")
    training.wish("go_on")
    ended = training.end()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), training.output()
    assert ended["ExcNodeList"] == "n0" and "unfit: n0; requeued without them" in training.output()
    check(training, reference)
