# SPDX-License-Identifier: Apache-2.0
"""Lines of a launcher for its terminal, which may be gone: then they are dropped, and the launcher goes on.

Under SLURM, what reads them is `srun` on the job's first node. Imports the standard library only.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO


def say(text: str) -> None:
    """Print a line to standard output."""
    _print(text, sys.stdout)


def warn(text: str) -> None:
    """Print a line to standard error."""
    _print(text, sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    try:
        print(text, file=stream, flush=True)
    except OSError:
        _silence(stream)


def _silence(stream: TextIO) -> None:
    """Lose what is still unwritten, too: otherwise the interpreter tries it once more, and exits with 120."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, stream.fileno())
    except OSError:
        pass
    finally:
        os.close(nothing)
