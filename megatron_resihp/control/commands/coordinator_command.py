# SPDX-License-Identifier: Apache-2.0
"""`resihp coordinator`: runs the coordinator alone, without workers, so that the job outlives any of its nodes.

May import: the standard library and this package's modules. Where events go is handed in.
"""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from megatron_resihp.control.commands.launch import launcher
from megatron_resihp.control.commands.launch.launch_options import LaunchError, LaunchOptions, add_control, control_of
from megatron_resihp.control.commands.launch.rendezvous import C10D, PORTS
from megatron_resihp.control.commands.launch.seat import MakeEventSink
from megatron_resihp.control.job_size import parse_nodes
from megatron_resihp.control.transport.address import Address, parse_address


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `resihp coordinator`."""
    add, usual = parser.add_argument, LaunchOptions
    add("--listen", metavar="HOST:PORT", help="address of this machine where the nodes reach the coordinator: "
        f"their --coordinator (default: this host's name, port {PORTS[C10D]})")  # fmt: skip
    add("--nnodes", required=True, metavar="N", help="number of nodes, or MIN:MAX, as for resihp launch")
    add("--nproc-per-node", type=int, default=1, metavar="N", help="workers per node (default 1)")
    add("--run-dir", type=Path, required=True, metavar="DIR", help="directory for logs and events, which all "
        "nodes share")  # fmt: skip
    add_control(add)
    add("--standby", action="store_true", help="wait until the coordinator of the job that --control names is "
        "lost, then take its place")  # fmt: skip
    for name, default_s, meaning in (
        ("heartbeat", usual.heartbeat_timeout_s, "nodes that are silent for this long are declared dead"),
        ("survivor", usual.survivor_timeout_s, "survivors that do not report within this time are declared dead"),
        (
            "connect",
            usual.connect_timeout_s,
            "how long to wait for the nodes at the start, or, as a standby, for a coordinator",
        ),
    ):
        add(f"--{name}-timeout", type=float, default=default_s, metavar="SECONDS",
            help=f"{meaning} (default %(default)g)")  # fmt: skip
    add("--min-workers", type=int, default=usual.min_workers, metavar="N", help="if fewer than N workers survive, "
        "they save their state and the job ends (default: go on as long as there is a plan)")  # fmt: skip
    add("--drain-deadline", type=float, default=usual.drain_deadline_s, metavar="SECONDS", help="how long "
        "workers that were told to leave, by SIGTERM or resihp drain, may take before they are declared dead (default "
        "%(default)g)")  # fmt: skip


def options_of(namespace: argparse.Namespace) -> LaunchOptions:
    """What the parsed arguments ask for.

    Raises:
        LaunchError: one of them can't be read.
    """
    try:
        nodes, late_nodes = parse_nodes(namespace.nnodes)
    except ValueError as error:
        raise LaunchError(str(error)) from None
    return LaunchOptions(
        command=(),
        workers_per_node=namespace.nproc_per_node,
        nodes=nodes,
        late_nodes=late_nodes,
        coordinator=_listen_at(namespace.listen),
        control=control_of(namespace),
        alone=True,
        standby=namespace.standby,
        run_dir=namespace.run_dir,
        heartbeat_timeout_s=namespace.heartbeat_timeout,
        survivor_timeout_s=namespace.survivor_timeout,
        connect_timeout_s=namespace.connect_timeout,
        min_workers=namespace.min_workers,
        drain_deadline_s=namespace.drain_deadline,
    )


def _listen_at(text: str | None) -> Address:
    if text is None:
        return Address(socket.gethostname(), PORTS[C10D])
    try:
        return parse_address(text)
    except ValueError as error:
        raise LaunchError(f"--listen {error}; give an address of this machine and a free port") from None


def run(namespace: argparse.Namespace, make_event_sink: MakeEventSink) -> int:
    """Run the coordinator until the job is over; returns the job's exit code."""
    try:
        options = options_of(namespace)
    except LaunchError as error:
        return launcher.refuse(str(error))
    return launcher.launch(options, make_event_sink=make_event_sink)
