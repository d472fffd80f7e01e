# SPDX-License-Identifier: Apache-2.0
"""`resihp stop`: ends a running job gracefully.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_resihp.control.commands import contact
from megatron_resihp.protocol.messages import EndRequest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `resihp stop`."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory of the job")
    parser.add_argument(
        "--save", action="store_true", help="end it only if that saves its state: a job without Megatron's --save goes "
        "on, and one line says so"
    )  # fmt: skip


def run(namespace: argparse.Namespace) -> int:
    """Do what the parsed arguments ask; the exit code is 0, or 2 where nothing is changed."""
    return contact.settle(namespace.run_dir, EndRequest(namespace.save), "resihp stop")
