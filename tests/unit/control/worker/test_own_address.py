# SPDX-License-Identifier: Apache-2.0
"""At which of a machine's addresses its workers are looked for."""

from __future__ import annotations

import socket
from typing import NamedTuple

import pytest

from megatron_resihp.control.worker.own_address import own_address, own_address_towards

LOOPBACK = "127.0.0.1"


class Has(NamedTuple):
    family: int
    address: str


CARD = Has(socket.AF_PACKET, "02:fc:00:00:00:01")


def ipv4(address: str) -> Has:
    return Has(socket.AF_INET, address)


def ipv6(address: str) -> Has:
    return Has(socket.AF_INET6, address)


MACHINE = {
    "lo": [ipv4(LOOPBACK), ipv6("::1")],
    "eth0": [CARD, ipv4("10.0.0.7"), ipv6("fd00::7")],
    "ib0": [CARD, ipv6("fe80::7%ib0"), ipv6("fd01::7")],
    "down0": [CARD, ipv6("fe80::8%down0")],
}


@pytest.mark.parametrize(
    ("interface", "address"),
    [("eth0", "10.0.0.7"), ("eth0,ib0", "10.0.0.7"), ("ib0", "fd01::7"), ("lo", LOOPBACK)],
)
def test_workers_are_looked_for_where_gloo_listens(interface: str, address: str) -> None:
    assert own_address("192.0.2.1", interface, lambda: MACHINE) == address


@pytest.mark.parametrize("interface", [None, "", "down0", "nowhere"])
def test_without_an_address_of_its_own_the_way_to_the_coordinator_counts(interface: str | None) -> None:
    assert own_address(LOOPBACK, interface, lambda: MACHINE) == own_address_towards(LOOPBACK) == LOOPBACK


def test_an_interface_of_this_machine_is_found() -> None:
    """The loopback interface is there, and is not the one that leads elsewhere."""
    assert own_address("192.0.2.1", socket.if_nameindex()[0][1]) == LOOPBACK
