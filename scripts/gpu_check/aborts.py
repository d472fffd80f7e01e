# SPDX-License-Identifier: Apache-2.0
"""Checks the survivors' communicators, device and memory after a peer dies or stops.

Three processes, on one GPU, have the world and three more groups. Rank 2 ends; ranks 0 and 1 have collectives under way
in some of the groups, and kernels queued behind. A second thread aborts through the plugin's own `Communicators`, as in
a recovery. Imports the standard library; the processes run `abort_worker.py`.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from setting import Row, Setting, end_all, python

WORLD: Final = 3
ABORT_S: Final = 5.0
"""The longest that an abort may take."""
LEFT_MIB: Final = 200
"""The most device memory that may be missing afterwards."""
PROCESS_S: Final = 60.0
REHEARSED_PROCESS_S: Final = 240.0
"""Importing torch alone may take a minute on few cores."""


@dataclass(frozen=True)
class Case:
    """One way in which a peer is lost.

    Attributes:
        hung: which of the four groups have collectives under way.
        peer: how rank 2 is lost: it "dies", is "stopped", or dies while a group is "made".
        how: "plugin", or an alternative for comparison: "serial" aborts, torch's "shrink".
        environment: of all processes.
        required: whether the plugin depends on it; the other cases are for comparison.
    """

    hung: tuple[int, ...] = ()
    peer: str = "dies"
    how: str = "plugin"
    environment: Mapping[str, str] = field(default_factory=dict)
    required: bool = True


NON_BLOCKING: Final = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "10"}
CASES: Final[Mapping[str, Case]] = {
    "first-hangs": Case((0,)),
    "last-hangs": Case((3,)),
    "two-hang": Case((1, 3)),
    "peer-stopped": Case((1, 3), peer="stopped"),
    "two-hang-without-cumem": Case((1, 3), environment={"NCCL_CUMEM_ENABLE": "0"}),
    "while-made": Case(peer="made"),
    "two-hang-non-blocking": Case((1, 3), environment=NON_BLOCKING, required=False),
    "while-made-non-blocking": Case(peer="made", environment=NON_BLOCKING, required=False),
    "serial-two-hang": Case((1, 3), how="serial", required=False),
    "shrink": Case((0,), how="shrink", required=False),
}
ON_CPU: Final = ("first-hangs", "two-hang", "peer-stopped")
"""Those that are not the same, or impossible, with gloo."""


def run(setting: Setting) -> Iterator[Row]:
    names = [name for name in CASES if not setting.stand_in or name in ON_CPU]
    yield from setting.each(names, partial(_run, setting))


def _run(setting: Setting, name: str) -> Row:
    case = CASES[name]
    meeting = setting.out / f"aborts-{name}"
    meeting.mkdir(parents=True)
    environment = setting.environment(**own_environment() | dict(case.environment))
    options = {**asdict(case), "backend": setting.backend, "meeting": str(meeting / "store")}
    worker = str(Path(__file__).with_name("abort_worker.py"))
    processes = [
        subprocess.Popen(
            python(worker, json.dumps({**options, "rank": rank, "result": str(result_of(meeting, rank))})),
            env=environment, stdout=(meeting / f"log{rank}").open("w"), stderr=subprocess.STDOUT,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    try:
        rows = [await_result(setting, process, meeting, rank) for rank, process in enumerate(processes[:2])]
    finally:
        end_all(processes)
    good = all(map(_is_good, rows))
    return {"ok": good or not case.required, "good": good, "required": case.required, "survivors": rows}


def own_environment() -> dict[str, str]:
    """The environment in which the plugin starts its workers."""
    from megatron_resihp.control.node.environment import NCCL

    return {**NCCL, "TORCH_GLOO_LAZY_INIT": "1"}


def result_of(meeting: Path, rank: int) -> Path:
    return meeting / f"result{rank}.json"


def await_result(setting: Setting, process: subprocess.Popen[bytes], meeting: Path, rank: int) -> dict[str, Any]:
    """The findings of a process, once it has ended."""
    seconds = REHEARSED_PROCESS_S if setting.stand_in else PROCESS_S
    deadline = time.monotonic() + seconds
    try:
        process.wait(max(0.1, deadline - time.monotonic()))
        ended: dict[str, Any] = {"code": process.returncode}
    except subprocess.TimeoutExpired:
        ended = {"code": None, "error": f"still ran after {seconds:g} s"}
    path = result_of(meeting, rank)
    found = json.loads(path.read_text()) if path.exists() else {}
    if ended["code"] != 0 and "error" not in found:
        lines = (meeting / f"log{rank}").read_text(errors="replace").splitlines()
        ended.setdefault("error", " | ".join(lines[-3:])[-300:])
    return found | ended


def _is_good(row: Mapping[str, Any]) -> bool:
    return (
        row["code"] == 0
        and row.get("abort_s", ABORT_S) < ABORT_S
        and row.get("device_usable") is True
        and row.get("next_world_sums") is True
        and row.get("left_mib", 0) <= LEFT_MIB
    )
