# SPDX-License-Identifier: Apache-2.0
"""Times what runs on a device. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import torch

ROUNDS: Final = 3
IN_A_ROW: Final = 5
"""Calls between two looks at the clock, so that the time in which the host begins a copy is hidden, as in a job."""
CALLS: Final = ROUNDS * IN_A_ROW


def fastest(way: Callable[[], Any], device: torch.device) -> float:
    """The least seconds that a call of `way` takes, of CALLS calls."""
    times = []
    for _ in range(ROUNDS):
        start = time.monotonic()
        for _ in range(IN_A_ROW):
            way()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.monotonic() - start) / IN_A_ROW)
    return max(min(times), 1e-9)
