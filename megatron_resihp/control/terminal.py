# SPDX-License-Identifier: Apache-2.0
"""Lines of a launcher for its terminal. That nobody may read them is `streams`' concern.

Under SLURM, what reads them is `srun` on the job's first node. Imports the standard library only.
"""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print a line to standard output."""
    print(text, flush=True)


def warn(text: str) -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr, flush=True)
