# SPDX-License-Identifier: Apache-2.0
"""What `resihp launch` is told: its arguments, and what is wrong with them.

May import: the standard library and `control`'s modules.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

from megatron_resihp.control.commands.launch import interface, torchrun_flags
from megatron_resihp.control.commands.launch.rendezvous import Rendezvous, can_be_bound, rendezvous_of
from megatron_resihp.control.job_size import JobSize, parse_nodes
from megatron_resihp.control.node.output import MODES
from megatron_resihp.control.transport.address import Address, parse_address
from megatron_resihp.control.transport.etcd.access import access_of
from megatron_resihp.control.transport.etcd.location import Location, parse_location

RUNS: Final = Path("resihp-runs")
LONGEST_PERIOD_S: Final = 1.0
"""Between two heartbeats."""
LONGEST_WAIT_S: Final = 7 * 24 * 3600.0
"""Sockets can't be told to wait for more than some weeks."""
TIMEOUTS: Final = ("heartbeat", "notice", "survivor", "connect")
"""--NAME-timeout."""


EPILOG: Final = """\
All flags of torchrun are accepted too, with dashes or underscores, except a few; docs/usage.md lists them.
"""


class LaunchError(Exception):
    """The user has to mend something; the message is "cause; mend"."""


class NoDeviceError(LaunchError):
    """A node has as many workers as GPUs, and this machine shows none."""


@dataclass(frozen=True)
class LaunchOptions:
    """What a job is launched with. Times are in seconds.

    Attributes:
        command: the script and its arguments, or -m, a module and its arguments; empty where no worker is started.
        nodes, late_nodes, workers_per_node: see `JobSize`.
        node: this one's rank.
        coordinator: where the store is served; None: on this machine only, at a free port.
        control: where in etcd the coordinator keeps decisions, too; None: nowhere.
        alone: this is the coordinator without workers, apart from all nodes.
        standby: it waits for the loss of the job's coordinator, and takes its place then.
        interface: the network interface that this node's workers use; None: torch chooses.
        run_dir: None: a new directory in `runs`.
        logs: one of output.MODES.
        heartbeat_timeout_s: workers and nodes that are silent for longer are given up for dead.
        notice_timeout_s: so are workers that are silent for longer once an epoch has broken.
        survivor_timeout_s: survivors that do not report for longer are given up for dead.
        connect_timeout_s: how long nodes wait for each other at the start.
        max_restarts: how often a worker that died is started anew, at most.
        min_workers: the job ends when fewer than these survive.
        drain_deadline_s: what was told to leave and has not by then counts as dead.
        stand_in: train on CPUs in place of GPUs.
    """

    command: tuple[str, ...]
    workers_per_node: int = 1
    nodes: int = 1
    late_nodes: int = 0
    node: int = 0
    coordinator: Address | None = None
    control: Location | None = None
    alone: bool = False
    standby: bool = False
    interface: str | None = None
    run_dir: Path | None = None
    runs: Path = RUNS
    logs: str = "file"
    heartbeat_timeout_s: float = 30.0
    notice_timeout_s: float = 10.0
    survivor_timeout_s: float = 60.0
    connect_timeout_s: float = 300.0
    max_restarts: int = 0
    min_workers: int = 1
    drain_deadline_s: float = 20.0
    stand_in: bool = False

    @property
    def size(self) -> JobSize:
        return JobSize(self.nodes, self.workers_per_node, self.late_nodes, apart=self.alone)

    @property
    def replaceable(self) -> bool:
        """Whether another coordinator may take this one's place."""
        return self.alone and self.control is not None

    @property
    def module(self) -> str | None:
        """What is run in place of a script."""
        return self.command[1] if self.command[0] == "-m" else None

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of the script or module."""
        return self.command[1 if self.module is None else 2 :]

    @property
    def heartbeat_s(self) -> float:
        return min(LONGEST_PERIOD_S, self.heartbeat_timeout_s / 5, self.notice_timeout_s / 5)


def add_control(add: Callable[..., Any]) -> None:
    """`--control`, of what runs the coordinator."""
    add("--control", metavar="etcd://HOST:PORT,HOST:PORT/RUN", help="also store the coordinator's decisions in this "
        "etcd, under the name RUN; none is carried out before etcd has stored it. Append ?lease=SECONDS to set how "
        "long a silent coordinator keeps its lease, 10 by default (default: only in the run directory)")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `resihp launch`."""
    add = parser.add_argument
    add("--nproc-per-node", metavar="N", help="workers per node, or gpu: one per GPU (default 1)")
    add("--nnodes", metavar="N", help="number of nodes, or MIN:MAX: the job starts with nodes 0 to MIN-1, and "
        "nodes up to MAX-1 may join at any later time (default 1)")  # fmt: skip
    add("--node-rank", type=int, metavar="RANK", help="this node's rank, from 0 (default 0)")
    add("--coordinator", metavar="HOST:PORT", help="address where node 0, or resihp coordinator, serves the "
        "control plane: the same on all nodes, and required with several unless torchrun's flags give it; an IPv6 "
        "address in brackets: [fd00::1]:29400")  # fmt: skip
    add_control(add)
    add("--interface", metavar="NAME", help="network interface that this node's workers use, for gloo and NCCL, such "
        "as eth0 (default: torch chooses)")  # fmt: skip
    add("--run-dir", type=Path, metavar="DIR", help="directory for logs and events, which all "
        f"nodes share (default {RUNS}/DATE-TIME)")  # fmt: skip
    add("--logs", choices=MODES, help="workers' output: file: to RUN_DIR/logs/worker_N.log; prefix: to "
        "standard output, with [wN] before each line; or both (default file)")  # fmt: skip
    for name, default_s, meaning in (
        (
            "heartbeat",
            LaunchOptions.heartbeat_timeout_s,
            "workers and nodes that are silent for this long are declared dead",
        ),
        ("notice", LaunchOptions.notice_timeout_s, "the same for workers once a failure was announced"),
        (
            "survivor",
            LaunchOptions.survivor_timeout_s,
            "survivors that do not report within this time are declared dead",
        ),
        ("connect", LaunchOptions.connect_timeout_s, "how long nodes wait for each other at the start"),
    ):
        add(f"--{name}-timeout", type=float, metavar="SECONDS", help=f"{meaning} (default {default_s:g})")
    add("--max-restarts", type=int, metavar="N", help="restart each dead worker at most N times; the others keep "
        "training, and then admit it (default 0)")  # fmt: skip
    add("--min-workers", type=int, default=LaunchOptions.min_workers, metavar="N", help="if fewer than N workers "
        "survive, they save their state and the job ends (default: go on as long as there is a plan)")  # fmt: skip
    add("--drain-deadline", type=float, default=LaunchOptions.drain_deadline_s, metavar="SECONDS", help="how long "
        "workers that were told to leave, by SIGTERM or resihp drain, may take before they are declared dead (default "
        "%(default)g)")  # fmt: skip
    add("--stand-in", action="store_true", help="train on CPUs, with a stand-in for CUDA")
    torchrun_flags.add_flags(parser)
    add("script", metavar="SCRIPT", help="training script; everything after it is passed to the script")
    add("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def options_of(
    namespace: argparse.Namespace,
    environment: Mapping[str, str] = os.environ,
    count_devices: Callable[[str], int] | None = None,
    is_here: Callable[[str], bool] = can_be_bound,
) -> LaunchOptions:
    """What the parsed arguments, torchrun's among them, and its PET_ variables ask for.

    Args:
        count_devices: how many workers a node has for a word like gpu.
        is_here: whether a host's name is this machine's.

    Raises:
        LaunchError: one of them can't be read.
    """
    try:
        said = torchrun_flags.said(namespace, environment)
        nodes, late_nodes = parse_nodes(said.get("nnodes", "1"))
        meeting = rendezvous_of(said, nodes + late_nodes, environment, is_here)
    except ValueError as error:
        raise LaunchError(str(error)) from None
    seconds = {
        f"{name}_timeout_s": value for name in TIMEOUTS if (value := getattr(namespace, f"{name}_timeout")) is not None
    }
    if meeting.patience_s is not None:
        seconds.setdefault("connect_timeout_s", meeting.patience_s)
    return LaunchOptions(
        command=(*(["-m"] if said.get("module") else []), namespace.script, *namespace.arguments),
        workers_per_node=workers_of(said.get("nproc_per_node", "1"), count_devices or devices),
        nodes=nodes,
        late_nodes=late_nodes,
        node=meeting.node,
        coordinator=_coordinator(namespace) or meeting.address,
        control=control_of(namespace, environment),
        interface=namespace.interface,
        run_dir=namespace.run_dir or _shared_directory(said, nodes + late_nodes, meeting),
        runs=_runs(said),
        logs=namespace.logs or ("both" if _asks_for_any(said.get("tee", "0")) else LaunchOptions.logs),
        max_restarts=said.get("max_restarts", 0),
        min_workers=namespace.min_workers,
        drain_deadline_s=namespace.drain_deadline,
        stand_in=namespace.stand_in,
        **seconds,
    )


def _coordinator(namespace: argparse.Namespace) -> Address | None:
    try:
        return parse_address(namespace.coordinator) if namespace.coordinator else None
    except ValueError as error:
        raise LaunchError(f"--coordinator {error}; give node 0's host name or address and a free port") from None


def control_of(namespace: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Location | None:
    """Where in etcd decisions are to be kept, too; None: nowhere.

    Args:
        environment: may say how etcd lets the job in.

    Raises:
        LaunchError: it can't be read.
    """
    if not namespace.control:
        return None
    try:
        location = parse_location(namespace.control)
    except ValueError as error:
        raise LaunchError(f"--control {error}; give etcd's members and a name for the job") from None
    try:
        return replace(location, access=access_of(environment))
    except ValueError as error:
        raise LaunchError(str(error)) from None


def workers_of(text: str, count: Callable[[str], int]) -> int:
    """How many workers a node has: a number, or one of torchrun's words.

    Raises:
        NoDeviceError: it is a word for GPUs, of which there are none.
        LaunchError: it can't be read.
    """
    if text not in ("gpu", "cpu", "auto"):
        try:
            return int(text)
        except ValueError:
            raise LaunchError(f"--nproc-per-node {text} is not a number; give one, or gpu, cpu or auto") from None
    found = count(text)
    if found < 1:
        raise NoDeviceError(f"--nproc-per-node {text}: this machine shows no GPU; give how many workers each node has")
    return found


def devices(kind: str) -> int:
    """How many workers torchrun would start here for gpu, cpu or auto."""
    import torch

    gpus = torch.cuda.device_count() if kind != "cpu" else 0
    return gpus if gpus or kind == "gpu" else len(os.sched_getaffinity(0))


def _runs(said: Mapping[str, Any]) -> Path:
    """Where new run directories go; torchrun, too, makes one for each job in --log-dir."""
    return Path(said.get("log_dir", RUNS))


def _shared_directory(said: Mapping[str, Any], nodes: int, meeting: Rendezvous) -> Path | None:
    """The directory that nodes which were launched with torchrun's flags find without being told."""
    return _runs(said) / meeting.name if nodes > 1 and meeting.address is not None and meeting.name else None


def _asks_for_any(streams: str) -> bool:
    """torchrun's --tee and --redirects: 0 to 3 for all workers, or RANK:0 to 3 with commas between them."""
    return any(part.rpartition(":")[2].strip() != "0" for part in streams.split(","))


def check(options: LaunchOptions) -> None:
    """Raises LaunchError unless there is a job to launch."""
    if options.workers_per_node < 1:
        raise LaunchError(f"--nproc-per-node {options.workers_per_node} starts no worker; give 1 or more")
    most_nodes = options.size.most_nodes
    if not 0 <= options.node < most_nodes:
        raise LaunchError(f"--node-rank {options.node} is out of range; give 0 to {most_nodes - 1}")
    if most_nodes > 1 and options.coordinator is None:
        raise LaunchError("several nodes need to find each other; give all of them the same --coordinator HOST:PORT")
    if (wrong := interface.problem(options.interface)) is not None:
        raise LaunchError(wrong)
    if options.max_restarts < 0:
        raise LaunchError(f"--max-restarts {options.max_restarts} is not a number of restarts; give 0 or more")
    if not 1 <= options.min_workers <= options.size.workers:
        mend = f"give 1 to {options.size.workers}, the workers at the start"
        raise LaunchError(f"--min-workers {options.min_workers} is invalid; {mend}")
    for name in (*(f"{name}-timeout" for name in TIMEOUTS), "drain-deadline"):
        seconds = getattr(options, f"{name.replace('-', '_')}_s")
        if not 0 < seconds <= LONGEST_WAIT_S:
            mend = f"give more than 0 and at most {LONGEST_WAIT_S:.0f} seconds, a week"
            raise LaunchError(f"--{name} {seconds:g} is invalid; {mend}")
    if most_nodes > 1 and options.run_dir is None:
        raise LaunchError("several nodes need one run directory; give all of them the same --run-dir")
    if options.standby and options.control is None:
        raise LaunchError("--standby reads in etcd what was decided; give the job's --control")
    if options.alone:
        return
    if options.module is not None:
        _check_module(options.module)
        return
    script = Path(options.command[0])
    if not script.is_file():
        raise LaunchError(f"{script} {'is not a file' if script.exists() else 'does not exist'}; give a Python script")


def _check_module(name: str) -> None:
    package = name.partition(".")[0]
    if PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is None:
        raise LaunchError(f"there is no module {package} for -m {name}; give one that Python finds from here")
