# SPDX-License-Identifier: Apache-2.0
"""`resihp simulate`: compares strategies in a scenario of failures on a simulated cluster.

May import: the standard library and this package's modules. Imports modules that need numpy only in `run`, so that the
`resihp` command starts quickly.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_resihp.report.plan.flags import add_uneven_argument

EPILOG = """\
SCENARIO is a JSON file (schema in docs/planning.md) or a published experiment, which --list names:

  resihp simulate fail-stop/llama2-13b/1h
  resihp simulate my-cluster.json --strategies joint oobleck restart --out results

Every strategy runs through the same failures. A table is printed; simulation.txt, simulation.json and
throughput.png go to --out.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `resihp simulate`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("scenario", nargs="?", metavar="SCENARIO", help="a JSON file, or a published experiment")
    parser.add_argument("--list", action="store_true", help="list the published experiments")
    parser.add_argument(
        "--strategies", nargs="+", default=[], metavar="NAME", help="strategies to compare (default: all)"
    )
    parser.add_argument("--orders", type=int, metavar="N", help="random orders of failures (default 1)")
    parser.add_argument(
        "--micro-batches", type=int, default=64, metavar="N",
        help="micro-batches of a global batch in published experiments (default 64)",
    )  # fmt: skip
    parser.add_argument("--free", action="store_true", help="let strategies choose the layout at the start, too")
    parser.add_argument("--measure-planning", action="store_true", help="charge planning times as measured here")
    parser.add_argument(
        "--second-step", choices=("auto", "always", "never"), default="auto",
        help="whether joint asks other strategies and tunes pipelines, which takes most of its time: always (as in a "
        "job: up to 512 workers), never, or auto (up to 64; the default)",
    )  # fmt: skip
    add_uneven_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("resihp-simulation"),
        metavar="DIR",
        help="directory for the results (default %(default)s)",
    )
    parser.set_defaults(parser=parser)


def run(namespace: argparse.Namespace) -> int:
    """Run the command with parsed arguments; the exit code is 0, or 2 for bad or no input.

    `namespace.published` gives the published experiments, which are not part of this package.
    """
    if namespace.scenario is None and not namespace.list:
        namespace.parser.print_help()
        return 2
    from megatron_resihp.report.simulate.simulation import BadInput, simulate

    try:
        simulate(namespace, namespace.published())
    except BadInput as error:
        print(f"resihp: {error}", file=sys.stderr)
        return 2
    return 0
