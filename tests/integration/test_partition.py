# SPDX-License-Identifier: Apache-2.0
"""Networks that fail without a word: nodes that lose each other, or node 0's store, in network namespaces."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import FP32, WISHING, Job, Jobs, check_training, tiny
from launched import Launched, eventually, is_alive
from networks import Network, needs_iptables, needs_namespaces

from megatron_resihp.control import exit_codes
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.worker.saved_state import flags, newest_state
from megatron_resihp.plan import ParallelPlan

pytestmark = needs_namespaces


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        network = Network(3)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield network
    network.close()


@pytest.mark.parametrize("ways", [2, pytest.param(1, marks=pytest.mark.nightly)])
def test_one_of_two_nodes_that_lose_each_other_is_left_out(network: Network, tmp_path: Path, ways: int) -> None:
    """The job goes on with all others, and nobody comes in the place of who is left out."""
    (tmp_path / "run").mkdir()
    options = {
        "nodes": 3, "workers_per_node": 2, "coordinator": Address(network.address(0), 29500), "max_restarts": 1,
    }  # fmt: skip
    runs = [Launched(tmp_path / "run", network=network.names[node], node=node, **options) for node in range(3)]
    try:
        runs[0].await_event("epoch_started", epoch=0)
        pids = [runs[0].worker_pid(worker) for worker in range(6)]
        network.separate(1, 2) if ways == 2 else network.separate_one_way(1, 2)
        runs[0].ask("time_out_0_in_0")
        failed = runs[0].await_event("link_failed")
        assert failed["reason"] == "workers 2, 3 (node 1) and workers 4, 5 (node 2) can't reach each other"
        assert failed["left_out"] == [4, 5]
        runs[0].await_event("recovery", dead=[4, 5])
        eventually("who is left out ends", lambda: not any(map(is_alive, pids[4:])))
        runs[0].ask("finish")
        assert [run.end() for run in runs] == [0, 0, 0], "\n".join(run.output() for run in runs)
    finally:
        for run in runs:
            run.kill()
    last = ParallelPlan.from_dict(runs[0].events("epoch_started")[-1]["plan"])
    assert last.members == (0, 1, 2, 3) and not runs[0].events("worker_restarted")
    broken = [event["cause"] for event in runs[0].events("epoch_broken")]
    assert len(broken) == 2 and "can't be reached" in broken[1], "the second time as soon as it is tried"


@pytest.mark.nightly
def test_a_link_that_comes_and_goes_is_remembered(network: Network, tmp_path: Path) -> None:
    """It is there again before the epoch is built, and fails in the next one. Its coming back then changes nothing."""
    (tmp_path / "run").mkdir()
    options = {"nodes": 3, "workers_per_node": 2, "coordinator": Address(network.address(0), 29500)}
    runs = [Launched(tmp_path / "run", network=network.names[node], node=node, **options) for node in range(3)]
    try:
        runs[0].await_event("epoch_started", epoch=0)
        network.separate(1, 2)
        runs[0].ask("time_out_0_in_0")
        decisions = tmp_path / "run" / "decisions.jsonl"
        eventually("all are to go on together", lambda: decisions.read_text().count('"EpochPlan"') > 1, 60.0)
        network.join(1, 2)
        runs[0].await_event("epoch_started", epoch=1)
        assert not runs[0].events("link_failed")
        network.separate(1, 2)
        runs[0].ask("time_out_0_in_1")
        assert runs[0].await_event("link_failed")["left_out"] == [4, 5]
        network.join(1, 2)
        runs[0].await_event("recovery", dead=[4, 5])
        runs[0].ask("finish")
        assert [run.end() for run in runs] == [0, 0, 0], "\n".join(run.output() for run in runs)
    finally:
        for run in runs:
            run.kill()
    assert len(runs[0].events("epoch_broken")) == 2


BAD_LINK_S = 120.0


@pytest.mark.nightly
@needs_iptables
@pytest.mark.parametrize("fault", ["30 % of the packets are lost", "packets take 200 ms"])
def test_a_job_bears_a_bad_link(network: Network, tmp_path: Path, fault: str) -> None:
    """That of all that a node sends and gets. No other worker than the one that dies is given up.

    Of the attempts to connect, half fail; each waits twice as long as the one before.
    """
    (tmp_path / "run").mkdir()
    options = {
        "nodes": 3, "workers_per_node": 2, "coordinator": Address(network.address(0), 29500),
        "heartbeat_timeout_s": 30.0,
    }  # fmt: skip
    network.slow(1, 0.2) if "200 ms" in fault else network.lose_some(1, 0.3)
    runs = [Launched(tmp_path / "run", network=network.names[node], node=node, **options) for node in range(3)]
    try:
        runs[0].await_event("epoch_started", BAD_LINK_S, epoch=0)
        if "200 ms" in fault:
            assert network.seconds_to_connect(1, 0, STORE_PORT) > 0.4, "there and back"
        os.kill(runs[0].worker_pid(3), signal.SIGKILL)  # its agent tells of that
        runs[0].await_event("recovery", BAD_LINK_S, dead=[3])
        runs[0].ask("finish")
        assert [run.end(BAD_LINK_S) for run in runs] == [0, 0, 0], "\n".join(run.output() for run in runs)
    finally:
        for run in runs:
            run.kill()
    assert [event["dead"] for event in runs[0].events("worker_dead")] == [3]


def await_cut_off(*runs: Launched) -> None:
    """They end, though threads of theirs may hang in connections to node 0 for longer."""
    said = "resihp: ended with exit code 75: the coordinator is lost"
    eventually("those that are cut off end", lambda: all(said in run.output() for run in runs), 60.0)


@pytest.mark.nightly
def test_node_0_that_loses_both_others_saves_and_ends(network: Network, tmp_path: Path) -> None:
    """The others may be alive, and are: they have lost the coordinator, and end."""
    (tmp_path / "run").mkdir()
    options = {
        "nodes": 3, "workers_per_node": 2, "heartbeat_timeout_s": 2.0,
        "coordinator": Address(network.address(0), 29500),
    }  # fmt: skip
    runs = [Launched(tmp_path / "run", network=network.names[node], node=node, **options) for node in range(3)]
    try:
        runs[0].await_event("epoch_started", epoch=0)
        for other in (1, 2):
            network.separate(0, other)
        assert runs[0].end(60.0) == exit_codes.RETRY, runs[0].output()
        [finished] = runs[0].events("run_finished")
        assert finished["reason"] == (
            "only 2 of 6 workers are accounted for; lost without a word, and perhaps alive: 2, 3, 4, 5"
        )
        await_cut_off(*runs[1:])
    finally:
        for run in runs:
            run.kill()
    assert len(runs[0].events("epoch_started")) == 1, "no other epoch has begun"


@pytest.mark.nightly
def test_node_0_goes_on_without_the_only_other_one(network: Network, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    options = {
        "nodes": 2, "workers_per_node": 2, "heartbeat_timeout_s": 2.0,
        "coordinator": Address(network.address(0), 29500),
    }  # fmt: skip
    runs = [Launched(tmp_path / "run", network=network.names[node], node=node, **options) for node in range(2)]
    try:
        runs[0].await_event("epoch_started", epoch=0)
        network.separate(0, 1)
        runs[0].await_event("recovery", dead=[2, 3])
        runs[0].ask("finish")
        assert runs[0].end() == 0, runs[0].output()
        await_cut_off(runs[1])
    finally:
        for run in runs:
            run.kill()


STORE_PORT = 29500
DROPPED_S = 40.0


def launched_on(
    network: Network, jobs: Jobs, path: Path, arguments: Sequence[str], nodes: int, **options: Any
) -> list[Job]:
    """A job of Megatron's with a node on each machine."""
    coordinator = [network.address(0), STORE_PORT]
    wishes = options.pop("wishes", [])
    options |= {"nodes": nodes, "coordinator": coordinator, "script": WISHING}
    first = jobs.start(arguments, node=0, network=network.names[0], wishes=wishes, **options)
    others = []
    for node in range(1, nodes):
        name = path / f"node{node}"
        name.symlink_to(first.run_dir)  # by this name the nursery tells it from the first
        others.append(first.nursery.start(name, arguments, node=node, network=network.names[node], **options))
    return [first, *others]


@pytest.mark.nightly
def test_a_training_job_leaves_out_one_of_two_nodes_that_lose_each_other(
    network: Network, jobs: Jobs, tmp_path: Path
) -> None:
    """It is noticed long before collectives run out of time, in 10 minutes, once they have looked for each other."""
    arguments = tiny(global_batch_size=6, train_iters=40)
    reference = jobs.reference(arguments, workers=3)
    nodes = launched_on(network, jobs, tmp_path, arguments, nodes=3, workers=1, wishes=["hold-0-31"])
    nodes[0].await_event("iteration", iteration=30)
    network.separate(1, 2)
    separated_at = time.time()
    nodes[0].wish("go_on")
    first = nodes[0].await_event("epoch_broken")
    left_out = nodes[0].await_event("link_failed")
    recovery = nodes[0].await_event("recovery")
    moments = [event["time"] - separated_at for event in (first, left_out, recovery)]
    print("first failure, left out, training again after " + ", ".join(f"{each:.1f} s" for each in moments))
    assert first["cause"].endswith("can't be reached") and moments[0] < 75
    assert left_out["left_out"] in ([1], [2]) and moments[1] < moments[0] + 20
    check_training(nodes[0].wait(240.0), reference)
    assert len(nodes[0].events("epoch_broken")) == 2


@pytest.mark.nightly
@needs_iptables
@pytest.mark.parametrize("dies", [None, 3], ids=["all live", "a worker dies meanwhile"])
def test_a_node_whose_connections_to_the_store_are_dropped_for_a_while_is_not_lost(
    network: Network, jobs: Jobs, tmp_path: Path, dies: int | None
) -> None:
    """For longer than the kernel takes to end them. A death is heard of late then, and nobody else has to go."""
    arguments = tiny(global_batch_size=12, train_iters=12)
    reference = jobs.reference(arguments, workers=4)
    nodes = launched_on(network, jobs, tmp_path, arguments, nodes=2, workers=2, wishes=["hold-0-5"])
    nodes[0].await_event("iteration", iteration=4)
    network.drop(1, STORE_PORT)
    dropped_at = time.monotonic()
    if dies is not None:
        os.kill(nodes[0].worker_pids()[dies], signal.SIGKILL)
        nodes[0].wish("go_on")
    assert not nodes[0].nursery.serve_until(lambda: nodes[0].events("worker_dead"), dropped_at + DROPPED_S)
    network.let_through(1, STORE_PORT)
    nodes[0].wish("go_on")
    check_training(nodes[0].wait(240.0), reference)
    assert nodes[1].wait(240.0).code == 0, nodes[1].output()
    assert [event["dead"] for event in nodes[0].events("worker_dead")] == ([] if dies is None else [dies])
    assert "it is open again" in nodes[0].log(2) and "it is open again" in nodes[1].output()


@pytest.mark.nightly
def test_both_sides_of_a_cut_network_save_and_a_later_job_goes_on(network: Network, jobs: Jobs, tmp_path: Path) -> None:
    """Node 0 has lost two of three nodes, which have lost the coordinator; all see the same run directory."""
    arguments = tiny(global_batch_size=6, train_iters=12)
    reference = jobs.reference(arguments, workers=3)
    options: dict[str, Any] = {"nodes": 3, "workers": 1, "wishes": ["hold-0-7"], "heartbeat_timeout_s": 2.0}
    nodes = launched_on(network, jobs, tmp_path, arguments, **options)
    nodes[0].await_event("iteration", iteration=6)
    for other in (1, 2):
        network.separate(0, other)
    nodes[0].wish("go_on")
    nodes[0].nursery.serve_until(lambda: None not in [node.code for node in nodes], time.monotonic() + 240.0)
    assert [node.code for node in nodes] == [exit_codes.RETRY] * 3, [node.output() for node in nodes]
    assert "only 1 of 3 workers are accounted for" in nodes[0].output()
    found = newest_state(nodes[0].run_dir)
    assert found is not None
    saved, iteration = found
    again = jobs.run([*arguments, *flags(saved)], workers=3)
    assert again.code == 0, again.tails()
    rest = {number: loss for number, loss in reference.summary.loss.items() if number > iteration}
    assert rest and again.summary.loss == pytest.approx(rest, rel=FP32.loss)
