# SPDX-License-Identifier: Apache-2.0
"""`resihp health`: says whether a node is fit to join a job.

May import: the standard library, `control.commands` and this package's modules; torch only where it is run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Final

from megatron_resihp.control.commands.launch import interface, launch_options
from megatron_resihp.control.commands.launch.launch_options import LaunchError
from megatron_resihp.control.terminal import say, warn
from megatron_resihp.health import measures
from megatron_resihp.health.findings import Measured, problems

EPILOG: Final = """\
Run it on each node before `resihp launch`. It starts one process per worker; each tests its GPU, and together they sum
over all GPUs. The exit code is 0 if the node is fit, 1 if it isn't (one line per reason), and 2 if nothing was tested.

  resihp health --nproc-per-node gpu --run-dir /shared/runs/my-run
"""
FIT, UNFIT, REFUSED = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `resihp health`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--nproc-per-node", default="gpu", metavar="N", help="workers on this node, or gpu: one per GPU (default gpu)")
    add("--run-dir", type=Path, metavar="DIR", help="run directory of the job, or one on the same file system: also "
        "checks its free space, and this node's clock against the file system's")  # fmt: skip
    add("--interface", metavar="NAME", help="network interface that workers will use (default: torch chooses)")
    add("--min-free-gib", type=float, default=1.0, metavar="GIB", help="free space that /dev/shm, the temporary "
        "directory and the run directory must have (default 1)")  # fmt: skip
    add(
        "--timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="limit for the tests of GPUs and sums (default 120)",
    )
    add("--stand-in", action="store_true", help="test CPUs in place of GPUs")
    add("--json", action="store_true", help="print what was measured, and the problems, as JSON")


def run(namespace: argparse.Namespace) -> int:
    """Do what the parsed arguments ask; returns the exit code."""
    try:
        workers = _workers(namespace)
    except LaunchError as error:
        warn(f"resihp: {error}")
        return REFUSED
    measured = _measure(namespace, workers)
    found = problems(measured, namespace.min_free_gib)
    if namespace.json:
        say(json.dumps({"fit": not found, "problems": found, **asdict(measured)}))
    else:
        for problem in found:
            warn(f"resihp: this node is unfit: {problem}")
        if not found:
            say(f"resihp: this node is fit for {workers} worker{'s' if workers > 1 else ''}")
    return UNFIT if found else FIT


def _workers(namespace: argparse.Namespace) -> int:
    """How many there are to be; LaunchError if that can't be, or there is no such interface."""
    kind = namespace.nproc_per_node
    workers = launch_options.workers_of(kind, launch_options.devices)
    if workers < 1:
        raise LaunchError(f"--nproc-per-node {kind} is not a number of workers; give at least 1")
    if (problem := interface.problem(namespace.interface)) is not None:
        raise LaunchError(problem)
    if namespace.run_dir is not None and not namespace.run_dir.is_dir():
        raise LaunchError(f"--run-dir {namespace.run_dir} is not a folder; make it, or give another")
    return workers


def _measure(namespace: argparse.Namespace, workers: int) -> Measured:
    devices = None if namespace.stand_in else launch_options.devices("gpu")
    enough = devices is None or devices >= workers
    network = interface.variables(namespace.interface)
    peers = measures.loop(workers if enough else 0, not namespace.stand_in, namespace.timeout, network)
    run_dir: Path | None = namespace.run_dir
    folders = [measures.SHARED_MEMORY, Path(tempfile.gettempdir()), *([] if run_dir is None else [run_dir])]
    return Measured(
        workers, devices, peers, tuple(map(measures.folder, folders)),
        None if run_dir is None else measures.clock_offset_s(run_dir),
    )  # fmt: skip
