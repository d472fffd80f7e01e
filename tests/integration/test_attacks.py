# SPDX-License-Identifier: Apache-2.0
"""Strangers at all ports of node 0, without the secret or with an old one, while a job trains and recovers."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from attacks import REQUESTS, STALE, plainly, with_a_stale_secret
from jobs import NODES_SECRET, Job, Jobs, check_training, tiny

from megatron_resihp.control import keys
from megatron_resihp.control.commands.contact import reach
from megatron_resihp.control.transport.access.gate import RefusedSecretError, enter
from megatron_resihp.control.transport.access.secret import VARIABLE
from megatron_resihp.control.transport.access.secure import LENGTH
from megatron_resihp.control.transport.address import Address, parse_address
from megatron_resihp.control.transport.sockets import StoreError
from megatron_resihp.control.transport.store.wire import LARGEST

pytestmark = pytest.mark.nightly

LAYOUT: dict[str, Any] = {"pipeline_model_parallel_size": 2, "use_tp_pp_dp_mapping": True, "train_iters": 40}
"""Two nodes of two workers, with a replica each."""
IDLE = 10_000
MOST_BYTES = 100e6
WAIT_S = 10.0


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, NODES_SECRET)


def started(jobs: Jobs, arguments: list[str]) -> tuple[Job, Job, list[Address]]:
    """A job of two nodes that trains, and where strangers find node 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        coordinator = list(server.getsockname())
    first, second = (jobs.start(arguments, workers=2, nodes=2, node=n, coordinator=coordinator) for n in range(2))
    first.await_event("iteration", iteration=2)
    store = reach(first.run_dir)
    others = [parse_address(store.get(key, WAIT_S)) for key in (keys.LIVENESS_ADDRESS, keys.RECORDS_ADDRESS)]
    store.close()
    return first, second, [Address(*coordinator), *others]


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def words() -> Iterator[bytes]:
    """What strangers say, again and again."""
    while True:
        yield os.urandom(4096)
        yield LENGTH.pack(1 << 31) + bytes(1 << 20)
        yield b"s"
        yield b""
        for request in REQUESTS.values():
            yield from plainly(request)


def attack(address: Address, over: threading.Event, done: Callable[[], None]) -> None:
    """Say all this to a port, without a secret and with an old one, with ten connections at a time left open."""
    held: list[socket.socket] = []
    orders = list(REQUESTS.values())
    for number, word in enumerate(words()):
        if over.is_set():
            break
        with suppress(OSError):
            held.append(socket.create_connection(address, timeout=1.0))
            held[-1].sendall(word)
        while len(held) > 10:
            held.pop(0).close()
        with suppress(OSError):
            held.append(with_a_stale_secret(address, orders[number % len(orders)], 1.0))
        if number % 20 == 0:
            with suppress(OSError, StoreError):
                try:
                    enter(address, STALE, "store", LARGEST, 1.0)[0].close()
                    raise AssertionError("it is let in")
                except RefusedSecretError:
                    done()
        time.sleep(0.002)
    for sock in held:
        sock.close()


def test_a_job_trains_on_and_recovers_under_attack(jobs: Jobs) -> None:
    arguments = tiny(**LAYOUT)
    reference = jobs.reference(arguments, workers=4)
    first, second, addresses = started(jobs, arguments)
    before, over, refusals = resident(first.pid or 0), threading.Event(), list[None]()
    attackers = [
        threading.Thread(target=attack, args=(address, over, lambda: refusals.append(None))) for address in addresses
    ]
    for attacker in attackers:
        attacker.start()
    most = 0

    def look() -> None:
        nonlocal most
        with suppress(OSError, IndexError):
            most = max(most, resident(first.pid or 0))

    try:
        os.kill(first.worker_pids()[1], signal.SIGKILL)
        check_training(first.wait(meanwhile=look), reference)
        assert second.wait().code == 0, second.tails()
    finally:
        over.set()
        for attacker in attackers:
            attacker.join(WAIT_S)
    print(f"{len(refusals)} old secrets were refused; node 0 grew by {(most - before) / 1e6:.1f} MB")
    assert len(refusals) > 10
    assert most - before < MOST_BYTES
    assert {death.worker for death in first.summary.deaths} == {1}
    assert not first.events("message_dropped")


def test_ten_thousand_that_say_nothing_cost_little(jobs: Jobs) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < IDLE + 1000:
        pytest.skip(f"this process may open {hard} files only")
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, IDLE + 1000), hard))
    arguments = tiny(**LAYOUT)
    first, second, addresses = started(jobs, arguments)
    before = resident(first.pid or 0)
    crowd = [socket.create_connection(addresses[n % len(addresses)], timeout=WAIT_S) for n in range(IDLE)]
    grown = resident(first.pid or 0) - before
    assert first.code is None, "it is to train while they come"
    assert first.wait().code == 0 == second.wait().code, first.tails()
    for sock in crowd:
        sock.close()
    print(f"node 0 grew by {grown / 1e6:.1f} MB")
    assert grown < MOST_BYTES
    assert not first.events("worker_dead") and not first.events("epoch_broken")
