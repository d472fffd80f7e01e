# SPDX-License-Identifier: Apache-2.0
"""Nodes and workers leave a job of real processes by `resihp drain`, `resihp stop` and signals, without Megatron."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import Launched, eventually, is_alive

from megatron_resihp.cli import main
from megatron_resihp.control.transport.address import Address

pytestmark = pytest.mark.nightly


class Nodes:
    """The nodes of one job, of two workers each."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.launched: list[Launched] = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._coordinator = Address(*server.getsockname())
        run_dir.mkdir()
        (run_dir / "job").write_text(json.dumps({"saves": True}))

    def start(self, number: int, *wishes: str, **options: Any) -> list[Launched]:
        """Begin a job with so many nodes, and wait until it trains."""
        for wish in wishes:
            (self.run_dir / wish).touch()
        begun = [self.launch(node, nodes=number, **options) for node in range(number)]
        begun[0].await_event("epoch_started", epoch=0)
        return begun

    def launch(self, node: int, **options: Any) -> Launched:
        self.launched.append(
            Launched(self.run_dir, node=node, workers_per_node=2, coordinator=self._coordinator, **options)
        )
        return self.launched[-1]

    def command(self, name: str, *arguments: str) -> int:
        """One of `resihp` for this job; returns its exit code."""
        return main([name, str(self.run_dir), *arguments])


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """None of them outlives the test."""
    nodes = Nodes(tmp_path / "run")
    yield nodes
    for each in nodes.launched:
        each.kill()


def test_a_node_is_drained_and_comes_back(nodes: Nodes, capsys: pytest.CaptureFixture[str]) -> None:
    """Its next agent reads the same notices, and does not take that for its own."""
    first, second = nodes.start(2, max_restarts=1)
    pids = [first.worker_pid(worker) for worker in range(4)]
    assert nodes.command("drain", "node:1") == 0
    told = "resihp: told to leave after an iteration: node 1; what has not left in 20 s counts as dead\n"
    assert capsys.readouterr().out == told
    assert second.end() == 0, second.output()
    assert "resihp: this node has left the job, which goes on" in second.output()
    assert not any(map(is_alive, pids[2:]))
    eventually("its place is free", (nodes.run_dir / "returning" / "node_1.json").exists)
    again = nodes.launch(1, nodes=2, max_restarts=1)
    eventually("it is taken in", lambda: "members [0, 1, 6, 7]" in first.log(0))
    assert nodes.command("stop", "--save") == 0
    assert "the job ends after an iteration, and is saved" in capsys.readouterr().out
    assert (first.end(), again.end()) == (143, 143), first.output()
    assert not first.events("worker_dead") and not first.events("epoch_broken")
    assert first.events("run_finished")[0]["reason"] == "stopped by resihp stop"


def test_workers_are_drained_and_their_nodes_stay(nodes: Nodes) -> None:
    first, second = nodes.start(2, max_restarts=1)
    pids = [first.worker_pid(worker) for worker in range(4)]
    assert nodes.command("drain", "worker:1", "worker:2") == 0
    assert first.await_event("workers_left")["left"] == [1, 2]
    eventually("the others go on", lambda: "epoch 1 members [0, 3]" in first.log(0))
    eventually("both have ended", lambda: not is_alive(pids[1]) and not is_alive(pids[2]))
    first.ask("finish")
    assert (first.end(), second.end()) == (0, 0), first.output()
    assert not first.events("worker_dead") and not first.events("worker_restarted")


@pytest.mark.parametrize("warned", [False, True], ids=["by command", "by a signal after a patient command"])
def test_what_can_not_leave_in_time_counts_as_dead(nodes: Nodes, warned: bool) -> None:
    """A worker of the node is stopped, so that it never comes to the end of the step; its agent ends it."""
    first, second = nodes.start(2, drain_deadline_s=1.0)
    pids = [first.worker_pid(worker) for worker in range(4)]
    os.kill(pids[2], signal.SIGSTOP)
    assert nodes.command("drain", "node:1", *(["--deadline", "300"] if warned else [])) == 0
    if warned:
        os.kill(second.pid, signal.SIGTERM)
    assert first.await_event("worker_dead", dead=2)["cause"] == "did not leave in time"
    eventually("the others go on", lambda: "members [0, 1]" in first.log(0))
    assert second.end() == 0, second.output()
    assert not any(map(is_alive, pids[2:]))
    first.ask("finish")
    assert first.end() == 0, first.output()


def test_a_signal_to_most_nodes_means_the_job(nodes: Nodes) -> None:
    first, *others = nodes.start(3)
    for run in others:
        os.kill(run.pid, signal.SIGTERM)
    assert [run.end() for run in (first, *others)] in ([143, 143, 143], [143, 0, 143], [143, 143, 0]), first.output()
    assert first.events("run_finished")[0]["reason"] == "2 of 3 nodes were told to end at once"


def test_node_0_can_not_be_drained(nodes: Nodes, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = nodes.start(2)
    assert nodes.command("drain", "node:0") == 2
    assert capsys.readouterr().err == (
        "resihp: node 0 has the coordinator and can't leave; end the job with resihp stop\n"
    )
    first.ask("finish")
    assert (first.end(), second.end()) == (0, 0), first.output()
