# SPDX-License-Identifier: Apache-2.0
"""Which network interface a node's workers use, and whether other nodes can reach them there.

May import: the standard library and `control.transport.address`.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Mapping
from typing import Final

from megatron_resihp.control.transport.address import Address

GLOO: Final = "GLOO_SOCKET_IFNAME"
NCCL: Final = "NCCL_SOCKET_IFNAME"


def variables(interface: str | None) -> dict[str, str]:
    """What torch's groups read in a worker's environment; nothing where no interface was given."""
    # NCCL takes a name as the beginning of one, unless = is before it.
    return {} if interface is None else {GLOO: interface, NCCL: f"={interface}"}


def problem(interface: str | None, there: Callable[[], list[tuple[int, str]]] = socket.if_nameindex) -> str | None:
    """Why this node's workers can't use the interface; None: they can."""
    if interface is None:
        return None
    names = sorted(name for _, name in there())
    if interface in names:
        return None
    return f"--interface {interface} is none of this node; give one of {' '.join(names)}"


def addresses_of(host: str) -> list[str]:
    """What a host's name stands for here; nothing if it is unknown."""
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def warnings_of(
    coordinator: Address | None,
    nodes: int,
    interface: str | None,
    environment: Mapping[str, str] = os.environ,
    name: str | None = None,
    addresses: Callable[[str], list[str]] = addresses_of,
) -> list[str]:
    """One line for each name of this node that leads other nodes to themselves.

    Args:
        nodes: of the job, at most. Where node 0's address is a loopback address itself, all are on this machine.
        name: this node's; None: ask the system.
    """
    if nodes < 2 or coordinator is None or _is_loopback(coordinator.host):
        return []
    lines = []
    if found := _loopback(addresses(coordinator.host)):
        lines.append(
            f"{coordinator.host} resolves to {found} here, where other nodes can't reach it; give its address in "
            "--coordinator, or fix /etc/hosts"
        )
    own = socket.gethostname() if name is None else name
    if interface is None and GLOO not in environment and (found := _loopback(addresses(own))):
        lines.append(
            f"this node's name {own} resolves to {found}, where workers of other nodes can't reach those of this one; "
            "give --interface NAME, or fix /etc/hosts"
        )
    return lines


def _loopback(addresses: list[str]) -> str | None:
    """The first address, which gloo takes, if it is a loopback address."""
    return addresses[0] if addresses and _is_loopback(addresses[0]) else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
