# SPDX-License-Identifier: Apache-2.0
"""The network interface that a node's workers use, names that lead nowhere, and IPv6."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from served import CONNECT_S

from megatron_resihp.control.commands.launch.interface import GLOO, NCCL, problem, variables, warnings_of
from megatron_resihp.control.commands.launch.launch_options import LaunchError, LaunchOptions, check
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.node.environment import JobEnvironment
from megatron_resihp.control.transport.access.secret import fresh_secret
from megatron_resihp.control.transport.address import Address, parse_address
from megatron_resihp.control.transport.sockets import reserve
from megatron_resihp.control.transport.store.client import connect
from megatron_resihp.control.transport.store.server import StoreServer
from megatron_resihp.control.worker.own_address import own_address_towards
from megatron_resihp.control.worker.reach import Door, unreachable

LOOPBACK = socket.if_nameindex()[0][1]
NODE_0 = Address("n0", 6000)
NAMES = {"n0": ["10.0.0.1"], "n1": ["127.0.1.1"], "lost": [], "v6": ["fe80::1%eth0"], "v6-self": ["::1"]}


def test_workers_get_the_interface_for_gloo_and_for_nccl() -> None:
    job = JobEnvironment(
        node=1, size=JobSize(2, 1), store=NODE_0, run_dir=Path(), heartbeat_s=1.0,
        stand_in=False, network=variables("eth1"),
    )  # fmt: skip
    found = job.of(1, {}, {GLOO: "eth0"})
    assert (found[GLOO], found[NCCL]) == ("eth1", "=eth1")
    assert variables(None) == {}


def test_an_interface_that_is_not_there_is_refused_in_one_line(tmp_path: Path) -> None:
    assert problem("eth0", lambda: [(1, "lo"), (2, "eth0")]) is None and problem(None) is None
    said = problem("eth9", lambda: [(2, "eth0"), (1, "lo")])
    assert said == "--interface eth9 is none of this node; give one of eth0 lo"
    script = tmp_path / "train.py"
    script.touch()
    check(LaunchOptions((str(script),), interface=LOOPBACK))
    with pytest.raises(LaunchError, match="--interface nowhere is none of this node; give one of"):
        check(LaunchOptions((str(script),), interface="nowhere"))


@pytest.mark.parametrize(
    ("coordinator", "own", "said"),
    [
        (NODE_0, "n0", []),
        (NODE_0, "n1", ["this node's name n1 resolves to 127.0.1.1, where workers of other nodes"]),
        (Address("n1", 6000), "n0", ["n1 resolves to 127.0.1.1 here, where other nodes can't reach it"]),
        (NODE_0, "v6-self", ["this node's name v6-self resolves to ::1"]),
        (NODE_0, "v6", []),
        (NODE_0, "lost", []),
        (Address("127.0.0.1", 6000), "n1", []),  # all nodes are on this machine
        (Address("::1", 6000), "n1", []),
        (Address("localhost", 6000), "n1", []),
        (None, "n1", []),
    ],
)
def test_names_that_lead_other_nodes_to_themselves_are_told_of(
    coordinator: Address | None, own: str, said: list[str]
) -> None:
    lines = warnings_of(coordinator, 2, None, {}, own, lambda host: NAMES.get(host, []))
    assert len(lines) == len(said) and all(line.startswith(part) for line, part in zip(lines, said, strict=True))


def test_who_has_chosen_an_interface_is_told_nothing() -> None:
    names = NAMES.__getitem__
    assert warnings_of(NODE_0, 2, "eth0", {}, "n1", names) == []
    assert warnings_of(NODE_0, 2, None, {GLOO: "eth0"}, "n1", names) == []
    assert warnings_of(NODE_0, 1, None, {}, "n1", names) == [], "one node"


def test_the_store_and_workers_doors_are_reached_by_ipv6() -> None:
    try:
        listener = reserve("::1", 0)
    except Exception as error:  # the machine has none
        pytest.skip(f"no IPv6 here: {error}")
    address = parse_address(f"[::1]:{listener.getsockname()[1]}")
    secret = fresh_secret()
    server = StoreServer(listener, secret)
    try:
        store = connect(address, secret, CONNECT_S)
        store.set("key", "value")
        assert store.clone().get("key", CONNECT_S) == "value"
        assert str(address).startswith("[::1]:")
    finally:
        server.close()
    door = Door(own_address_towards("::1"))
    assert unreachable({1: door.address}) == []
    door.close()
