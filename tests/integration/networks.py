# SPDX-License-Identifier: Apache-2.0
"""Machines that are network namespaces of this one, for jobs whose network fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import time

import pytest
from slow_cable import SlowCable, complete_checksums

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces are made by root, with `ip`"
)
needs_iptables = pytest.mark.skipif(shutil.which("iptables") is None, reason="packets are dropped with `iptables`")

NOBODY = "02:00:00:00:00:01"
THIS_MACHINE = "10.77.0.250"


class Network:
    """Machines on one switch."""

    def __init__(self, machines: int) -> None:
        self._switch = f"resihp-{os.getpid()}"
        self.names = [f"{self._switch}-{number}" for number in range(machines)]
        self._slow: list[SlowCable] = []
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

    def connect_this_machine(self) -> str:
        """Let processes outside of all these machines be reached; their address."""
        name = f"resihp{os.getpid()}"
        _ip("-n", self._switch, "link", "add", "name", "port", "type", "veth", "peer", "name", name, "netns", "1")
        _ip("-n", self._switch, "link", "set", "dev", "port", "master", "switch", "up")
        _ip("addr", "add", f"{THIS_MACHINE}/24", "dev", name)
        _ip("link", "set", "dev", name, "up")
        return THIS_MACHINE

    def separate(self, one: int, other: int) -> None:
        """What they send each other is lost without a word."""
        for source, target in ((one, other), (other, one)):
            self._lose(source, self.address(target))

    def join(self, one: int, other: int) -> None:
        """It is lost no more."""
        for source, target in ((one, other), (other, one)):
            self._find(source, self.address(target))

    def separate_one_way(self, source: int, target: int) -> None:
        """What this machine sends that one is lost without a word."""
        self._lose(source, self.address(target))

    def lose_some(self, machine: int, share: float) -> None:
        """This share of the packets that it sends and gets is lost, by chance."""
        for chain, device in (("OUTPUT", "-o"), ("INPUT", "-i")):
            by_chance = ("-m", "statistic", "--mode", "random", "--probability", str(share))
            rule = ("iptables", "-A", chain, device, "eth0", *by_chance, "-j", "DROP")
            _ip("netns", "exec", self.names[machine], *rule)

    def slow(self, machine: int, delay_s: float) -> None:
        """What it sends and gets takes so long."""
        port, near, far = f"port{machine}", f"near{machine}", f"far{machine}"
        for name in self.names:
            complete_checksums(name, "eth0")
        _ip("-n", self._switch, "link", "set", "dev", port, "nomaster")
        _ip("-n", self._switch, "link", "add", "name", near, "type", "veth", "peer", "name", far)
        _ip("-n", self._switch, "link", "set", "dev", far, "master", "switch", "up")
        _ip("-n", self._switch, "link", "set", "dev", near, "up")
        self._slow.append(SlowCable(self._switch, port, near, delay_s))

    def seconds_to_connect(self, source: int, target: int, port: int) -> float:
        """How long a connection takes to be made."""
        began_at = time.monotonic()
        connect = f": < /dev/tcp/{self.address(target)}/{port}"
        _ip("netns", "exec", self.names[source], "bash", "-c", connect)
        return time.monotonic() - began_at

    def separate_from_this_machine(self, machine: int) -> None:
        """What it sends to processes outside is lost without a word."""
        self._lose(machine, THIS_MACHINE)

    def join_this_machine(self, machine: int) -> None:
        """It is lost no more."""
        self._find(machine, THIS_MACHINE)

    def _lose(self, source: int, address: str) -> None:
        to_nobody = (address, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")
        _ip("-n", self.names[source], "neigh", "replace", *to_nobody)

    def _find(self, source: int, address: str) -> None:
        _ip("-n", self.names[source], "neigh", "del", address, "dev", "eth0")

    def drop(self, machine: int, port: int) -> None:
        """What this machine sends to that port of others is lost without a word, and what comes from there."""
        self._filter("-A", machine, port)

    def let_through(self, machine: int, port: int) -> None:
        """It is lost no more."""
        self._filter("-D", machine, port)

    def _filter(self, action: str, machine: int, port: int) -> None:
        for chain, end in (("OUTPUT", "--dport"), ("INPUT", "--sport")):
            rule = ("iptables", action, chain, "-p", "tcp", end, str(port), "-j", "DROP")
            _ip("netns", "exec", self.names[machine], *rule)

    def close(self) -> None:
        for cable in self._slow:
            cable.close()
        for name in (self._switch, *self.names):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
