# SPDX-License-Identifier: Apache-2.0
"""Where a job's coordinator is, for processes that may outlive one: the run directory's file names the one that leads.

May import: the standard library and `address`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron_resihp.control.transport.address import Address, parse_address

FILE_NAME: Final = "coordinator.json"
RESULT: Final = "exit_code"
"""The file with the code that the job has ended with; not there while it runs."""
LEADERLESS_S: Final = 120.0
"""How long the processes of a job wait for another coordinator when they have lost one."""
ANSWER_S: Final = 15.0
"""A coordinator that does not answer for so long, beyond what it was asked to wait, may not lead any more."""


@dataclass(frozen=True)
class Leaders:
    """The coordinators of one job, one after the other."""

    run_dir: Path

    def address(self) -> Address | None:
        """Where the last one serves its store; None: that can't be read."""
        try:
            return parse_address(str(json.loads((self.run_dir / FILE_NAME).read_text())["store"]))
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def none_follows(self) -> bool:
        """Whether the job is over: its coordinator has written how it ended, and is not there any more."""
        try:
            return (self.run_dir / RESULT).exists() and not (self.run_dir / FILE_NAME).exists()
        except OSError:
            return False
