# SPDX-License-Identifier: Apache-2.0
"""What `resihp launch` is told: its arguments, and what is wrong with them.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron_resihp.control.commands.torchrun_flags import add_refusals, add_spellings
from megatron_resihp.control.job_size import JobSize, parse_nodes
from megatron_resihp.control.node.output import MODES
from megatron_resihp.control.transport.address import Address, parse_address

RUNS: Final = Path("resihp-runs")
LONGEST_PERIOD_S: Final = 1.0
"""Between two heartbeats."""
LONGEST_WAIT_S: Final = 7 * 24 * 3600.0
"""Sockets can't be told to wait for more than some weeks."""


class LaunchError(Exception):
    """The user has to mend something; the message is "cause; mend"."""


@dataclass(frozen=True)
class LaunchOptions:
    """What a job is launched with. Times are in seconds.

    Attributes:
        command: the script and its arguments.
        nodes, late_nodes, workers_per_node: see `JobSize`.
        node: this one's rank.
        coordinator: where node 0 serves the store; None: on this machine only, at a free port.
        logs: one of output.MODES.
        heartbeat_timeout_s: workers and nodes that are silent for longer are given up for dead.
        survivor_timeout_s: survivors that do not report for longer are given up for dead.
        connect_timeout_s: how long nodes wait for each other at the start.
        max_restarts: how often a worker that died is started anew, at most.
        stand_in: train on CPUs in place of GPUs.
    """

    command: tuple[str, ...]
    workers_per_node: int = 1
    nodes: int = 1
    late_nodes: int = 0
    node: int = 0
    coordinator: Address | None = None
    run_dir: Path | None = None
    logs: str = "file"
    heartbeat_timeout_s: float = 30.0
    survivor_timeout_s: float = 60.0
    connect_timeout_s: float = 300.0
    max_restarts: int = 0
    stand_in: bool = False

    @property
    def size(self) -> JobSize:
        return JobSize(self.nodes, self.workers_per_node, self.late_nodes)

    @property
    def heartbeat_s(self) -> float:
        return min(LONGEST_PERIOD_S, self.heartbeat_timeout_s / 5)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `resihp launch`."""
    add = parser.add_argument
    add("--nproc-per-node", type=_workers, default=1, metavar="N", help="workers on each node (default 1)")
    add("--nnodes", default="1", metavar="N", help="nodes of the job, or MIN:MAX: it begins with nodes 0 to MIN-1, and "
        "the others up to MAX-1 may be launched at any later time and join it (default 1)")  # fmt: skip
    add("--node-rank", type=int, default=0, metavar="RANK", help="this node's rank, from 0 (default 0)")
    add("--coordinator", metavar="HOST:PORT", help="where node 0 serves the control plane; needed for several nodes")
    add("--run-dir", type=Path, metavar="DIR", help=f"logs and events go here (default {RUNS}/DATE-TIME)")
    add("--logs", choices=MODES, default="file", help="workers' output: RUN_DIR/logs/worker_N.log, or lines marked "
        "[wN] on standard output, or both (default file)")  # fmt: skip
    for name, default_s, meaning in (
        ("heartbeat", 30.0, "give up workers and nodes that are silent for longer"),
        ("survivor", 60.0, "give up survivors of a failure that do not report for longer"),
        ("connect", 300.0, "how long nodes wait for each other at the start"),
    ):
        meaning += f" (default {default_s:g})"
        add(f"--{name}-timeout", type=float, default=default_s, metavar="SECONDS", help=meaning)
    add("--max-restarts", type=int, default=0, metavar="N", help="start each worker that died anew at most N times; "
        "the others train on meanwhile and then take it in (default 0)")  # fmt: skip
    add("--stand-in", action="store_true", help="train on CPUs, with a stand-in for CUDA")
    add_spellings(parser, {"nproc_per_node": _workers, "node_rank": int, "max_restarts": int})
    add_refusals(parser)
    add("script", metavar="SCRIPT", help="training script; all that follows belongs to it")
    add("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _workers(text: str) -> int:
    """A number; torchrun takes words too."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; give how many workers each node is to have") from None


def options_of(namespace: argparse.Namespace) -> LaunchOptions:
    """What the parsed arguments ask for.

    Raises:
        LaunchError: one of them can't be read.
    """
    try:
        coordinator = parse_address(namespace.coordinator) if namespace.coordinator else None
    except ValueError as error:
        raise LaunchError(f"--coordinator {error}; give node 0's host name or address and a free port") from None
    try:
        nodes, late_nodes = parse_nodes(namespace.nnodes)
    except ValueError as error:
        raise LaunchError(str(error)) from None
    return LaunchOptions(
        command=(namespace.script, *namespace.arguments),
        workers_per_node=namespace.nproc_per_node,
        nodes=nodes,
        late_nodes=late_nodes,
        node=namespace.node_rank,
        coordinator=coordinator,
        run_dir=namespace.run_dir,
        logs=namespace.logs,
        heartbeat_timeout_s=namespace.heartbeat_timeout,
        survivor_timeout_s=namespace.survivor_timeout,
        connect_timeout_s=namespace.connect_timeout,
        max_restarts=namespace.max_restarts,
        stand_in=namespace.stand_in,
    )


def check(options: LaunchOptions) -> None:
    """Raises LaunchError unless there is a job to launch."""
    if options.workers_per_node < 1:
        raise LaunchError(f"--nproc-per-node {options.workers_per_node} starts no worker; give 1 or more")
    most_nodes = options.size.most_nodes
    if not 0 <= options.node < most_nodes:
        raise LaunchError(f"--node-rank {options.node} is out of range; give 0 to {most_nodes - 1}")
    if most_nodes > 1 and options.coordinator is None:
        raise LaunchError("several nodes need to find each other; give all of them the same --coordinator HOST:PORT")
    if options.max_restarts < 0:
        raise LaunchError(f"--max-restarts {options.max_restarts} is no number of restarts; give 0 or more")
    for name in ("heartbeat", "survivor", "connect"):
        seconds = getattr(options, f"{name}_timeout_s")
        if not 0 < seconds <= LONGEST_WAIT_S:
            mend = f"give more than 0 and at most {LONGEST_WAIT_S:.0f} seconds, a week"
            raise LaunchError(f"--{name}-timeout {seconds:g} can't be; {mend}")
    if most_nodes > 1 and options.run_dir is None:
        raise LaunchError("several nodes need one run directory; give all of them the same --run-dir")
    script = Path(options.command[0])
    if not script.is_file():
        raise LaunchError(f"{script} {'is no file' if script.exists() else 'does not exist'}; give a Python script")
