# SPDX-License-Identifier: Apache-2.0
"""At which address the other workers of a job reach this one: where gloo listens, as far as that was chosen.

May import: the standard library and psutil, which workers have for Megatron.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import psutil


class Addressed(Protocol):
    """One address of an interface; some are those of a network card."""

    @property
    def family(self) -> int: ...
    @property
    def address(self) -> str: ...


def own_address(
    coordinator: str,
    interface: str | None,
    addresses: Callable[[], Mapping[str, Sequence[Addressed]]] = psutil.net_if_addrs,
) -> str:
    """This machine's address on the network that its workers use.

    Args:
        coordinator: the host; where no interface was given, the network that leads there is taken for gloo's.
        interface: as GLOO_SOCKET_IFNAME names it; of several, separated by commas, the first.
    """
    name = (interface or "").split(",")[0]
    found = [each.address for each in addresses().get(name, ()) if each.family in (socket.AF_INET, socket.AF_INET6)]
    # Without the interface's name, which is another one on other machines, a link-local address leads nowhere.
    usable = [address for address in found if not ipaddress.ip_address(address).is_link_local]
    return usable[0] if usable else own_address_towards(coordinator)


def own_address_towards(host: str) -> str:
    """The address with which this machine talks to another one. Sends nothing."""
    family, kind, _, _, found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(found)
        return str(probe.getsockname()[0])
