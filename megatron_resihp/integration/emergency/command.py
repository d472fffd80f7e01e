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

from megatron_resihp.control.worker.saved_state import (
    DIRECTORY,
    JOINED,
    Source,
    flags,
    newest_state,
    source_of,
    states,
)
from megatron_resihp.extras import missing
from megatron_resihp.integration.emergency.contents import Group, found_groups

NOTHING: Final = 1
"""There is nothing to go on from."""
CANT_JOIN: Final = 2
"""There is, and it can't be used here and now. To go on from something older would train iterations twice."""
EPILOG = """\
A job script that may be started again runs it first, and then asks what is newest:

  resihp emergency "$RUN_DIR" || (($? == 1)) || exit 2
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
    """Do what the parsed arguments ask; the exit code is 0 if there is a checkpoint, 1 if there is none, and 2 if what
    is there can't be made one."""
    run_dir: Path = namespace.run_dir
    groups, loadable = found_groups(run_dir), newest_state(run_dir)
    # What is incomplete may be of a worker that was cut off alone.
    newest = next((group for group in groups if not group.gaps), next(iter(groups), None))
    if newest is None or (loadable is not None and not _is_newer(newest, *loadable)):
        if loadable is None:
            return _fail(f"{run_dir / DIRECTORY} holds nothing that survivors have saved whole")
        return _say_loadable(*loadable, _saved(groups, run_dir))
    if gaps := newest.gaps:
        code = _fail(_what_is_missing(newest, gaps, groups[1:]))
        return code if loadable is None else _say_loadable(*loadable, _saved(groups, run_dir))
    if problem := missing(["torch", "megatron.core"]):
        return _fail(problem, CANT_JOIN)
    return _join(newest, run_dir / DIRECTORY / JOINED, _saved(groups, run_dir))


def _is_newer(group: Group, directory: Path, iteration: int) -> bool:
    """Whether files of parameters are newer than a state that can be loaded: of a later iteration, or of the same one
    and saved later, as by a run that has repeated it."""
    return (group.iteration, group.source.saved_at) > (iteration, source_of(directory, iteration).saved_at)


def _saved(groups: list[Group], run_dir: Path) -> list[tuple[Source, int]]:
    """All that survivors have saved, with its iteration. What was joined is of the same files."""
    by_parameter = [(group.source, group.iteration) for group in groups]
    return by_parameter + [(source_of(*each), each[1]) for each in states(run_dir) if each[0].name != JOINED]


def _join(group: Group, directory: Path, saved: list[tuple[Source, int]]) -> int:
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
            return _fail(f"can't join what survivors have saved: {type(error).__name__}: {error}", CANT_JOIN)
    how = " ".join(flags(directory))
    print(f"joined {len(group.files)} files: the state after iteration {group.iteration:,} can be loaded with {how}")
    _say_if_not_the_last(group.source, saved)
    return 0


def _say_loadable(directory: Path, iteration: int, saved: list[tuple[Source, int]]) -> int:
    print(f"the state after iteration {iteration:,} can be loaded with {' '.join(flags(directory))}")
    _say_if_not_the_last(source_of(directory, iteration), saved)
    return 0


def _say_if_not_the_last(given: Source, saved: list[tuple[Source, int]]) -> None:
    """Say so where another run has saved since: somebody may have started it from an older checkpoint on purpose."""
    last, iteration = max(saved, key=lambda each: each[0].saved_at, default=(given, 0))
    if last.saved_at <= given.saved_at or (last.run and last.run == given.run):
        return
    if given.run and last.run:
        print(f"this state is of run {given.run}; run {last.run} has saved later, after iteration {iteration:,}")
    else:
        print(f"survivors have also saved later, after iteration {iteration:,}, perhaps of another run")


def _what_is_missing(group: Group, gaps: tuple[str, ...], others: list[Group]) -> str:
    few = "; ".join(gaps[:8]) + (f"; and {len(gaps) - 8} more" if len(gaps) > 8 else "")
    also = ", ".join(f"{other.iteration:,}" for other in others)
    more = f"; files of other iterations, epochs or runs are never mixed with these: {also}" if others else ""
    return f"the saved state after iteration {group.iteration:,} lacks: {few}{more}"


def _fail(why: str, code: int = NOTHING) -> int:
    print(f"resihp: {why}", file=sys.stderr)
    return code
