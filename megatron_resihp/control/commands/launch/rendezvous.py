# SPDX-License-Identifier: Apache-2.0
"""Where a job's nodes meet, from torchrun's flags: node 0's address, this node's rank, and a name for the job.

Pure, but for `can_be_bound`. May import: the standard library and `transport.address`.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from megatron_resihp.control.commands.launch.torchrun_flags import TorchrunError
from megatron_resihp.control.transport.address import Address, parse_address

STATIC: Final = "static"
C10D: Final = "c10d"
PORTS: Final = {STATIC: 29500, C10D: 29400}
"""torchrun's own defaults."""
RANKS: Final = ("GROUP_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")
"""Variables that give a node's rank where torchrun would agree on one: of schedulers of pods, of SLURM, of Kubernetes'
indexed jobs."""
TASKS: Final = ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
"""Variables that number the tasks of a node, of srun and of mpirun."""
UNNAMED: Final = "none"
"""torchrun's default --rdzv-id."""


@dataclass(frozen=True)
class Rendezvous:
    """How torchrun's flags say that nodes meet.

    Attributes:
        address: where node 0 is reached; None: one node, at a free port.
        node: this one's rank.
        name: for the job, the same on all nodes; None: there is none.
        patience_s: how long nodes wait for each other; None: not said.
    """

    address: Address | None = None
    node: int = 0
    name: str | None = None
    patience_s: float | None = None


def rendezvous_of(
    said: Mapping[str, Any], nodes: int, environment: Mapping[str, str], is_here: Callable[[str], bool]
) -> Rendezvous:
    """What torchrun's flags say.

    Args:
        said: by torchrun's names.
        nodes: of the job, at most.
        is_here: whether a host's name is this machine's.

    Raises:
        TorchrunError: nodes would not find each other.
    """
    if "node_rank" not in said:
        _check_task(environment)
    backend = said.get("rdzv_backend", STATIC)
    if said.get("standalone"):
        if nodes > 1:
            raise TorchrunError(f"--standalone is for one node, and --nnodes says {nodes}; leave one of them out")
        return Rendezvous(node=said.get("node_rank", 0))
    if backend not in PORTS:
        mend = "give --rdzv-backend c10d and --rdzv-endpoint HOST:PORT, node 0's address"
        raise TorchrunError(f"--rdzv-backend {backend} needs a server that is not used here; {mend}")
    settings = _settings(said.get("rdzv_conf", ""))
    address = _address(said, backend, nodes)
    name = said.get("rdzv_id", UNNAMED)
    if name == UNNAMED:
        name = environment.get("SLURM_JOB_ID") or (None if address is None else str(address))
    return Rendezvous(
        address=address,
        node=_node(said, backend, address, nodes, settings, environment, is_here),
        name=None if name is None else re.sub(r"[^\w.-]+", "-", name),
        patience_s=_seconds(settings),
    )


def _check_task(environment: Mapping[str, str]) -> None:
    for name in TASKS:
        if environment.get(name, "0") != "0":
            raise TorchrunError(
                f"this is not the first task of its node ({name}={environment[name]}), and one launcher starts all "
                "workers of a node; start one task on each, as with srun --ntasks-per-node=1, and give --nproc-per-node"
            )


def can_be_bound(host: str) -> bool:
    """Whether a server can listen at this host's address here."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as server:
            server.bind(address)
    except OSError:
        return False
    return True


def _settings(text: str) -> dict[str, str]:
    """--rdzv-conf: KEY=VALUE, with commas between them."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if not all(key.strip() and equals for key, equals, _ in pairs):
        raise TorchrunError(f"--rdzv-conf {text} is not KEY=VALUE,KEY=VALUE; fix it, or leave it out")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _seconds(settings: Mapping[str, str]) -> float | None:
    text = settings.get("join_timeout", settings.get("timeout"))
    try:
        return None if text is None else float(text)
    except ValueError:
        raise TorchrunError(f"--rdzv-conf says to wait {text}, which is not a number; give seconds") from None


def _address(said: Mapping[str, Any], backend: str, nodes: int) -> Address | None:
    endpoint = said.get("rdzv_endpoint")
    if endpoint:
        flag, text = "--rdzv-endpoint", endpoint
        if not re.search(r":\d+$", text) or text.endswith("]"):
            text = f"{text}:{PORTS[backend]}"
    elif backend == STATIC and ("master_port" in said or (nodes > 1 and "master_addr" in said)):
        flag = "--master-addr, --master-port"
        host = said.get("master_addr", "127.0.0.1")
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        text = f"{host}:{said.get('master_port', PORTS[STATIC])}"
    else:
        return None
    if text.endswith(":0"):
        if nodes > 1:
            raise TorchrunError(f"{flag} {text} leaves the port open, which other nodes can't know; give one")
        return None
    try:
        return parse_address(text)
    except ValueError as error:
        raise TorchrunError(f"{flag}: {error}; give node 0's host name or address and a free port") from None


def _node(
    said: Mapping[str, Any],
    backend: str,
    address: Address | None,
    nodes: int,
    settings: Mapping[str, str],
    environment: Mapping[str, str],
    is_here: Callable[[str], bool],
) -> int:
    """This node's rank. torchrun's c10d agrees on ranks when nodes meet, and ours is known before."""
    if "node_rank" in said:
        return int(said["node_rank"])
    if backend == STATIC or nodes == 1 or address is None:
        return 0
    if settings.get("is_host", "").lower() in ("1", "true", "t", "yes", "y"):
        return 0
    for name in RANKS:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    if is_here(address.host):
        return 0
    if nodes == 2:
        return 1
    raise TorchrunError(
        f"--rdzv-endpoint {address} tells only node 0 its rank; give --node-rank RANK or PET_NODE_RANK on each node, "
        f"0 at {address.host}"
    )
