# SPDX-License-Identifier: Apache-2.0
"""Makes a job's run directory, which only its user may look into.

May import: the standard library and `launch_options`.
"""

from __future__ import annotations

import time
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from megatron_resihp.control.commands.launch_options import LaunchError, LaunchOptions

MODE: Final = 0o700


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


def _unused(path: Path) -> Path:
    """A new directory of that name, or of one like it."""
    for candidate in chain([path], (path.with_name(f"{path.name}-{number}") for number in count(2))):
        try:
            candidate.mkdir(MODE, parents=True)
            return candidate
        except FileExistsError:
            continue
    raise AssertionError("unreachable")
