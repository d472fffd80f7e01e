# SPDX-License-Identifier: Apache-2.0
"""How long planners think, for commands that ask them. May import: the standard library, rich and `pipeline`."""

from __future__ import annotations

import time

from rich.progress import Progress

from megatron_resihp.pipeline.compiled import COMPILING, PlanningClock


def planning_clock(progress: Progress) -> PlanningClock:
    """What is compiled first takes long, is no part of it and draws nothing meanwhile, so a line says so."""
    return PlanningClock(time.perf_counter, lambda: progress.console.print(f"resihp: {COMPILING}", soft_wrap=True))
