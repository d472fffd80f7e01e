# SPDX-License-Identifier: Apache-2.0
"""`resihp plan`: the next plan for a job whose workers are dead or slow.

May import: the standard library and this package's modules. Imports modules that need numpy only in `run`, so that the
`resihp` command starts quickly.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Final

from megatron_resihp.report.plan.flags import add_health_arguments, add_size_arguments, add_uneven_argument

WORKERS: Final = re.compile(r"[\d,=.–-]+")
"""The form of values of --dead, --slow and --link, valid or not."""

EPILOG = """\
RUN_DIR is the run directory of a job that was started with `resihp launch` and --resihp: its last plan is in force, its
flags give the sizes, and layers take as long as it has measured or emulates. Without a run their times follow from
FLOPs and the devices' peak, so that ratios say more than seconds do.

  resihp plan --model llama2-13b --gpus 32 --tp 4 --pp 4 --slow 5=0.5 --compare
  resihp plan --model llama2-70b --gpus 256 --tp 4 --pp 16 --dead 8-15 40 --plot timelines.png
  resihp plan --model mixtral-8x7b --gpus 64 --tp 2 --pp 4 --ep 4 --dead 9 --sequence-parallel --distributed-optimizer
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `resihp plan`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("run_dir", type=Path, nargs="?", metavar="RUN_DIR", help="a run, instead of sizes by flags")
    add_size_arguments(parser)
    add_health_arguments(parser)
    what = parser.add_argument_group("what is wanted")
    what.add_argument("--strategy", metavar="NAME", help="which strategy plans (default: joint; --compare shows all; "
                      "with --cp or --ep: by-speed)")  # fmt: skip
    what.add_argument("--compare", action="store_true", help="ask all strategies, and show the best plan")
    add_uneven_argument(what)
    what.add_argument("--json", action="store_true", help="print JSON instead of tables")
    what.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the timelines before and after")
    parser.set_defaults(parser=parser)


def _run_dir_after_workers(namespace: argparse.Namespace) -> Path | None:
    """RUN_DIR, if it follows a flag that takes any number of words and was read as one of them."""
    for words in (namespace.dead, namespace.slow, namespace.link):
        if words and (Path(words[-1]).is_dir() or WORKERS.fullmatch(words[-1]) is None):
            return Path(words.pop())
    return None


def run(namespace: argparse.Namespace) -> int:
    """Run the command with parsed arguments; the exit code is 0, 1 without a plan, or 2 for bad or no input.

    `namespace.baselines` gives strategies for comparison, which are not part of this package.
    """
    if namespace.run_dir is None and namespace.model is None and namespace.gpus is None:
        namespace.run_dir = _run_dir_after_workers(namespace)
    if namespace.run_dir is None and namespace.model is None and namespace.gpus is None:
        namespace.parser.print_help()
        return 2
    from megatron_resihp.report.plan.planning import BadInput, plan

    try:
        return plan(namespace)
    except BadInput as error:
        print(f"resihp: {error}", file=sys.stderr)
        return 2
