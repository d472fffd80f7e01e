# SPDX-License-Identifier: Apache-2.0
"""`resihp apply`: asks a running job to take a given plan.

May import `plan` and this package's modules.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_resihp.control.commands import contact
from megatron_resihp.plan import PlanError
from megatron_resihp.plan.files import read_plan
from megatron_resihp.protocol.messages import PlanRequest

EPILOG = """\
The plan says which worker works where; other live workers become standbys. PLAN.json holds a plan as events and
proposals do, or is what `resihp plan --json` prints:

  resihp plan runs/my-run --slow 5=0.5 --json > plan.json
  resihp apply runs/my-run plan.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `resihp apply`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory of the job")
    parser.add_argument("plan", type=Path, metavar="PLAN.json", help="the plan to change to")
    parser.add_argument("--strategy", metavar="NAME", help="whose plan, where the file has those of several strategies")


def run(namespace: argparse.Namespace) -> int:
    """Do what the parsed arguments ask; the exit code is 0, or 2 where nothing is changed."""
    try:
        plan = read_plan(namespace.plan, namespace.strategy)
    except PlanError as error:
        print(f"resihp: {error}", file=sys.stderr)
        return 2
    request = PlanRequest(plan, f"asked for by hand: {namespace.plan.name}")
    return contact.settle(namespace.run_dir, request, "resihp apply")
