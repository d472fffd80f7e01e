# SPDX-License-Identifier: Apache-2.0
"""The device and libraries on which all other figures are measured. Imports the standard library and torch."""

from __future__ import annotations

import importlib.util
import platform
import subprocess
from typing import Final

import torch
from setting import Row, Setting

CASES: Final = {"device": "what is here"}
NEEDED: Final = ("megatron", "matplotlib", "numba", "numpy", "psutil", "rich", "scipy")
"""Modules that the plugin imports besides torch."""
SEVERAL_RANKS_SINCE: Final = (2, 30)
"""The first NCCL version that lets several ranks of a communicator share a GPU."""


def run(setting: Setting, name: str) -> Row:
    row: Row = {"python": platform.python_version(), "torch": torch.__version__}
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return row | {"ok": False, "error": f"not installed: {', '.join(missing)}; take their wheels along"}
    if setting.stand_in:
        return row | {"ok": True, "device": f"CPU stand-in ({platform.machine()})"}
    nccl = torch.cuda.nccl.version()
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False).stdout.strip()
    row |= {
        "ok": nccl[:2] >= SEVERAL_RANKS_SINCE, "device": properties.name, "memory_mib": properties.total_memory >> 20,
        "driver": driver, "cuda": torch.version.cuda, "nccl": ".".join(map(str, nccl)),
    }  # fmt: skip
    if not row["ok"]:
        row["error"] = "NCCL is older than 2.30: source setup.sh of the bundle first"
    return row
