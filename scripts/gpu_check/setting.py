# SPDX-License-Identifier: Apache-2.0
"""Shared by all parts of the check: place, time limit and output of a run. Imports the standard library only."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

REPOSITORY: Final = Path(__file__).resolve().parents[2]

SEVERAL_RANKS: Final[Mapping[str, str]] = {
    # NCCL 2.30: several ranks of one communicator on one GPU; two by default, more with few thread blocks for each.
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "2",
    "NCCL_NVLS_ENABLE": "0",
    # Megatron insists on it for tensor parallelism before Blackwell.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}

REHEARSED_LIMIT_S: Final = 600.0
"""Time limit of a rehearsed case, where few cores do the work of a device."""

Row = dict[str, Any]
"""One finding: `case`, `ok`, and figures. Seconds end in `_s`, sizes in `_mib` or `_bytes`, rates in `_gb_per_s`."""


@dataclass(frozen=True)
class Setting:
    """Where and how the parts run.

    Attributes:
        stand_in: on CPUs, with gloo in NCCL's place and everything small: a rehearsal of the check itself.
        out: a folder for the parts' files.
        ends_at: monotonic time at which all cases must have ended.
    """

    stand_in: bool
    out: Path
    ends_at: float

    @property
    def backend(self) -> str:
        return "gloo" if self.stand_in else "nccl"

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of processes that stand for workers."""
        paths = [str(REPOSITORY), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        base = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        # All ranks share one device: the first of those that a scheduler has given, or of all.
        device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        one_device = {} if self.stand_in else {**SEVERAL_RANKS, "CUDA_VISIBLE_DEVICES": device}
        return base | {"OMP_NUM_THREADS": "1"} | one_device | more

    def seconds_left(self) -> float:
        return max(0.0, self.ends_at - time.monotonic())

    def limit(self, seconds: float) -> float:
        """The longest that a case may take which may take `seconds` on a device."""
        return REHEARSED_LIMIT_S if self.stand_in else seconds


def end_all(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """Kill what still runs, and wait for it."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def python(*words: str) -> list[str]:
    return [sys.executable, *words]
