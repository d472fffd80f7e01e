# SPDX-License-Identifier: Apache-2.0
"""`resihp detect`: run the detector over a recorded run, or over a table of iteration times.

May import: the standard library, `config` and this package's modules. Imports modules that need numpy only in `run`, so
that the `resihp` command starts quickly.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_resihp.config import FALSE_ALARMS_PER_JOB
from megatron_resihp.detector.settings import Settings
from megatron_resihp.report.detect import PICTURE_NAME, VERDICTS_NAME

EPILOG = f"""\
RUN_DIR is the run directory of a job that was started with `resihp launch` and --resihp.

FILE needs a column `seconds`; `iteration`, `worker`, `tokens` (N, tokens of the iteration) and `squares` (sum of
squared document lengths) may be there too. Without `worker` each line is the whole job's iteration, and all that can
be said is that some worker is slow. With `tokens` and `squares`, long documents are not mistaken for slow workers:

  iteration,worker,seconds,tokens,squares
  1,0,0.512,8192,9437184
  1,1,0.498,8192,7340032

Verdicts are printed and written to {VERDICTS_NAME}; {PICTURE_NAME} shows observed against predicted time.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `resihp detect`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("source", type=Path, nargs="?", metavar="RUN_DIR|FILE", help="a run, or a .csv or .jsonl file")
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory for the results (default: beside the input)")
    parser.add_argument(
        "--false-alarms-per-job", type=float, metavar="RATE",
        help=f"false alarms accepted in a job (default: the job's own setting, or {FALSE_ALARMS_PER_JOB})",
    )  # fmt: skip
    parser.add_argument(
        "--warm-up", type=int, metavar="N", default=Settings.warm_up,
        help="iterations to learn from (default %(default)s); tables without workers need none",
    )  # fmt: skip
    parser.set_defaults(parser=parser)


def run(namespace: argparse.Namespace) -> int:
    """Run the command with parsed arguments; the exit code is 0, or 2 for bad or no input."""
    if namespace.source is None:
        namespace.parser.print_help()
        return 2
    from megatron_resihp.report.console import console_for
    from megatron_resihp.report.detect.detection import BadInput, detect, write
    from megatron_resihp.report.detect.terminal import render

    try:
        found = detect(namespace.source, namespace.false_alarms_per_job, namespace.warm_up)
        write(found, namespace.out or (found.source if found.source.is_dir() else found.source.parent))
    except BadInput as error:
        print(f"resihp: {error}", file=sys.stderr)
        return 2
    render(found, console_for(sys.stdout))
    return 0
