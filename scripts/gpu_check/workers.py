# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a case that stand for workers, and collects what each of them writes to a file of its own.

Imports the standard library, and the environment in which the plugin starts its workers.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from setting import Row, Setting, end_all, python

from megatron_resihp.control.node.environment import NCCL

PROCESS_S: Final = 60.0


def run_workers(
    setting: Setting, name: str, script: str, options: Mapping[str, Any], workers: int, awaited: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Row]:  # fmt: skip
    """The findings of the processes of a case, once they have ended; those that are not awaited are killed.

    Args:
        name: of the case.
        script: next to this file; its argument is a JSON object of `options`, `rank`, `backend`, `meeting` (a file
            where the processes meet) and `result` (the file to write).
        awaited: the number of first processes that are awaited; None: all.
        environment: added to the plugin's own.
    """
    meeting = setting.out / name
    meeting.mkdir(parents=True)
    added = setting.environment(**{**NCCL, "TORCH_GLOO_LAZY_INIT": "1", **(environment or {})})
    shared = {**options, "backend": setting.backend, "meeting": str(meeting / "store")}
    processes = [
        subprocess.Popen(
            python(script, json.dumps({**shared, "rank": rank, "result": str(_result(meeting, rank))})),
            cwd=Path(__file__).parent, env=added, stdout=(meeting / f"log{rank}").open("w"), stderr=subprocess.STDOUT,
        )
        for rank in range(workers)
    ]  # fmt: skip
    try:
        return [_await(setting, process, meeting, rank) for rank, process in enumerate(processes[:awaited])]
    finally:
        end_all(processes)


def _result(meeting: Path, rank: int) -> Path:
    return meeting / f"result{rank}.json"


def _await(setting: Setting, process: subprocess.Popen[bytes], meeting: Path, rank: int) -> Row:
    """The findings of a process, once it has ended."""
    seconds = setting.limit(PROCESS_S)
    deadline = time.monotonic() + seconds
    try:
        process.wait(max(0.1, deadline - time.monotonic()))
        ended: Row = {"code": process.returncode}
    except subprocess.TimeoutExpired:
        ended = {"code": None, "error": f"still ran after {seconds:g} s"}
    path = _result(meeting, rank)
    found: Row = json.loads(path.read_text()) if path.exists() else {}
    if ended["code"] != 0 and "error" not in found:
        lines = (meeting / f"log{rank}").read_text(errors="replace").splitlines()
        ended.setdefault("error", " | ".join(lines[-3:])[-300:])
    return found | ended
