# SPDX-License-Identifier: Apache-2.0
"""Measures the communicators of an epoch: seconds to make them, their number, and their device memory.

Processes on one GPU make Megatron's groups through the plugin's own `Communicators`. Imports the standard library; the
processes run `group_worker.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from setting import Row, Setting
from workers import run_workers

CASES: Final[Mapping[str, tuple[int, int]]] = {"groups-of-two": (2, 1), "groups-of-four": (4, 2)}
"""Number of workers, and size of a tensor-parallel group."""


def run(setting: Setting, name: str) -> Row:
    workers, degree = CASES[name]
    options = {"workers": workers, "degree": degree}
    rows = run_workers(setting, name, "group_worker.py", options, workers)
    return {"ok": all(row["code"] == 0 and row.get("sums") for row in rows), "workers": rows}
