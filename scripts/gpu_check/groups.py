# SPDX-License-Identifier: Apache-2.0
"""Measures the communicators of an epoch: seconds to make them, their number, and their device memory.

Processes on one GPU make Megatron's groups through the plugin's own `Communicators`. Imports the standard library; the
processes run `group_worker.py`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from aborts import await_result, own_environment
from setting import Row, Setting, end_all, python

CASES: Final[Mapping[str, tuple[int, int]]] = {"groups-of-two": (2, 1), "groups-of-four": (4, 2)}
"""Number of workers, and size of a tensor-parallel group."""


def run(setting: Setting) -> Iterator[Row]:
    yield from setting.each(list(CASES), partial(_run, setting))


def _run(setting: Setting, name: str) -> Row:
    workers, degree = CASES[name]
    meeting = setting.out / name
    meeting.mkdir(parents=True)
    options = {"backend": setting.backend, "workers": workers, "degree": degree, "meeting": str(meeting / "store")}
    worker = str(Path(__file__).with_name("group_worker.py"))
    processes = [
        subprocess.Popen(
            python(worker, json.dumps({**options, "rank": rank, "result": str(meeting / f"result{rank}.json")})),
            env=setting.environment(**own_environment()), stdout=(meeting / f"log{rank}").open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(workers)
    ]  # fmt: skip
    try:
        rows: list[dict[str, Any]] = [await_result(setting, each, meeting, rank) for rank, each in enumerate(processes)]
    finally:
        end_all(processes)
    return {"ok": all(row["code"] == 0 and row.get("sums") for row in rows), "workers": rows}
