# SPDX-License-Identifier: Apache-2.0
"""Names and values of the environment variables that a worker is started with. Imports its own package and `plan`."""

from __future__ import annotations

import json
import os
import pwd
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.transport.access.encryption import PREFIX as TLS
from megatron_resihp.control.transport.access.secret import VARIABLE as SECRET
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.etcd.access import PREFIX as ETCD
from megatron_resihp.control.transport.leaders import Leaders
from megatron_resihp.control.transport.store.by_agent import ByAgent, at_hatch
from megatron_resihp.plan.slots import slot_of

WORKER: Final = "RESIHP_WORKER"
"""This worker's id: its global rank at the start, or another number if it was not there then; see `plan.slots`."""
SLOTS: Final = "RESIHP_SLOTS"
"""How many slots for workers the job has, with those on nodes that may join it."""
NODE: Final = "RESIHP_NODE"
APART: Final = "RESIHP_COORDINATOR_APART"
"""1: the coordinator runs on none of the job's nodes."""
LED_ON: Final = "RESIHP_LED_ON"
"""1: another coordinator may take the place of one that is lost."""
STORE: Final = "RESIHP_STORE"
"""host:port of the store, to which a worker's agent speaks for it."""
STORE_FD: Final = "RESIHP_STORE_FD"
"""The file descriptor of the hatch where this worker hands its connections to the store over; see `by_agent`."""
RUN_DIR: Final = "RESIHP_RUN_DIR"
LIVENESS_FD: Final = "RESIHP_LIVENESS_FD"
RECORDS_FD: Final = "RESIHP_RECORDS_FD"
"""The file descriptor to which this worker sends its measurements; see `shipping`."""
ABSENCES_FD: Final = "RESIHP_ABSENCES_FD"
"""The file descriptor from which this worker reads when it was stopped; see `absences`."""
HEARTBEAT_S: Final = "RESIHP_HEARTBEAT_S"
"""Seconds between two beats of the liveness connection."""
AGENT_PID: Final = "RESIHP_AGENT_PID"
MAX_RESTARTS: Final = "RESIHP_MAX_RESTARTS"
"""How often each worker that died is started anew."""
STAND_IN: Final = "RESIHP_CPU"
"""1: use the CPU stand-in for CUDA."""
NCCL: Final[Mapping[str, str]] = {
    # torch 2.15's newer backend connects all groups when they are made, by splitting the world, in which then all of
    # its members must take part; some of ours are made by their own members only.
    "TORCH_DIST_USE_NCCL2": "0",
    # torch ends the process where it finds NCCL in error, as it is when a peer has died. We ask it instead
    # (`integration.loop.nccl_watch`). Nor may it abort a communicator by itself: only then is every abort known to be
    # one, and what an aborted collective leaves never taken for a gradient.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # It would also hold the group's lock for four times the second, and end the process a while after that.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # Its watchdog would end the process at a CUDA error, before the worker can say whose error that is
    # (`integration.loop.device_loss`).
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # Who waits for a communicator that is not blocking holds its lock, which an abort needs (`executor.nccl.meetings`).
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
}
"""What recovery needs of torch's NCCL, whatever the user's environment says."""
SAFER: Final[Mapping[str, str]] = {
    # By default NCCL uses NVSwitches' own sums (2, as 1), in memory that is the members' together.
    "NCCL_NVLS_ENABLE": "0",
}
"""What recovery asks of NCCL where the user says nothing, in the environment or in NCCL's files."""
USERS_NCCL: Final = "RESIHP_USERS_NCCL"
"""What it says, as JSON, for a job without --resihp."""
OLDER_NAMES: Final[Mapping[str, str]] = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
}
"""torch still reads these, where the newer name is not set."""
SYSTEMS_CONF: Final = Path("/etc/nccl.conf")
_DIE: Final = "survivors may fault on the memory of a dead peer, and die with it"
_ENDED: Final = "torch may end survivors when a peer dies"
_ONE_BY_ONE: Final = "the host waits for the device, so nothing overlaps"
HARMFUL: Final[Mapping[tuple[str, str], tuple[str, str]]] = {
    ("NCCL_CUMEM_ENABLE", "0"): (_DIE, "unset it"),
    ("NCCL_NVLS_ENABLE", "1"): (_DIE, "unset it"),
    ("NCCL_NVLS_ENABLE", "2"): (_DIE, "unset it"),
    ("NCCL_COMM_BLOCKING", "0"): ("an abort waits for a communicator that is being made", "unset it"),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): (_ENDED, "unset it"),
    ("TORCH_NCCL_DESYNC_DEBUG", "1"): (_ENDED, "unset it"),
    ("TORCH_NCCL_BLOCKING_WAIT", "1"): (_ONE_BY_ONE, "unset it"),
    ("CUDA_LAUNCH_BLOCKING", "1"): (_ONE_BY_ONE, "unset it"),
}
"""Settings that harm recovery or training, how, and what to do. Users change them: each may have a reason on its
cluster."""


def way_to_store(environment: Mapping[str, str] = os.environ) -> ByAgent:
    """This worker's."""
    hatch = socket.socket(fileno=os.dup(int(environment[STORE_FD])))
    return ByAgent(at_hatch(hatch), Leaders(Path(environment[RUN_DIR])) if LED_ON in environment else None)


def warnings_of(inherited: Mapping[str, str] = os.environ, system: Path = SYSTEMS_CONF) -> list[str]:
    """One line for each setting that does harm, in the environment or in a file that NCCL takes settings from.

    Args:
        system: NCCL's file for the whole machine.
    """
    found = {name: (value, "") for name, value in inherited.items()}
    for path in conf_files(inherited, system):
        for name, value in settings_in(path).items():
            found.setdefault(name, (value, f" in {path}"))
    lines = []
    for (name, value), (harm, mend) in HARMFUL.items():
        spellings = [name, *(old for old, new in OLDER_NAMES.items() if new == name)]
        said = next((spelling for spelling in spellings if spelling in found), None)
        if said is not None and found[said][0] == value:
            lines.append(f"{said}={value}{found[said][1]}: {harm}; {mend}")
    return lines


def conf_files(inherited: Mapping[str, str], system: Path) -> list[Path]:
    """The files from which NCCL takes settings that the environment doesn't have; the first that has one counts."""
    named = inherited.get("NCCL_CONF_FILE")
    try:
        users = Path(named) if named else Path(pwd.getpwuid(os.getuid()).pw_dir, ".nccl.conf")
    except KeyError:  # a container's user may have no entry
        return [system]
    return [users, system]


def settings_in(path: Path) -> dict[str, str]:
    """NCCL's settings in one of its files, as NCCL reads them; none where it can't be read. Settings for torch or CUDA
    in there come too late."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    named = (line.partition("=") for line in reversed(lines) if line.startswith("NCCL_") and "=" in line)
    return {name: value.strip() for name, _, value in named}  # the first of several counts


def _safer(inherited: Mapping[str, str]) -> dict[str, str]:
    said = {name for path in conf_files(inherited, SYSTEMS_CONF) for name in settings_in(path)}
    return {name: value for name, value in SAFER.items() if name not in said}


def overruled(inherited: Mapping[str, str] = os.environ) -> list[str]:
    """One line for each setting that workers of a job with --resihp don't get."""
    older = {old: NCCL[new] for old, new in OLDER_NAMES.items() if new in NCCL and new not in inherited}
    return [
        f"{name}={inherited[name]} becomes {value}: recovery needs it; unset it"
        for name, value in {**NCCL, **older}.items()
        if inherited.get(name, value) != value
    ]


def give_back_nccl(environment: MutableMapping[str, str] = os.environ) -> None:
    """In a worker that does without the plugin: let torch's NCCL be as the user's environment has it."""
    for name in (*NCCL, *SAFER):
        environment.pop(name, None)
    environment.update(json.loads(environment.pop(USERS_NCCL, "{}")))


@dataclass(frozen=True)
class JobEnvironment:
    """What the environments of all workers of one node have in common."""

    node: int
    size: JobSize
    store: Address
    run_dir: Path
    heartbeat_s: float
    stand_in: bool
    max_restarts: int = 0
    led_on: bool = False
    network: Mapping[str, str] = field(default_factory=dict)
    """Variables that say which network interface torch's groups use."""

    def of(self, worker: int, files: Mapping[str, int], inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The whole environment of one worker. `files`: its file descriptors, by the variables that name them.

        RANK and WORLD_SIZE are of the world at the start, also for later workers: with them Megatron starts.
        """
        size = self.size
        slot = slot_of(worker, size.slots)
        return {
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **_safer(inherited),
            # Workers need nothing of etcd, and their agent has the secret for them.
            **{name: value for name, value in inherited.items() if not name.startswith((ETCD, TLS)) and name != SECRET},
            "PYTHONUNBUFFERED": "1",
            # Connections between pairs that never talk would only be more to lose.
            "TORCH_GLOO_LAZY_INIT": "1",
            **NCCL,
            **self.network,
            USERS_NCCL: json.dumps({name: inherited[name] for name in (*NCCL, *SAFER) if name in inherited}),
            "RANK": str(slot % size.workers),
            "LOCAL_RANK": str(slot % size.workers_per_node),
            "WORLD_SIZE": str(size.workers),
            "LOCAL_WORLD_SIZE": str(size.workers_per_node),
            "GROUP_RANK": str(self.node),
            "MASTER_ADDR": self.store.host,
            "MASTER_PORT": str(self.store.port),
            # Torch's own rendezvous must serve nothing there (`executor.groups.control_store`).
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            WORKER: str(worker),
            SLOTS: str(size.slots),
            NODE: str(self.node),
            STORE: str(self.store),
            RUN_DIR: str(self.run_dir.resolve()),
            HEARTBEAT_S: str(self.heartbeat_s),
            AGENT_PID: str(os.getpid()),
            MAX_RESTARTS: str(self.max_restarts),
            **{name: str(number) for name, number in files.items()},
            **({APART: "1"} if size.apart else {}),
            **({LED_ON: "1"} if self.led_on else {}),
            **({STAND_IN: "1"} if self.stand_in else {}),
        }
