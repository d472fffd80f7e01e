# SPDX-License-Identifier: Apache-2.0
"""What the last recovery took, until it is in the event log, and what all of them have seen.

May import torch, and this package's `state` and `modes.direct_way`.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from megatron_resihp import cpu
from megatron_resihp.integration.modes.direct_way import DirectTrials
from megatron_resihp.integration.state.footprint import Footprint


class Phases:
    """Measures the phases of one recovery on one worker.

    Attributes:
        seconds: of each phase.
        peaks: the most bytes of the device in use at a time in each phase; empty where they are not counted.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start, counted = time.monotonic(), cpu.counts_memory()
        if counted:
            torch.cuda.reset_peak_memory_stats()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start
            if counted:
                self.peaks[name] = max(self.peaks.get(name, 0), torch.cuda.max_memory_allocated())


@dataclass
class RecoveryNotes:
    """Notes of one recovery.

    Attributes:
        since: when the death was noticed that the current epoch recovered from, in Unix seconds, until its first step.
        phases: what each phase took.
        footprint: what the rebuild took of the device; None: nothing was built.
        ran_out: whether the device's memory has run out on the way to the epoch that comes.
        direct_way: what recoveries have seen of the way between devices, over the job's lifetime.
        last_step_at: when the last step was taken, in monotonic seconds; None: before the first one after a recovery.
    """

    since: float | None = None
    phases: Phases = field(default_factory=Phases)
    footprint: Footprint | None = None
    ran_out: bool = False
    direct_way: DirectTrials = field(default_factory=DirectTrials)
    last_step_at: float | None = None
