# SPDX-License-Identifier: Apache-2.0
"""Real etcds, of one member or several, whose members can be stopped, killed and started again."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.etcd.access import OPEN, Access
from megatron_resihp.control.transport.etcd.gateway import EtcdError, Gateway
from megatron_resihp.control.transport.etcd.location import Location

needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="there is no etcd (Debian: etcd-server)")

HOST = "127.0.0.1"
START_S = 20.0
_PORTS = iter(range(10_000 + os.getpid() % 5_000, 20_000))
"""Below those from which Linux takes ports for connections."""


class Etcd:
    """A cluster on this machine, from its making until it is closed.

    Args:
        folder: for its data and its output.
        access: how it lets clients in; to be set once that is another.
        flags: more of etcd's.
        host: this machine's address at which it is reached.
    """

    def __init__(
        self, folder: Path, members: int = 1, access: Access = OPEN, flags: Sequence[str] = (), host: str = HOST
    ) -> None:
        self._folder, self._host = folder, host
        self.access, self._flags = access, flags
        self._ports = [(_free_port(host), _free_port(HOST)) for _ in range(members)]
        self._members: dict[int, subprocess.Popen[bytes]] = {}
        self.start(*range(members))

    def location(self, run: str = "run") -> Location:
        """Of a job's decisions here."""
        return Location(tuple(Address(self._host, clients) for clients, _ in self._ports), run, self.access)

    def start(self, *members: int) -> None:
        """Start members, and wait until the cluster answers."""
        self.begin(*members)
        self._await()

    def begin(self, *members: int) -> None:
        """Start members."""
        for member in members:
            self._members[member] = self._started(member)

    def kill(self, *members: int) -> None:
        """End members without a word."""
        for member in members:
            process = self._members.pop(member)
            process.kill()
            process.wait()

    def pause(self, *members: int) -> None:
        """Have members answer no more; connections to them are still taken."""
        for member in members:
            self._members[member].send_signal(signal.SIGSTOP)

    def go_on(self, *members: int) -> None:
        for member in members:
            self._members[member].send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill(*self._members)

    def _started(self, member: int) -> subprocess.Popen[bytes]:
        scheme = "http" if self.access.ca is None else "https"
        for_clients, for_peers = self._ports[member]
        clients, peers = f"{scheme}://{self._host}:{for_clients}", f"http://{HOST}:{for_peers}"
        cluster = ",".join(f"m{number}=http://{HOST}:{port}" for number, (_, port) in enumerate(self._ports))
        with (self._folder / f"etcd{member}.log").open("ab") as output:
            return subprocess.Popen([
                "etcd", "--name", f"m{member}", "--data-dir", str(self._folder / f"etcd{member}"),
                "--listen-client-urls", clients, "--advertise-client-urls", clients,
                "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", cluster,
                *self._flags,
            ], stdout=output, stderr=output)  # fmt: skip

    def _await(self) -> None:
        gateway, until = Gateway(self.location("any")), time.monotonic() + START_S
        while True:
            try:
                gateway.get("any")
                gateway.check_version()  # which several members agree on a moment later
                return
            except EtcdError as error:
                if "permission denied" in str(error):
                    return  # it knows who asks
                assert time.monotonic() < until, error
                time.sleep(0.05)
            finally:
                gateway.close()


def _free_port(host: str) -> int:
    """One that no outgoing connection takes meanwhile."""
    for port in _PORTS:
        with suppress(OSError), socket.create_server((host, port)):
            return port
    raise AssertionError("no port is free")
