"""Nodes that lose each other while both reach node 0: agents and workers in network namespaces, without Megatron."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import Launched, eventually, is_alive

from megatron_resihp.control.address import Address
from megatron_resihp.plan import ParallelPlan

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces are made by root, with `ip`"
)

NOBODY = "02:00:00:00:00:01"


class Network:
    """Machines on one switch."""

    def __init__(self, machines: int) -> None:
        self._switch = f"resihp-{os.getpid()}"
        self.names = [f"{self._switch}-{number}" for number in range(machines)]
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "name", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "dev", "switch", "up")
        for number, name in enumerate(self.names):
            _ip("netns", "add", name)
            cable = ("name", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", self._switch, "link", "add", *cable)
            _ip("-n", self._switch, "link", "set", "dev", f"port{number}", "master", "switch", "up")
            _ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", name, "link", "set", "dev", device, "up")

    def address(self, machine: int) -> str:
        return f"10.77.0.{machine + 1}"

    def separate(self, one: int, other: int) -> None:
        """What they send each other is lost without a word."""
        for source, target in ((one, other), (other, one)):
            to_nobody = (self.address(target), "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")
            _ip("-n", self.names[source], "neigh", "replace", *to_nobody)

    def close(self) -> None:
        for name in (self._switch, *self.names):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        network = Network(3)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield network
    network.close()


def test_one_of_two_nodes_that_lose_each_other_is_left_out(network: Network, tmp_path: Path) -> None:
    """The job goes on with all others, and nobody comes in the place of who is left out."""
    (tmp_path / "run").mkdir()
    options = {
        "nodes": 3, "workers_per_node": 2, "coordinator": Address(network.address(0), 29500), "max_restarts": 1,
    }  # fmt: skip
    runs = [Launched(tmp_path / "run", network=network.names[node], node=node, **options) for node in range(3)]
    try:
        runs[0].await_event("epoch_started", epoch=0)
        pids = [runs[0].worker_pid(worker) for worker in range(6)]
        network.separate(1, 2)
        runs[0].ask("time_out_0")
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
