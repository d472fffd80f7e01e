# SPDX-License-Identifier: Apache-2.0
"""`resihp checkpoint`: says how to go on from what survivors have saved, to people and to job scripts.

May import: the standard library, `exit_codes` and `saved_state`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from megatron_resihp.control import exit_codes
from megatron_resihp.control.worker.saved_state import (
    DIRECTORY,
    NON_PERSISTENT,
    TRACKER,
    files_of_parameters,
    flags,
    last_save,
    latest_in,
    newest_state,
)

NOTHING: Final = 1
"""There is nothing to go on from."""
RELEASE: Final = "release"
"""What Megatron's tracker says of weights without an iteration."""
EPILOG = """\
A job script that may be started again adds the flags to those of the job, whose --load is overruled:

  resihp emergency "$RUN_DIR" || (($? == 1)) || exit 2
  FOUND=$(resihp checkpoint "$RUN_DIR" --newer-than "$CHECKPOINTS" --flags) || exit
  NEWER=(); [[ -z $FOUND ]] || mapfile -t NEWER <<<"$FOUND"
  resihp launch ... pretrain_gpt.py ... --save "$CHECKPOINTS" --load "$CHECKPOINTS" "${NEWER[@]}"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `resihp checkpoint`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory of a job, begun or not")
    parser.add_argument(
        "--newer-than",
        type=Path,
        metavar="CHECKPOINTS",
        help="only a state that is later than the last checkpoint in this directory, non-persistent ones included",
    )
    parser.add_argument(
        "--flags",
        action="store_true",
        help="print the Megatron flags to add, one per line, or nothing; ends with 0, "
        "or with 2 if the last checkpoint's tracker can't be read",
    )


def run(namespace: argparse.Namespace) -> int:
    """Do what the parsed arguments ask; the exit code is 0, 1 if there is nothing to go on from, 2 if nobody knows."""
    found = newest_state(namespace.run_dir)
    if found is None:
        return _nothing(namespace, _why_none(namespace.run_dir))
    for checkpoints in _checkpoints(namespace.newer_than):
        last = latest_in(checkpoints)
        if last is None and not _is_empty(checkpoints):
            tracker = checkpoints / TRACKER
            print(f"resihp: {tracker} can't be read, so which state is newer is unknown; fix it", file=sys.stderr)
            return exit_codes.REFUSED
        if last is not None and found[1] <= last:
            return _nothing(namespace, f"{checkpoints} has iteration {last:,}, survivors saved {found[1]:,}")
    directory, iteration = found
    words = flags(directory)
    if namespace.flags:
        print(*words, sep="\n")
        print(f"resihp: goes on from {directory}, saved by survivors after iteration {iteration:,}", file=sys.stderr)
    else:
        print(f"the state after iteration {iteration:,} is saved, all of it; go on from it with {' '.join(words)}")
    return 0


def _checkpoints(directory: Path | None) -> tuple[Path, ...]:
    """Where a later start without the survivors' state finds what it goes on from."""
    return () if directory is None else (directory, directory / NON_PERSISTENT)


def _why_none(run_dir: Path) -> str:
    """Why a start can't load anything of what survivors have saved, in one line."""
    partial = last_save(run_dir, since=0.0)
    if partial is not None:
        return partial.told(run_dir)
    by_parameter = files_of_parameters(run_dir)
    more = f"; make a checkpoint of it with resihp emergency {run_dir}" if by_parameter else ""
    return f"{run_dir / DIRECTORY} holds no complete state that can be loaded{more}"


def _is_empty(checkpoints: Path) -> bool:
    """Whether there is no checkpoint of an iteration for sure: no tracker, or that of weights without one."""
    try:
        return (checkpoints / TRACKER).read_text().strip() == RELEASE
    except FileNotFoundError:
        return True
    except (OSError, UnicodeDecodeError):
        return False


def _nothing(namespace: argparse.Namespace, why: str) -> int:
    if namespace.flags:
        return 0
    print(f"resihp: {why}", file=sys.stderr)
    return NOTHING
