# SPDX-License-Identifier: Apache-2.0
"""Makes a job's run directory, which only its user may look into, and notes there which nodes know of the job's end.

May import: the standard library, `launch_options` and `terminal`.
"""

from __future__ import annotations

import time
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from megatron_resihp.control.commands.launch.launch_options import LaunchError, LaunchOptions
from megatron_resihp.control.terminal import warn

MODE: Final = 0o700
JOB_ENDED: Final = "job_ended"
"""Folder of the run directory with a file per node, whose launcher writes it once the coordinator has told it that the
job has ended. Job scripts look for their own node's: over NFS, others' files may be seen a minute late."""


def make_run_dir(options: LaunchOptions) -> Path:
    """The run directory that is asked for, or a new one. One that is there keeps its mode."""
    run_dir = options.run_dir
    try:
        run_dir = run_dir or _unused(options.runs / time.strftime("%Y%m%d-%H%M%S"))
        run_dir.mkdir(MODE, parents=True, exist_ok=True)
        (run_dir / "logs").mkdir(exist_ok=True)
        with TemporaryFile(dir=run_dir / "logs"):
            return run_dir
    except OSError as error:
        raise unwritable(run_dir or options.runs, error) from error


def unwritable(run_dir: Path, error: OSError) -> LaunchError:
    return LaunchError(f"the run directory {run_dir} cannot be written ({error.strerror}); give another --run-dir")


def note_job_end(run_dir: Path, node: int, code: int) -> None:
    """Let this node's job script know that the job has ended with this exit code, and not just this launcher."""
    path = _job_end(run_dir, node)
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{code}\n")
    except OSError as error:
        warn(f"resihp: {path} can't be written ({error.strerror})")


def forget_job_end(run_dir: Path, node: int) -> None:
    """This launcher is part of a job that goes on, whatever an earlier one was told."""
    try:
        _job_end(run_dir, node).unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(run_dir, error) from error


def _job_end(run_dir: Path, node: int) -> Path:
    return run_dir / JOB_ENDED / f"node_{node}"


def _unused(path: Path) -> Path:
    """A new directory of that name, or of one like it."""
    for candidate in chain([path], (path.with_name(f"{path.name}-{number}") for number in count(2))):
        try:
            candidate.mkdir(MODE, parents=True)
            return candidate
        except FileExistsError:
            continue
    raise AssertionError("unreachable")
