# SPDX-License-Identifier: Apache-2.0
"""How a node finds out that it belongs to the job, on a file system that may still show an earlier one's files."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from served import Served, serving

from megatron_resihp.control.commands.contact import FILE_NAME as CONTACT
from megatron_resihp.control.commands.contact import reach
from megatron_resihp.control.commands.launch.admission import admitted, find_secret
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.transport.access.gate import OtherProtocolError
from megatron_resihp.control.transport.access.secret import FILE_NAME, VARIABLE
from megatron_resihp.control.transport.access.secure import HELLO_BYTES
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.node_liveness import check_size, publish
from megatron_resihp.control.transport.sockets import StoreError
from megatron_resihp.control.transport.store.client import connect
from megatron_resihp.control.transport.store.store import Store
from megatron_resihp.protocol.version import MAJOR

WAIT_S = 10.0
SIZE = JobSize(2, 2)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.delenv(VARIABLE, raising=False)
    with serving() as served:
        publish(served.connect(), SIZE, None)
        yield served


def test_an_earlier_runs_secret_is_looked_at_again_until_the_new_one_is_seen(served: Served, tmp_path: Path) -> None:
    looks: list[float] = []

    def pause(seconds: float) -> None:
        """Another host's file is seen at the third look."""
        looks.append(seconds)
        text = "an earlier run's secret" if len(looks) < 3 else served.secret.text
        (tmp_path / FILE_NAME).write_text(text)

    own_size = partial(check_size, node=1, size=SIZE)
    assert admitted(served.address, tmp_path, WAIT_S, own_size, pause)[0].key == served.secret.key
    assert len(looks) == 3, "first none is seen, then an old one"


@pytest.mark.parametrize("other", [JobSize(3, 2), JobSize(2, 2, late_nodes=2), JobSize(2, 4)])
def test_a_node_that_was_told_of_another_job_is_refused_in_one_line(
    served: Served, tmp_path: Path, other: JobSize
) -> None:
    (tmp_path / FILE_NAME).write_text(served.secret.text)
    with pytest.raises(StoreError, match=r"--nnodes 2 --nproc-per-node 2; give node 1 the same$"):
        admitted(served.address, tmp_path, WAIT_S, partial(check_size, node=1, size=other))


def test_a_node_0_that_does_not_say_what_it_runs_is_told_of(served: Served, tmp_path: Path) -> None:
    def ask(store: Store) -> None:
        store.get("never there", 0.0)

    (tmp_path / FILE_NAME).write_text(served.secret.text)
    with pytest.raises(StoreError, match="does not say what job it runs"):
        admitted(served.address, tmp_path, WAIT_S, ask)


@pytest.fixture
def another_version() -> Iterator[Address]:
    """A node 0 of protocol 9."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                with sock:
                    sock.sendall(b"resihp/9".ljust(HELLO_BYTES, b"n"))
                    sock.recv(1)

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        yield Address("127.0.0.1", listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT_S)


def test_agents_workers_and_commands_of_another_protocol_are_refused_in_one_line(
    another_version: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "a secret that a user gives")
    (tmp_path / CONTACT).write_text(f'{{"store": "{another_version}", "token": "of the job"}}')
    secret = find_secret(tmp_path)
    speaks = f"speaks protocol '9', this process {MAJOR}; give all nodes, .* same installation$"
    said = f"^the job at {another_version} {speaks}"
    for call in (
        lambda: admitted(another_version, tmp_path, WAIT_S, lambda store: None),  # an agent
        lambda: connect(another_version, secret, WAIT_S),  # a worker
        lambda: reach(tmp_path),  # a command
    ):
        with pytest.raises(OtherProtocolError, match=said):
            call()
