# SPDX-License-Identifier: Apache-2.0
"""Proposed changes of plan, written to files for a user to decide on. May import `coding` and `plan`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron_resihp.coding import encode
from megatron_resihp.plan import ParallelPlan

PROPOSALS: Final = "proposals"


@dataclass(frozen=True)
class Proposal:
    """A change that a user is to decide on, as its file has it; see `policy.Recommend` for the numbers."""

    why: str
    gain: float
    lost_s: float
    cost_s: float
    iteration_s: float
    plan: ParallelPlan


class Proposals:
    """The proposals of one job. `run_dir`: where they are written."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / PROPOSALS
        self._written = 0

    def write(self, proposal: Proposal) -> Path:
        """Write the next file."""
        self._directory.mkdir(exist_ok=True)
        self._written += 1
        path = self._directory / f"{self._written}.json"
        path.write_text(json.dumps(encode(proposal)) + "\n")
        return path
