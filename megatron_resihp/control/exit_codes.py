# SPDX-License-Identifier: Apache-2.0
"""Exit codes of `resihp launch`, which tell job scripts what to do next (docs/usage.md), and of workers.

Imports nothing.
"""

from typing import Final

FINISHED: Final = 0
"""Training came to its end, or to where the job's own flags stop it."""
STOPPED_BY_FLAGS: Final = "stopped by its own flags"
"""How the reason of the latter begins: a chain of jobs goes on after it."""
FAILED: Final = 1
"""The program's own error: it would fail again."""
REFUSED: Final = 2
"""Bad arguments, as argparse ends: nothing has begun. A worker that refuses its arguments, and its job, end so."""
NO_PLAN: Final = 69
"""Survivors could not go on, and have written what they hold."""
RETRY: Final = 75
"""What the job ran on was lost: node 0, the coordinator, a worker before the first iteration."""
FENCED: Final = 75
"""A worker that was given up for dead and is not."""


def stopped_by(signal: int) -> int:
    """The job was told to end, and ended in order."""
    return 128 + signal
