"""Whole nodes: one is lost, its agent and all its workers with it, comes back, or joins for the first time."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from jobs import WISHING, Job, Jobs, check_training, tiny

TWO_NODES: dict[str, Any] = {
    "pipeline_model_parallel_size": 2, "use_tp_pp_dp_mapping": True, "train_iters": 12
}  # fmt: skip
"""Of two workers each, with a replica each."""


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


ONE_REPLICA: dict[str, Any] = {"pipeline_model_parallel_size": 2, "train_iters": 12}
"""On a node of two workers."""


def late_node(first: Job, path: Path, arguments: list[str], **options: Any) -> Job:
    """Launch a node of a running job by another name of its run directory: by that the nursery tells jobs apart."""
    path.symlink_to(first.run_dir)
    return first.nursery.start(path, arguments, **options)


def replicas(job: Job) -> list[int]:
    """How many each of its plans has."""
    return [len(event["plan"]["replicas"]) for event in job.events("epoch_started")]


def test_a_node_that_was_not_there_at_the_start_joins(jobs: Jobs, tmp_path: Path) -> None:
    """It makes a second replica, from state that the first one has."""
    arguments = tiny(**ONE_REPLICA)
    reference = jobs.reference(arguments, workers=2)
    options = {"late_nodes": 1, "coordinator": ["127.0.0.1", free_port()], "workers": 2, "script": WISHING}
    first = jobs.start(arguments, node=0, wishes=["hold-0-5"], **options)
    first.await_event("iteration", iteration=2)
    late = late_node(first, tmp_path / "late", arguments, node=1, **options)
    for worker in (2, 3):
        first.await_event("worker_waiting", waiting=worker, place=worker)
    first.wish("go_on")
    check_training(first.wait(), reference)
    assert late.wait().code == 0, late.output()
    assert replicas(first) == [1, 2]
    [change] = first.events("reconfiguration")
    assert change["why"] == "workers 2, 3 joined" and change["resumed_iteration"] <= 7
