# SPDX-License-Identifier: Apache-2.0
"""`resihp coordinator` apart from the nodes: the death of any node, node 0 too, is one like any other."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import Jobs, check_training, tiny
from launched import Launched, eventually

from megatron_resihp.cli import main
from megatron_resihp.control.transport.address import Address

pytestmark = pytest.mark.nightly


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def apart(tmp_path: Path, port: int) -> Iterator[list[Launched]]:
    """A coordinator, and two nodes of two tiny workers each, which train."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    options: dict[str, Any] = {"nodes": 2, "workers_per_node": 2, "coordinator": Address("127.0.0.1", port)}
    started = [Launched(run_dir, alone=True, **options)]
    eventually("it has said so", lambda: "which join with" in started[0].output())
    started += [Launched(run_dir, node=node, **options) for node in range(2)]
    started[0].await_event("epoch_started", epoch=0)
    yield started
    for each in started:
        each.kill()


def test_a_signal_to_the_coordinator_ends_the_job(apart: list[Launched]) -> None:
    coordinator, *nodes = apart
    assert "node 0 has joined the job" in nodes[0].output()
    assert "losing the coordinator ends the job; any node may be lost" in coordinator.events("exposed")[0]["said"]
    os.kill(coordinator.pid, signal.SIGTERM)
    assert [each.end() for each in apart] == [143] * 3
    assert (coordinator.run_dir / "exit_code").read_text() == "143\n"
    assert main(["replay", str(coordinator.run_dir)]) == 0


def test_node_0_leaves(apart: list[Launched]) -> None:
    coordinator, first, second = apart
    assert main(["drain", str(coordinator.run_dir), "node:0"]) == 0
    assert first.end() == 0
    eventually("the other goes on", lambda: "epoch 1 members [2, 3]" in second.log(2))
    coordinator.ask("finish")
    assert (coordinator.end(), second.end()) == (0, 0)
    assert not coordinator.events("worker_dead")


def test_node_0_dies(jobs: Jobs, tmp_path: Path, port: int) -> None:
    """Its launcher is killed, and its workers with it; the job trains what it would have trained."""
    arguments = tiny(pipeline_model_parallel_size=2, use_tp_pp_dp_mapping=True, train_iters=12)
    reference = jobs.reference(arguments, workers=4)
    options: dict[str, Any] = {"workers": 2, "nodes": 2, "coordinator": ["127.0.0.1", port]}
    coordinator = jobs.start(arguments, alone=True, **options)
    jobs.nursery.serve_until(lambda: "which join with" in coordinator.output(), coordinator.started_at + 30.0)
    nodes = []
    for node in range(2):
        (tmp_path / f"node{node}").symlink_to(coordinator.run_dir)  # by this name the nursery tells it from others
        nodes.append(jobs.nursery.start(tmp_path / f"node{node}", arguments, node=node, **options))
    coordinator.await_event("iteration", iteration=3)
    nodes[0].kill()
    check_training(coordinator.wait(), reference)
    assert {death.worker for death in coordinator.summary.deaths} == {0, 1}
    assert nodes[1].wait().code == 0, nodes[1].output()
    assert main(["replay", str(coordinator.run_dir)]) == 0
