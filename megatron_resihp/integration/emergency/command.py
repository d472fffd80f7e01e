# SPDX-License-Identifier: Apache-2.0
"""`resihp emergency`: makes a checkpoint that Megatron loads of what survivors have saved, to people and job scripts.

May import: the standard library, `control.worker` and this package. What needs torch or megatron is imported only where
there is something to join; CPUs stand in for a GPU that Megatron would ask for.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path
from typing import Final

from megatron_resihp.control.worker.saved_state import DIRECTORY, JOINED, flags, newest_state
from megatron_resihp.extras import missing
from megatron_resihp.integration.emergency.contents import Group, found_groups

FAILED: Final = 1
"""There is nothing to go on from."""
EPILOG = """\
A job script that may be started again runs it first, and then asks what is newest:

  resihp emergency "$RUN_DIR" || true
  FOUND=$(resihp checkpoint "$RUN_DIR" --newer-than "$CHECKPOINTS" --flags) || exit
  NEWER=(); [[ -z $FOUND ]] || mapfile -t NEWER <<<"$FOUND"
  resihp launch ... pretrain_gpt.py ... --save "$CHECKPOINTS" --load "$CHECKPOINTS" "${NEWER[@]}"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `resihp emergency`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="run directory of the job whose survivors have saved"
    )


def run(namespace: argparse.Namespace) -> int:
    """Do what the parsed arguments ask; the exit code is 0 if there is a checkpoint, and otherwise 1."""
    run_dir: Path = namespace.run_dir
    groups, loadable = found_groups(run_dir), newest_state(run_dir)
    # What is incomplete may be of a worker that was cut off alone.
    newest = next((group for group in groups if not group.gaps), next(iter(groups), None))
    if newest is None or (loadable is not None and loadable[1] >= newest.iteration):
        if loadable is None:
            return _fail(f"{run_dir / DIRECTORY} holds nothing that survivors have saved whole")
        return _say_loadable(*loadable)
    if gaps := newest.gaps:
        code = _fail(_what_is_missing(newest, gaps, groups[1:]))
        return code if loadable is None else _say_loadable(*loadable)
    if problem := missing(["torch", "megatron.core"]):
        return _fail(problem)
    return _join(newest, run_dir / DIRECTORY / JOINED)


def _join(group: Group, directory: Path) -> int:
    # Megatron names each library that is not installed here, and what it plans for later releases.
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron_resihp import cpu

        cpu.install(force=True)
        from megatron_resihp.integration.emergency.join import join

        try:
            join(group, directory)
        except Exception as error:
            return _fail(f"can't join what survivors have saved: {type(error).__name__}: {error}")
    how = " ".join(flags(directory))
    print(f"joined {len(group.files)} files: the state after iteration {group.iteration:,} can be loaded with {how}")
    return 0


def _say_loadable(directory: Path, iteration: int) -> int:
    print(f"the state after iteration {iteration:,} can be loaded with {' '.join(flags(directory))}")
    return 0


def _what_is_missing(group: Group, gaps: tuple[str, ...], others: list[Group]) -> str:
    few = "; ".join(gaps[:8]) + (f"; and {len(gaps) - 8} more" if len(gaps) > 8 else "")
    also = ", ".join(f"{other.iteration:,}" for other in others)
    more = f"; files of other iterations, epochs or runs are never mixed with these: {also}" if others else ""
    return f"the saved state after iteration {group.iteration:,} lacks: {few}{more}"


def _fail(why: str) -> int:
    print(f"resihp: {why}", file=sys.stderr)
    return FAILED
