# SPDX-License-Identifier: Apache-2.0
"""`resihp inject`: slows workers and links of a running job from outside.

May import: `config`, the standard library and this package's modules.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_resihp.config import ConfigError, Slowdown, factor_of
from megatron_resihp.control.commands import contact
from megatron_resihp.control.commands.launch.launch_options import RUNS
from megatron_resihp.control.transport.sockets import StoreError
from megatron_resihp.control.transport.store.store import Store
from megatron_resihp.protocol.messages import SlowdownRequest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `resihp inject`."""
    kinds = parser.add_subparsers(dest="kind", metavar="slow | link | clear", required=True)
    slow = kinds.add_parser("slow", help="slow a worker down")
    slow.add_argument("workers", nargs=1, type=_worker, metavar="WORKER", help="worker id")
    slow.add_argument("factor", metavar="SPEED", help="speed relative to its own, in (0, 1]; 1 ends it")
    link = kinds.add_parser("link", help="slow a link down; needs the emulated clock")
    link.add_argument("workers", nargs=2, type=_worker, metavar="WORKER", help="ids of the workers at its ends")
    link.add_argument("factor", metavar="FACTOR", help="bandwidth relative to its own, in (0, 1]; 1 ends it")
    clear = kinds.add_parser("clear", help="end all slowdowns")
    clear.set_defaults(workers=[], factor="1")
    for kind in (slow, link, clear):
        meaning = f"run directory of the job (default: the newest running job's in {RUNS})"
        kind.add_argument("--run-dir", type=Path, metavar="DIR", help=meaning)


def run(namespace: argparse.Namespace) -> int:
    """Do what the parsed arguments ask; returns the exit code."""
    try:
        slowdown = Slowdown(tuple(namespace.workers), factor_of(namespace.factor))
        store = contact.reach(namespace.run_dir) if namespace.run_dir else _reach_newest(RUNS)
        answer = contact.ask(store, SlowdownRequest(slowdown.workers, slowdown.factor), "resihp inject")
    except (ConfigError, StoreError, TimeoutError) as error:
        print(f"resihp: {error}", file=sys.stderr)
        return 2
    return contact.say(answer)


def _worker(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a worker id")
    return int(text)


def _reach_newest(runs: Path) -> Store:
    """The store of the newest job that runs; a job that was killed leaves its file behind."""
    for name in sorted((path.parent.name for path in runs.glob(f"*/{contact.FILE_NAME}")), reverse=True):
        try:
            return contact.reach(runs / name)
        except StoreError:
            continue
    raise StoreError(f"no job runs in {runs}; give --run-dir")
