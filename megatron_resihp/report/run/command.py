# SPDX-License-Identifier: Apache-2.0
"""`resihp report RUN_DIR`: read a run's events and print, dump or draw a summary.

May import: the standard library, rich, `control.commands.contact` and this package's modules; matplotlib only for
--plot.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from megatron_resihp.events.log import FILE_NAME, read_events
from megatron_resihp.report.drawing import drawing
from megatron_resihp.report.run.check import faults
from megatron_resihp.report.run.run_summary import REORDERED
from megatron_resihp.report.run.standing import launcher_of, with_last_save, with_standing
from megatron_resihp.report.run.summary import RunSummary, summarize_log, with_reference


class _BadInput(Exception):
    """Bad input from the user; the message is "cause; remedy"."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `resihp report`."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help=f"directory of a run, with its {FILE_NAME}")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw loss and throughput to this file")
    parser.add_argument(
        "--reference", type=Path, metavar="RUN_DIR", action="append", default=[],
        help="a run without failures to compare the loss with. With several, of the same job with different "
        "data-parallel degrees, --check allows twice the difference among them, which only the order of sums causes",
    )  # fmt: skip
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit with 1 unless the run reached its last iteration, each sample was recorded once and in its place "
        "and, with --reference, each iteration's loss differs by at most "
        f"{REORDERED:g}, relatively, or by the bound from several references",
    )


def run(namespace: argparse.Namespace) -> int:
    """Run the command with parsed arguments; the exit code is 0, 1 if --check found faults, or 2 for bad input."""
    try:
        summary = _report(namespace)
    except _BadInput as error:
        print(f"resihp: {error}", file=sys.stderr)
        return 2
    found = faults(summary) if namespace.check else []
    if found:
        print(f"resihp: check failed: {'; '.join(found)}", file=sys.stderr)
    return 1 if found else 0


def _report(namespace: argparse.Namespace) -> RunSummary:
    summary = _load(namespace.run_dir)
    references = [_load(path) for path in namespace.reference]
    reference = references[0] if references else None
    if references:
        summary = with_reference(summary, *references)
    if namespace.plot:
        _draw(summary, reference, namespace.plot)
    if namespace.json:
        print(json.dumps(summary.to_json(), indent=2, allow_nan=False))
    else:
        _render(summary)
    return summary


def _load(run_dir: Path) -> RunSummary:
    path = run_dir / FILE_NAME
    if not run_dir.is_dir():
        raise _BadInput(f"{run_dir} is not a directory; give the run directory that `resihp launch` was told to use")
    try:
        found = read_events(path)
    except FileNotFoundError:
        raise _BadInput(f"{run_dir} has no {FILE_NAME}; give the run directory of a started run") from None
    except OSError as error:
        raise _BadInput(f"{path} cannot be read ({error.strerror}); fix that and try again") from None
    unreadable = len(found.malformed) + found.truncated
    if not found.events and not found.ignored:
        state = f"holds nothing but {unreadable} unreadable line(s)" if unreadable else "is empty"
        raise _BadInput(f"{path} {state}; give the run directory of a started run")
    summary = with_standing(summarize_log(found), launcher_of(run_dir), time.time())
    return with_last_save(summary, run_dir)


def _draw(summary: RunSummary, reference: RunSummary | None, path: Path) -> None:
    if not summary.loss and not summary.samples_per_second:
        raise _BadInput("no iteration of this run was completed, so there is nothing to draw; leave out --plot")
    try:
        from megatron_resihp.report.run.picture import draw
    except ImportError:
        raise _BadInput("--plot needs matplotlib, which is not installed; pip install matplotlib") from None
    with drawing(path, _BadInput):
        draw(summary, reference, path)


def _render(summary: RunSummary) -> None:
    from megatron_resihp.report.console import console_for
    from megatron_resihp.report.run.terminal import render

    render(summary, console_for(sys.stdout))
