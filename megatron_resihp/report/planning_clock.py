# SPDX-License-Identifier: Apache-2.0
"""Measures planning time, for commands that plan. May import: the standard library, rich and `pipeline`."""

from __future__ import annotations

import time

from rich.progress import Progress

from megatron_resihp.pipeline.compiled import COMPILING, PlanningClock


def planning_clock(progress: Progress) -> PlanningClock:
    """A clock that leaves out compilation. Compilation takes long and shows no progress, so a line announces it."""
    return PlanningClock(time.perf_counter, lambda: progress.console.print(f"resihp: {COMPILING}", soft_wrap=True))
