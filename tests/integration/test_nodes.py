# SPDX-License-Identifier: Apache-2.0
"""Whole nodes: one is lost, its agent and all its workers with it, comes back, or joins for the first time."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from chaos_checks import check_evaluations, evaluations
from jobs import FP32, PRETRAIN, WISHING, Job, Jobs, check_training, tiny

from megatron_resihp.cli import main
from megatron_resihp.control import exit_codes
from megatron_resihp.control.commands.launch import open_files
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.worker.saved_state import flags, newest_state
from megatron_resihp.plan import ParallelPlan

TWO_NODES: dict[str, Any] = {
    "pipeline_model_parallel_size": 2, "use_tp_pp_dp_mapping": True, "train_iters": 12
}  # fmt: skip
"""Of two workers each, with a replica each."""

FUSED = Path(__file__).with_name("fused_gpt.py")
"""Megatron loads a distributed optimizer's checkpoint only if that counts steps as this script's does."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_whole_node_dies(jobs: Jobs) -> None:
    """The second node's agent is killed."""
    arguments = tiny(**TWO_NODES)
    reference = jobs.reference(arguments, workers=4)
    coordinator = ["127.0.0.1", free_port()]
    first, second = (jobs.start(arguments, workers=2, nodes=2, node=n, coordinator=coordinator) for n in range(2))
    first.await_event("iteration", iteration=3)
    second.kill()
    check_training(first.wait(), reference)
    assert {death.worker for death in first.summary.deaths} == {2, 3}


SHARED_OPTIMIZER: dict[str, Any] = {"use_distributed_optimizer": True}
"""Four replicas; each keeps a copy of its predecessor's part."""


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [{"pipeline_model_parallel_size": 2}, SHARED_OPTIMIZER], ids=["stages", "parts"])
@pytest.mark.parametrize("spread", [True, False], ids=["spread", "in Megatron's order"])
def test_a_node_with_state_that_is_nowhere_else_dies_unless_replicas_are_spread(
    jobs: Jobs, layout: dict[str, Any], spread: bool
) -> None:
    """In Megatron's order of ranks a stage, or a part of the optimizer with its copy, is on the second node only."""
    arguments = tiny(train_iters=12, resihp_spread_replicas=spread, **layout)
    coordinator = ["127.0.0.1", free_port()]
    first, second = (jobs.start(arguments, workers=2, nodes=2, node=n, coordinator=coordinator) for n in range(2))
    first.await_event("iteration", iteration=3)
    second.kill()
    first.wait()
    if spread:
        check_training(first, jobs.reference(tiny(train_iters=12, **layout), workers=4))
        assert {death.worker for death in first.summary.deaths} == {2, 3}
        assert "losing node 0 (the coordinator's) ends the job; any other one may be lost" in first.output()
    else:
        assert first.code == exit_codes.NO_PLAN, first.tails()
        assert "or node 1 ends the job with state that is nowhere else" in first.output()
        assert "to avoid that, start it with --resihp-spread-replicas" in first.output()


@pytest.mark.nightly
def test_the_state_outlives_node_0(jobs: Jobs) -> None:
    """Its agent is killed, and its workers with it; those of the other node hold all state."""
    arguments = tiny(**TWO_NODES)
    reference = jobs.reference(arguments, workers=4)
    coordinator = ["127.0.0.1", free_port()]
    options = {"workers": 2, "nodes": 2, "coordinator": coordinator, "script": WISHING, "wishes": ["hold-0-7"]}
    first, second = (jobs.start(arguments, node=node, **options) for node in range(2))
    first.await_event("iteration", iteration=5)
    first.kill()
    assert second.wait().code == exit_codes.RETRY, second.output()
    logs = second.log(2) + second.log(3)
    assert logs.count("all of it; go on from it with --load") == 1, logs
    assert second.output().count("all of it; go on from it with --load") == 1, second.output()
    found = newest_state(second.run_dir)
    assert found is not None
    saved, iteration = found
    assert iteration >= 5
    again = jobs.run([*tiny(**TWO_NODES), *flags(saved)], workers=2)
    assert again.code == 0, again.tails()
    rest = {number: loss for number, loss in reference.summary.loss.items() if number > iteration}
    assert again.summary.loss == pytest.approx(rest, rel=FP32.loss)


@pytest.mark.nightly
def test_what_died_with_node_0_is_named(jobs: Jobs) -> None:
    """The first stage; nothing pretends to be a checkpoint."""
    arguments = tiny(pipeline_model_parallel_size=2, train_iters=12)
    coordinator = ["127.0.0.1", free_port()]
    options = {"workers": 1, "nodes": 2, "coordinator": coordinator, "script": WISHING, "wishes": ["hold-0-7"]}
    first, second = (jobs.start(arguments, node=node, **options) for node in range(2))
    first.await_event("iteration", iteration=5)
    first.kill()
    assert second.wait().code == exit_codes.RETRY, second.output()
    assert "missing: stage 0 TP rank 0; go on from the last checkpoint" in second.log(1)
    saved = second.run_dir / "emergency_checkpoint"
    assert len(list(saved.glob("iter_*/mp_rank_00_001/model_optim_rng.pt"))) == 1
    assert not (saved / "latest_checkpointed_iteration.txt").exists()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "optimizer", [{}, {"use_distributed_optimizer": True}], ids=["whole optimizers", "a shared one"]
)
def test_a_node_is_told_to_end(jobs: Jobs, optimizer: dict[str, Any]) -> None:
    """Its workers finish the step; nothing is computed twice."""
    arguments = tiny(**TWO_NODES | optimizer)
    reference = jobs.reference(arguments, workers=4)
    coordinator = ["127.0.0.1", free_port()]
    options = {"workers": 2, "nodes": 2, "coordinator": coordinator, "script": WISHING, "wishes": ["hold-0-5"]}
    first, second = (jobs.start(arguments, node=node, **options) for node in range(2))
    first.await_event("iteration", iteration=3)
    second.signal(signal.SIGTERM)
    first.await_event("plan_change")
    first.wish("go_on")
    assert second.wait().code == 0, second.output()
    check_training(first.wait(), reference)
    assert not first.summary.deaths and first.events("reconfiguration")[0]["steps_redone"] == 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    "optimizer", [{}, {"use_distributed_optimizer": True}], ids=["whole optimizers", "a shared one"]
)
def test_a_worker_is_drained_from_a_node_that_stays(jobs: Jobs, optimizer: dict[str, Any]) -> None:
    """It finishes the step; then the job is stopped by command, and saved."""
    arguments = tiny(**TWO_NODES | optimizer)
    reference = jobs.reference(arguments, workers=4)
    saving = [*arguments, "--save", str(jobs.directory / f"drained-{bool(optimizer)}"), "--save-interval", "100"]
    job = jobs.start(saving, workers=4, script=WISHING, wishes=["hold-0-5", "hold-0-9"])
    job.await_event("iteration", iteration=4)
    assert main(["drain", str(job.run_dir), "worker:3"]) == 0
    job.wish("go_on-5")
    job.await_event("iteration", iteration=8)
    assert main(["stop", str(job.run_dir), "--save"]) == 0
    job.wish("go_on")
    assert job.wait().code == exit_codes.stopped_by(signal.SIGTERM), job.tails()
    assert [event["left"] for event in job.events("workers_left")] == [[3]]
    assert not job.summary.deaths and job.events("reconfiguration")[0]["steps_redone"] == 0
    loss = job.summary.loss
    assert loss == pytest.approx({number: reference.summary.loss[number] for number in loss}, rel=FP32.loss)
    assert max(loss) == job.events("checkpoint")[-1]["iteration"] == 9


@pytest.mark.nightly
def test_a_node_that_died_comes_back(jobs: Jobs, tmp_path: Path) -> None:
    """Its agent is started with the same command; the job has two replicas again."""
    arguments = tiny(**TWO_NODES)
    reference = jobs.reference(arguments, workers=4)
    options = {"nodes": 2, "coordinator": ["127.0.0.1", free_port()], "workers": 2, "script": WISHING}
    first = jobs.start(arguments, node=0, wishes=["hold-0-7"], **options)

    def second(name: str) -> Job:
        (tmp_path / name).symlink_to(first.run_dir)  # by this name the nursery tells it from the first
        return jobs.nursery.start(tmp_path / name, arguments, node=1, **options)

    victim = second("once")
    first.await_event("iteration", iteration=3)
    victim.kill()
    first.await_event("recovery")
    again = second("again")
    for worker in (6, 7):
        first.await_event("worker_waiting", waiting=worker)
    first.wish("go_on")
    check_training(first.wait(), reference)
    assert again.wait().code == 0
    last = first.events("epoch_started")[-1]["plan"]
    assert [replica["stages"] for replica in last["replicas"]] == [[[0], [1]], [[6], [7]]]


ONE_REPLICA: dict[str, Any] = {
    "pipeline_model_parallel_size": 2, "train_iters": 12, "eval_interval": 4, "eval_iters": 2,
    "eval_global_batch_size": 1,
}  # fmt: skip
"""On a node of two workers. With a second replica there is less to evaluate than replicas."""

SHARED: dict[str, Any] = {"use_distributed_optimizer": True}


def late_node(first: Job, path: Path, arguments: list[str], **options: Any) -> Job:
    """Launch a node of a running job by another name of its run directory: by that the nursery tells jobs apart."""
    path.symlink_to(first.run_dir)
    return first.nursery.start(path, arguments, **options)


def replicas(job: Job) -> list[int]:
    """How many each of its plans has."""
    return [len(event["plan"]["replicas"]) for event in job.events("epoch_started")]


@pytest.mark.parametrize(
    "optimizer", [{}, pytest.param(SHARED, marks=pytest.mark.nightly)], ids=["whole optimizers", "a shared one"]
)
def test_a_node_that_was_not_there_at_the_start_joins(jobs: Jobs, tmp_path: Path, optimizer: dict[str, Any]) -> None:
    """It makes a second replica, from state that the first one has; evaluations are the same."""
    arguments = tiny(**ONE_REPLICA | optimizer)
    reference = jobs.reference(arguments, workers=2)
    options = {"late_nodes": 1, "coordinator": ["127.0.0.1", free_port()], "workers": 2, "script": WISHING}
    first = jobs.start(arguments, node=0, wishes=["hold-0-5"], **options)
    first.await_event("iteration", iteration=2)
    late = late_node(first, tmp_path / "late", arguments, node=1, **options)
    for worker in (2, 3):
        first.await_event("worker_waiting", waiting=worker, place=worker)
    first.wish("go_on")
    check_training(first.wait(), reference)
    check_evaluations(first, reference, FP32)
    assert evaluations(first).keys() == evaluations(reference).keys()
    assert late.wait().code == 0, late.output()
    assert replicas(first) == [1, 2]
    [change] = first.events("reconfiguration")
    assert change["why"] == "workers 2, 3 joined" and change["resumed_iteration"] <= 7
    assert first.summary.joined == (2, 3) and not first.summary.came_back


@pytest.mark.nightly
def test_a_node_whose_workers_are_refused_may_try_again(jobs: Jobs, tmp_path: Path) -> None:
    """Its own command is wrong, or not the job's: it says so and goes, and the job goes on. How it logs, how many load
    its data and what it would load may be otherwise."""
    arguments = tiny(**ONE_REPLICA)
    reference = jobs.reference(arguments, workers=2)
    options = {"late_nodes": 1, "coordinator": ["127.0.0.1", free_port()], "workers": 2, "script": WISHING}
    first = jobs.start(arguments, node=0, wishes=["hold-0-5"], **options)
    first.await_event("iteration", iteration=2)
    for wrong, said in (
        (["--resihp-act", "no"], "--resihp-act no is no mode"),
        (["--lr", "3e-3", "--seed", "7"], "--lr 0.003 (the job's: 0.001), --seed 7 (the job's: 1234)"),
    ):
        late = late_node(first, tmp_path / wrong[0], [*arguments, *wrong], node=1, **options)
        # Not `wait`: the other node's workers, who share the directory, go on.
        assert first.nursery.serve_until(lambda job=late: job.code is not None, time.monotonic() + 30.0)
        assert late.code == 2, late.output()
        assert said in late.output() and "the job goes on without them" in late.output()
        offer = first.run_dir / "returning" / "node_1.json"
        assert first.nursery.serve_until(offer.exists, time.monotonic() + 10.0), "its loss was not noticed"
    arguments += ["--num-workers", "1", "--log-interval", "4", "--load", str(tmp_path / "none")]
    right = late_node(first, tmp_path / "right", arguments, node=1, **options)
    for place in (2, 3):
        first.await_event("worker_waiting", place=place)
    first.wish("go_on")
    check_training(first.wait(), reference)
    assert right.wait().code == 0, right.output()
    assert replicas(first) == [1, 2]
    causes = [event["cause"] for event in first.events("worker_dead")]
    assert any("this worker differs from the job: --lr 0.003" in cause for cause in causes), causes


THREE_SHARES: dict[str, Any] = {
    "tensor_model_parallel_size": 2, "global_batch_size": 8, "train_iters": 16, "eval_interval": 4, "eval_iters": 2,
    "eval_global_batch_size": 2,
}  # fmt: skip
"""Of eight micro-batches; of the two for evaluation a third replica gets none."""


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", [{}, SHARED], ids=["whole optimizers", "a shared one"])
def test_a_node_that_joined_is_lost_and_comes_back(jobs: Jobs, tmp_path: Path, optimizer: dict[str, Any]) -> None:
    """Two nodes begin the job; with the third there are three replicas, of 3, 3 and 2 micro-batches."""
    arguments = tiny(**THREE_SHARES | optimizer)
    reference = jobs.reference(arguments, workers=4)
    options = {
        "nodes": 2, "late_nodes": 1, "coordinator": ["127.0.0.1", free_port()], "workers": 2, "script": WISHING
    }  # fmt: skip
    first = jobs.start(arguments, node=0, wishes=["hold-0-5", "hold-0-11"], **options)
    late_node(first, tmp_path / "second", arguments, node=1, **options)
    victim = late_node(first, tmp_path / "late", arguments, node=2, **options)
    for worker in (4, 5):
        first.await_event("worker_waiting", waiting=worker)
    first.wish("go_on-5")
    first.await_event("reconfiguration")
    first.await_event("iteration", iteration=8)
    victim.kill()
    first.await_event("recovery")
    late_node(first, tmp_path / "again", arguments, node=2, **options)
    for worker in (10, 11):
        first.await_event("worker_waiting", waiting=worker)
    first.wish("go_on")
    check_training(first.wait(), reference)
    check_evaluations(first, reference, FP32)
    assert evaluations(first).keys() == evaluations(reference).keys()
    assert replicas(first) == [2, 3, 2, 3]
    last = first.events("epoch_started")[-1]["plan"]["replicas"]
    assert sorted(len(replica["micro_batches"]) for replica in last) == [2, 3, 3]
    assert {death.worker for death in first.summary.deaths} == {4, 5}


@pytest.mark.nightly
@pytest.mark.usefixtures("compiled_planner")
def test_a_strategy_gives_a_node_that_joins_work(jobs: Jobs, tmp_path: Path) -> None:
    model = {"num_layers": 4, "global_batch_size": 8, "train_iters": 16, "pipeline_model_parallel_size": 2}
    reference = jobs.reference(tiny(**model), workers=2)
    arguments = tiny(**model, resihp_emulate="h800", resihp_strategy="joint")
    options = {"late_nodes": 1, "coordinator": ["127.0.0.1", free_port()], "workers": 2, "script": WISHING}
    first = jobs.start(arguments, node=0, wishes=["hold-0-5"], **options)
    first.await_event("iteration", iteration=2)
    late_node(first, tmp_path / "late", arguments, node=1, **options)
    for worker in (2, 3):
        first.await_event("worker_waiting", waiting=worker)
    first.await_event("plan_change")
    first.wish("go_on")
    check_training(first.wait(), reference)
    last = ParallelPlan.from_dict(first.events("epoch_started")[-1]["plan"])
    assert set(last.working) >= {2, 3}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("optimizer", "script"),
    [({}, PRETRAIN), (SHARED | {"dist_ckpt_optim_fully_reshardable": True}, FUSED)],
    ids=["whole optimizers", "a shared one"],
)
def test_what_is_saved_with_a_node_that_joined_is_loaded_without_it(
    jobs: Jobs, tmp_path: Path, optimizer: dict[str, Any], script: Path
) -> None:
    model = ONE_REPLICA | optimizer
    reference = jobs.reference(tiny(**model), workers=2)
    options = {"late_nodes": 1, "coordinator": ["127.0.0.1", free_port()], "workers": 2, "script": WISHING}
    saving = tiny(**model | {"save": tmp_path / "saved", "save_interval": 8, "exit_interval": 8})
    first = jobs.start(saving, node=0, wishes=["hold-0-5"], **options)
    first.await_event("iteration", iteration=2)
    late_node(first, tmp_path / "late", saving, node=1, **options)
    for worker in (2, 3):
        first.await_event("worker_waiting", waiting=worker)
    first.wish("go_on")
    assert first.wait().code == 0 and replicas(first) == [1, 2], first.tails()
    job = jobs.run(tiny(**model | {"load": tmp_path / "saved"}), workers=2, script=script)
    assert job.code == 0, job.tails()
    rest = {iteration: loss for iteration, loss in reference.summary.loss.items() if iteration > 8}
    assert job.summary.loss == pytest.approx(rest, rel=FP32.loss)


class OpenFiles:
    """How many files launchers of running jobs have open at most."""

    def __init__(self, *jobs: Job) -> None:
        self._jobs = jobs
        self.most = [0] * len(jobs)

    def look(self) -> None:
        for number, job in enumerate(self._jobs):
            try:
                self.most[number] = max(self.most[number], len(os.listdir(f"/proc/{job.pid}/fd")))
            except OSError:
                pass  # it has ended


LISTENS = 6
"""Files with which node 0 listens at two more ports where there are other nodes."""


@pytest.mark.nightly
def test_launchers_open_no_more_files_than_was_reckoned(jobs: Jobs) -> None:
    """Of 2, 4 and 8 workers, one of which dies and comes back, and of two nodes."""
    arguments = tiny(global_batch_size=8, train_iters=10, resihp_inject="kill:1@3")
    most: dict[int, int] = {}
    for workers in (2, 4, 8):
        job = jobs.start(arguments, workers=workers, max_restarts=1)
        files = OpenFiles(job)
        assert job.wait(meanwhile=files.look).code == 0, job.tails()
        [most[workers]] = files.most
        assert most[workers] <= open_files.needed(JobSize(1, workers), 0)
    each = (most[8] - most[2]) / 6
    print(f"files open: {most}, {each:.1f} for each worker")
    assert each <= open_files.PER_OWN_WORKER
    options = {"workers": 2, "nodes": 2, "coordinator": ["127.0.0.1", free_port()]}
    nodes = [jobs.start(arguments, node=node, **options) for node in range(2)]
    files = OpenFiles(*nodes)
    for node in nodes:
        assert node.wait(meanwhile=files.look).code == 0, node.tails()
    print(f"of two nodes of 2: {files.most}, {files.most[0] - most[2]} for another node of two")
    for node in range(2):
        assert files.most[node] <= open_files.needed(JobSize(2, 2), node)
    assert files.most[0] - most[2] <= open_files.PER_NODE + LISTENS
