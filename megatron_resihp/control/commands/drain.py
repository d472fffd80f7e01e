# SPDX-License-Identifier: Apache-2.0
"""`resihp drain`: takes nodes or workers out of a running job gracefully.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from megatron_resihp.control.commands import contact
from megatron_resihp.protocol.messages import DrainRequest

EPILOG = """\
The workers finish the iteration. The others go on without them, by a change of plan. A node's launcher then ends with
0. If there is no plan without them, the whole job ends gracefully, and is saved if it has --save.

  resihp drain runs/my-run node:1
  resihp drain runs/my-run worker:5 worker:6 --deadline 60
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `resihp drain`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory of the job")
    parser.add_argument(
        "leaving",
        nargs="+",
        type=_named,
        metavar="node:RANK|worker:ID",
        help="nodes or workers to take out; not node 0 if it runs the coordinator",
    )
    parser.add_argument(
        "--deadline", type=_seconds, metavar="SECONDS", help="how long they may take to leave before they are "
        "declared dead (default: the --drain-deadline that the job was launched with)"
    )  # fmt: skip


def run(namespace: argparse.Namespace) -> int:
    """Do what the parsed arguments ask; the exit code is 0, or 2 where nothing is changed."""
    nodes, workers = (
        tuple(sorted({number for kind, number in namespace.leaving if kind == wanted})) for wanted in ("node", "worker")
    )
    return contact.settle(namespace.run_dir, DrainRequest(nodes, workers, namespace.deadline), "resihp drain")


def _named(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"(node|worker):(\d{1,9})", text, re.ASCII)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing; give node:RANK or worker:ID")
    return found[1], int(found[2])


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a time; give seconds, more than 0")
    return seconds
